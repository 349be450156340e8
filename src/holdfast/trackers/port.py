"""What a tracker is."""

from __future__ import annotations

from pathlib import Path

from holdfast.telemetry.events import Checkpointed, Detected, Evaluated, JobEnded, JobStarted, Resumed
from holdfast.telemetry.tracking import Happening, Stepped

__all__ = ["Tracker", "tell"]


class Tracker:
    """Is told of a run, in a process that nothing waits for which trains. A subclass has those methods that it wants.

    Args:
        folder: of its own, in which it may write; there is nothing of others in it.

    Attributes:
        anew: whether it is told all of an attempt again when it begins again, rather than what it was not told yet.
        needs: a module that has to be installed for it; empty if none has.
    """

    anew = False
    needs = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_start(self, job: JobStarted) -> None:
        """An attempt at the job begins; or it is gone on with by a tracker that was told a part of it before."""

    def on_resume(self, resumed: Resumed) -> None:
        """It goes on from a checkpoint."""

    def on_step(self, step: Stepped) -> None:
        """A step is done."""

    def on_evaluate(self, evaluated: Evaluated) -> None:
        """The state before a step was evaluated."""

    def on_failure(self, lost: Detected) -> None:
        """A worker was lost."""

    def on_checkpoint(self, made: Checkpointed) -> None:
        """A checkpoint is complete."""

    def on_end(self, ended: JobEnded) -> None:
        """The job is over."""

    def flush(self) -> None:
        """Sees to it that what it was told is kept: it is not told again. Called each second, if there was anything."""

    def close(self) -> None:
        """Nothing more is told."""


def tell(tracker: Tracker, happening: Happening) -> None:
    """Tells a tracker of something."""
    match happening:
        case JobStarted():
            tracker.on_start(happening)
        case Resumed():
            tracker.on_resume(happening)
        case Stepped():
            tracker.on_step(happening)
        case Evaluated():
            tracker.on_evaluate(happening)
        case Detected():
            tracker.on_failure(happening)
        case Checkpointed():
            tracker.on_checkpoint(happening)
        case JobEnded():
            tracker.on_end(happening)
