"""Runs of MLflow."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from holdfast.telemetry.events import Checkpointed, Detected, Evaluated, JobEnded, JobStarted
from holdfast.telemetry.tracking import Stepped
from holdfast.trackers.port import Tracker
from holdfast.trackers.scalars import scalars_of

__all__ = ["MlflowTracker"]

_RUN = "run-id"
_ATTEMPT = "holdfast.began"
_UNFIT = re.compile(r"[^\w\-. /]", re.ASCII)
"""What no name of a metric may have."""
_BATCH = 1000
"""So many metrics are sent at once at most; MLflow takes no more."""


class MlflowTracker(Tracker):
    """Writes a run of the experiment of the job's name: to files, unless MLFLOW_TRACKING_URI says otherwise."""

    needs = "mlflow"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which MLflow would rather not have any more
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves the machine unasked
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", folder.absolute().as_uri()))
        self._run = ""
        self._metrics: list[Any] = []
        self._at = 0.0

    def on_start(self, job: JobStarted) -> None:
        """Begins the run of this attempt, or goes on with it."""
        from mlflow.entities import Param

        self.flush()
        self._at, began = job.wall_time, f"{job.wall_time:.3f}"
        if self._find(began):
            self._client.update_run(self._run, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(job.name)
        number = self._client.create_experiment(job.name) if experiment is None else experiment.experiment_id
        if experiment is not None and experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(number)
        self._run = self._client.create_run(number, tags={_ATTEMPT: began}, run_name=job.name).info.run_id
        (self.folder / _RUN).write_text(self._run)
        facts = {"workers": job.workers, "steps": job.steps, "samples_per_step": job.samples_per_step}
        self._client.log_batch(self._run, params=[Param(name, str(value)) for name, value in facts.items()])

    def _find(self, began: str) -> bool:
        """Finds the run of an attempt, if it was begun before, and is where we write."""
        from mlflow.exceptions import MlflowException

        if not (self.folder / _RUN).is_file():
            return False
        with contextlib.suppress(MlflowException):
            run = self._client.get_run((self.folder / _RUN).read_text())
            self._run = run.info.run_id
            return bool(run.data.tags.get(_ATTEMPT) == began)
        return False

    def on_step(self, step: Stepped) -> None:
        """A point of each curve."""
        self._at = step.wall_time
        self._add(scalars_of(step), step.step)

    def on_evaluate(self, evaluated: Evaluated) -> None:
        """A point for each score."""
        self._add(scalars_of(evaluated), evaluated.step)
        if evaluated.best:
            self._client.set_tag(self._run, "holdfast.best_step", str(evaluated.step))

    def on_failure(self, lost: Detected) -> None:
        """The newest."""
        self._client.set_tag(self._run, "holdfast.lost", f"worker {lost.worker}: {lost.how}")

    def on_checkpoint(self, made: Checkpointed) -> None:
        """The newest."""
        self._client.set_tag(self._run, "holdfast.checkpoint", str(made.step))

    def on_end(self, ended: JobEnded) -> None:
        """How."""
        self.flush()
        self._client.set_tag(self._run, "holdfast.outcome", ended.outcome)
        self._client.set_terminated(self._run, "FINISHED" if ended.outcome == "done" else "FAILED")

    def _add(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * self._at)
        self._metrics += [Metric(_UNFIT.sub("_", name), value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        """See Tracker.flush."""
        while self._metrics:
            self._client.log_batch(self._run, metrics=self._metrics[:_BATCH])
            del self._metrics[:_BATCH]
