"""Tables of steps and of evaluations, as comma-separated values."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TextIO

from msgspec.structs import asdict

from holdfast.telemetry.events import Evaluated, JobStarted
from holdfast.telemetry.tracking import Stepped
from holdfast.trackers.port import Tracker

__all__ = ["CsvTracker"]


class CsvTracker(Tracker):
    """Writes ``steps.csv`` and ``evaluations.csv``, anew for each attempt; what is not known is empty."""

    anew = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files: list[TextIO] = []

    def on_start(self, job: JobStarted) -> None:
        """Begins the tables."""
        self.close()
        self._files = [
            (self.folder / name).open("w", newline="", encoding="utf-8") for name in ("steps.csv", "evaluations.csv")
        ]
        self._steps, self._evaluations = map(csv.writer, self._files)
        self._steps.writerow(Stepped.__struct_fields__)
        self._evaluations.writerow(("step", "score", "value", "best"))

    def on_step(self, step: Stepped) -> None:
        """A row."""
        self._steps.writerow("" if value is None else value for value in asdict(step).values())

    def on_evaluate(self, evaluated: Evaluated) -> None:
        """A row for each score."""
        for name, value in evaluated.scores:
            self._evaluations.writerow((evaluated.step, name, "" if value is None else value, evaluated.best))

    def flush(self) -> None:
        """See Tracker.flush."""
        for file in self._files:
            file.flush()

    def close(self) -> None:
        """See Tracker.close."""
        for file in self._files:
            file.close()
        self._files = []
