"""One training run as a row of a benchmark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from holdfast import Job, Summary, train
from holdfast.control.messages import Progress
from holdfast.core.profile import Profile, uniform_profile
from holdfast.errors import HoldfastError
from holdfast.runtime.node.signals import Interrupted
from holdfast.telemetry.events import StepOps, WorkerReady, read_events
from measure import cpu_seconds, time_limit

__all__ = ["CpuWindow", "measured_run", "op_profile", "step_lengths", "watched_run"]


@dataclass(slots=True, kw_only=True)
class CpuWindow:
    """CPU time between the ends of two steps, of the workers and of all that serves them.

    Attributes:
        first: the step at whose end the window opens.
        last: the step at whose end it closes.
        samples: per end of a step, the seconds of (workers, everything else of the job).
    """

    first: int
    last: int
    samples: dict[int, tuple[float, float]] = field(default_factory=dict)

    def on_step(self, step: int, pids: list[int]) -> None:
        """Takes a sample if the window opens or closes here."""
        if step not in (self.first, self.last):
            return
        everything = {child.pid for child in psutil.Process().children(recursive=True)} | {os.getpid()}
        self.samples[step] = (cpu_seconds(pids), cpu_seconds(everything.difference(pids)))

    def per_step(self) -> tuple[float, float]:
        """Seconds per step of the workers, and of everything else."""
        before, after = self.samples[self.first], self.samples[self.last]
        steps = self.last - self.first
        return (after[0] - before[0]) / steps, (after[1] - before[1]) / steps


def watched_run(job: Job, window: CpuWindow) -> tuple[Summary, list[float]]:
    """Trains in a folder that is removed afterwards, with a window over its processor time; returns the losses, too."""
    with tempfile.TemporaryDirectory(prefix="holdfast-watched-") as directory:
        events = Path(directory) / "run" / "events.jsonl"
        pids: list[int] = []

        def on_progress(told: Progress) -> None:
            if not pids:
                pids.extend(event.pid for _, event in read_events(events) if isinstance(event, WorkerReady))
            window.on_step(told.step, pids)

        summary = train(job, run_dir=events.parent, on_progress=on_progress)
        found = {
            event.step: event.loss
            for _, event in read_events(events)
            if isinstance(event, StepOps) and event.loss is not None
        }
    return summary, [found[step] for step in sorted(found)]


def measured_run(
    job: Job, row: Callable[[Summary], dict[str, Any]], *, limit_s: float, **options: Any
) -> dict[str, Any]:
    """Trains in a folder that is removed afterwards.

    Args:
        job: what to train.
        row: what to make of the result, while the folder is there.
        limit_s: ends a run that takes longer, in seconds.
        options: of :func:`holdfast.train`.

    Returns:
        The row; or, if the run failed, only ``error``, with the reason.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
        try:
            with time_limit(limit_s):
                summary = train(job, run_dir=Path(folder) / "run", **options)
        except (HoldfastError, Interrupted, TimeoutError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return row(summary)


def step_lengths(summary: Summary) -> dict[int, float]:
    """Seconds from the commit of the step before to that of each step; the first is not among them."""
    commits = dict(summary.report.commits)
    return {after: commits[after] - commits[before] for before, after in pairwise(sorted(commits))}


def op_profile(num_layers: int, num_stages: int, op_s: float) -> Profile:
    """What to emulate where each F, I and W of a worker takes ``op_s`` seconds: stages hold equally many layers."""
    if num_layers % num_stages:
        raise SystemExit(f"{num_layers} layers cannot be shared evenly by {num_stages} stages, choose another grid")
    layer_s = op_s * num_stages / num_layers
    return uniform_profile(num_layers, forward_s=layer_s, backward_input_s=layer_s, backward_weight_s=layer_s)
