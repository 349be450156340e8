"""The steps of a run as they are done, each with what is told of it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.telemetry.events import Event, StepOps
from holdfast.telemetry.figures import Figures

__all__ = ["Commits", "Done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that is done.

    Attributes:
        step: which, 0-based.
        at: when, in seconds of the clock by which events are told.
        seconds: since the one before; None of the first one of an attempt, which waits for much.
        loss: mean over its micro-batches; None if it was not finite, or nobody told it.
        told: whether somebody has told it.
        memory: bytes in memory of the process that has the most; 0 where that is not known.
        workers: that were there.
    """

    step: int
    at: float
    seconds: float | None
    loss: float | None
    told: bool
    memory: int
    workers: int


class Commits:
    """Finds out of a run's events, told in the order of time, when each step is done."""

    def __init__(self) -> None:
        self.figures = Figures()
        """What is known of the run so far."""
        self._losses: dict[int, tuple[int, float | None]] = {}
        self._memory: dict[int, int] = {}
        self._stepped = False

    def hear(self, at: float, event: Event) -> list[Done]:
        """Takes an event into account, as :meth:`Figures.hear`; returns the steps that are done by it, in their order.

        Steps that are taken back, as when a job goes back to a checkpoint, are done again later.
        """
        figures = self.figures
        done, last = figures.done, figures.last
        if isinstance(event, StepOps) and event.step >= done:  # else it is seen late
            self._note(event)
        figures.hear(at, event)
        if figures.done <= done or not figures.committed:
            return []
        seconds = (figures.last - last) / (figures.done - done) if self._stepped else None
        self._stepped = True
        found = [self._done(step, seconds) for step in range(done, figures.done)]
        self._losses = {step: each for step, each in self._losses.items() if step >= figures.done}
        self._memory = {step: each for step, each in self._memory.items() if step >= figures.done}
        return found

    def _note(self, event: StepOps) -> None:
        if event.knows_loss and event.generation >= self._losses.get(event.step, (0, None))[0]:
            self._losses[event.step] = event.generation, event.loss
        self._memory[event.step] = max(event.memory, self._memory.get(event.step, 0))

    def _done(self, step: int, seconds: float | None) -> Done:
        return Done(
            step=step,
            at=self.figures.last,
            seconds=seconds,
            loss=self._losses.get(step, (0, None))[1],
            told=step in self._losses,
            memory=self._memory.get(step, 0),
            workers=len(self.figures.present.workers),
        )
