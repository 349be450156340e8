"""One training run as a row of a benchmark."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast import Job, Summary, train
from holdfast.core.profile import Profile, uniform_profile
from holdfast.errors import HoldfastError
from holdfast.runtime.node.agent import Interrupted
from measure import time_limit

__all__ = ["measured_run", "op_profile", "step_lengths"]


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
