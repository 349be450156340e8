"""What trackers are told of a run: each step once, in order, when all is known of it, and what else happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from holdfast.telemetry.commits import Commits, Done
from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    Detected,
    Evaluated,
    Event,
    JobEnded,
    JobStarted,
    Judged,
    Resumed,
    StepOps,
)

__all__ = ["Happening", "Stepped", "Tracking"]


_JUDGED = 100


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is done.

    Attributes:
        step: which, 0-based.
        loss: mean over its micro-batches; None where none was told, or it was not finite.
        norm: L2 norm of the mean gradient of the whole model, before it was clipped; None where it was not finite, or
            whoever knew died before it could say so.
        rate: the learning rate, of the optimizer's first group; None in a loop of one's own, and likewise.
        samples_per_s: from the step before to this one; None of the first of an attempt.
        memory: bytes in memory of the worker that has the most; 0 where that is not known.
        workers: that were there.
        wall_time: when it was done, in seconds since 1970.
        again: whether it was done before: the job has gone back to a checkpoint since.
    """

    step: int
    loss: float | None
    norm: float | None
    rate: float | None
    samples_per_s: float | None
    memory: int
    workers: int
    wall_time: float
    again: bool


Happening = JobStarted | Resumed | Stepped | Evaluated | Detected | Checkpointed | JobEnded


class Tracking:
    """Makes of a run's events, told in the order of time, what trackers are told.

    Attributes:
        backs: how often steps were taken back in this attempt that had been told.
    """

    def __init__(self) -> None:
        self._begin(0.0, None)

    def _begin(self, at: float, job: JobStarted | None) -> None:
        self._commits, self.backs = Commits(), 0
        self._samples = job.samples_per_step if job else 0
        self._clock = job.wall_time - at if job else 0.0
        self._waiting: deque[Done] = deque()
        self._judged: dict[int, Judged] = {}
        self._next, self._last = 0, -1

    def hear(self, at: float, event: Event) -> Iterator[Happening]:
        """Takes an event into account; yields what can be told behind it.

        A step is told once it is judged, or a later one is done. One that was taken back before is not told.
        """
        if isinstance(event, JobStarted):
            self._begin(at, event)
        self._waiting += self._commits.hear(at, event)
        match event:
            case Judged():
                self._judged[event.step] = event
                if len(self._judged) > _JUDGED:  # of steps that were told without
                    del self._judged[next(iter(self._judged))]
            case StepOps(knows_loss=True):
                self._fill(event)
            case Agreed():
                self._take_back(self._commits.figures.done)
            case Resumed():
                self._next = event.step
        while self._waiting and (len(self._waiting) > 1 or self._waiting[0].step in self._judged):
            yield self._told()
        if isinstance(event, JobEnded):
            yield from self.end()
        if isinstance(event, JobStarted | Resumed | Evaluated | Detected | Checkpointed | JobEnded):
            yield event

    def end(self) -> Iterator[Stepped]:
        """Nothing more comes: yields what waits for more to be known of it."""
        while self._waiting:
            yield self._told()

    def _fill(self, event: StepOps) -> None:
        """The loss of a step may be told behind what says that it is done, where that was concluded."""
        for place, done in enumerate(self._waiting):
            if done.step == event.step and not done.told:
                self._waiting[place] = replace(done, loss=event.loss, told=True)

    def _take_back(self, step: int) -> None:
        """Steps from this one on are to be done again, or are done only now."""
        self._waiting = deque(done for done in self._waiting if done.step < step)
        self._judged = {number: each for number, each in self._judged.items() if number < step}
        if step <= self._last:
            self.backs, self._last = self.backs + 1, step - 1

    def _told(self) -> Stepped:
        done = self._waiting.popleft()
        judged = self._judged.pop(done.step, None)
        again, self._next = done.step < self._next, max(self._next, done.step + 1)
        self._last = done.step
        return Stepped(
            step=done.step,
            loss=done.loss,
            norm=judged.norm if judged else None,
            rate=judged.rate if judged else None,
            samples_per_s=self._samples / done.seconds if done.seconds else None,
            memory=done.memory,
            workers=done.workers,
            wall_time=self._clock + done.at,
            again=again,
        )
