"""Event files for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.telemetry.events import Detected, Evaluated, JobStarted
from holdfast.telemetry.tracking import Stepped
from holdfast.trackers.port import Tracker
from holdfast.trackers.scalars import scalars_of

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(Tracker):
    """Writes scalars under the number of their step, and losses of workers as text; each attempt anew."""

    anew = True
    needs = "tensorboardX"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._writer: SummaryWriter | None = None
        self._step, self._at = 0, 0.0

    def on_start(self, job: JobStarted) -> None:
        """Begins an event file, and removes those of before, which say the same."""
        from tensorboardX import SummaryWriter

        self.close()
        for file in self.folder.glob("events.out.tfevents.*"):
            file.unlink()
        self._writer = SummaryWriter(logdir=str(self.folder))
        self._step, self._at = 0, job.wall_time

    def on_step(self, step: Stepped) -> None:
        """A point of each curve."""
        self._step, self._at = step.step, step.wall_time
        for name, value in scalars_of(step).items():
            self._add(name, value, step.step)

    def on_evaluate(self, evaluated: Evaluated) -> None:
        """A point for each score."""
        for name, value in scalars_of(evaluated).items():
            self._add(name, value, evaluated.step)

    def on_failure(self, lost: Detected) -> None:
        """A line of text."""
        if self._writer is not None:
            self._writer.add_text("failures", f"worker {lost.worker} is lost: {lost.how}", self._step, self._at)

    def _add(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, step, self._at)

    def flush(self) -> None:
        """See Tracker.flush."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """See Tracker.close."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
