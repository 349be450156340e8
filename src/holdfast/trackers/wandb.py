"""Runs of Weights & Biases."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from holdfast.telemetry.events import Checkpointed, Detected, Evaluated, JobEnded, JobStarted
from holdfast.telemetry.tracking import Stepped
from holdfast.trackers.port import Tracker
from holdfast.trackers.scalars import scalars_of

__all__ = ["WandbTracker"]


class WandbTracker(Tracker):
    """Writes a run: offline, for ``wandb sync``, unless WANDB_MODE says otherwise; other variables of its count, too.

    Offline it is written anew when it begins again, as a run in two parts can hardly be put together; online it is gone
    on with. The step is a metric of its own, the key of all others: a job that goes back to a checkpoint does steps
    again, and what has a smaller number than before would else be left out.
    """

    needs = "wandb"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._mode = os.environ.get("WANDB_MODE", "offline")
        self.anew = self._mode != "online"
        self._run: Any = None
        self._step = 0

    def on_start(self, job: JobStarted) -> None:
        """Begins the run of this attempt, or goes on with it."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing leaves the machine unasked
        import wandb

        self.close()
        if self.anew:
            for before in (self.folder / "wandb").glob("offline-run-*"):
                shutil.rmtree(before)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", job.name),
            id=f"{job.name}-{job.wall_time:.0f}",
            resume="allow",
            dir=str(self.folder),
            mode=self._mode,  # type: ignore[arg-type]
            config={"workers": job.workers, "steps": job.steps, "samples_per_step": job.samples_per_step},
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, step: Stepped) -> None:
        """A point of each curve."""
        self._step = step.step
        self._run.log({"step": step.step, **scalars_of(step)})

    def on_evaluate(self, evaluated: Evaluated) -> None:
        """A point for each score."""
        self._run.log({"step": evaluated.step, **scalars_of(evaluated)})
        if evaluated.best:
            self._run.summary["best_step"] = evaluated.step

    def on_failure(self, lost: Detected) -> None:
        """A point: one more was lost."""
        self._run.log({"step": self._step, "failures/lost": 1})

    def on_checkpoint(self, made: Checkpointed) -> None:
        """The newest, in the summary."""
        self._run.summary["checkpoint"] = made.step

    def on_end(self, ended: JobEnded) -> None:
        """How, in the summary."""
        self._run.summary["outcome"] = ended.outcome

    def close(self) -> None:
        """See Tracker.close."""
        if self._run is not None:
            self._run.finish()
        self._run = None
