"""What trackers are told of a run: each step once, in order, when all is known of it, and what else happens."""

from __future__ import annotations

from collections.abc import Iterator

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
    Resumed,
    Settled,
)

__all__ = ["Happening", "Stepped", "Tracking"]


_SETTLED = 100


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is done.

    Attributes:
        step: which, 0-based.
        loss: mean over its micro-batches; None where none was told, or it was not finite.
        norm: L2 norm of the mean gradient of the whole model, before it was clipped; None where it was not finite.
        rate: the learning rate, of the optimizer's first group; None in a loop of one's own.
        samples_per_s: from the step before to this one; None of the first of an attempt.
        memory: bytes in memory of the worker that has the most; 0 where that is not known.
        workers: that were there.
        again: whether it was done before: the job has gone back to a checkpoint since.
    """

    step: int
    loss: float | None
    norm: float | None
    rate: float | None
    samples_per_s: float | None
    memory: int
    workers: int
    again: bool


Happening = JobStarted | Resumed | Stepped | Evaluated | Detected | Checkpointed | JobEnded


class Tracking:
    """Makes of a run's events, told in the order of time, what trackers are told."""

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, samples: int) -> None:
        self._commits, self._samples = Commits(), samples
        self._waiting: list[Done] = []
        self._settled: dict[int, Settled] = {}
        self._next = 0

    def hear(self, at: float, event: Event) -> Iterator[Happening]:
        """Takes an event into account; yields what can be told behind it.

        A step is told once it is settled, or a later one is done. One that was taken back before is not told.
        """
        if isinstance(event, JobStarted):
            self._begin(event.samples_per_step)
        self._waiting += self._commits.hear(at, event)
        match event:
            case Settled():
                self._settled[event.step] = event
                if len(self._settled) > _SETTLED:  # of steps that were told without
                    self._settled.pop(min(self._settled))
                yield from self._told(event.step + 1)
            case Agreed():
                self._waiting = [done for done in self._waiting if done.step < self._commits.figures.done]
            case Resumed():
                self._next = event.step
        if self._waiting:
            yield from self._told(self._waiting[-1].step)
        if isinstance(event, JobEnded):
            yield from self._told(self._commits.figures.done)
        if isinstance(event, JobStarted | Resumed | Evaluated | Detected | Checkpointed | JobEnded):
            yield event

    def _told(self, stop: int) -> Iterator[Stepped]:
        """Tells the steps before this one that were not told so far."""
        while self._waiting and self._waiting[0].step < stop:
            done = self._waiting.pop(0)
            settled = self._settled.pop(done.step, None)
            yield Stepped(
                step=done.step,
                loss=done.loss,
                norm=settled.norm if settled else None,
                rate=settled.rate if settled else None,
                samples_per_s=self._samples / done.seconds if done.seconds else None,
                memory=done.memory,
                workers=done.workers,
                again=done.step < self._next,
            )
            self._next = max(self._next, done.step + 1)
