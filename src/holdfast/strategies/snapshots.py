"""Elastic Horovod: the survivors go back to snapshots in their memory."""

from __future__ import annotations

from typing import Any

from holdfast.recovery.actions import Recompute, RecoveryPlan, Restore, Spawn
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import reroute, vacant
from holdfast.strategies.strategy import Strategy

__all__ = ["SNAPSHOTS", "snapshots"]


def snapshots(view: ClusterView) -> RecoveryPlan:
    """Elastic Horovod: the survivors go back to snapshots in their memory and on; new processes come in later.

    A baseline. When a layer has no owner left, see ``answers.fall_back``.

    Source: Elastic Horovod's ``state.commit()`` and ``state.restore()``; SWIFT, sections 1 and 2.2. There the batch
    shrinks with the workers; here the micro-batches of the lost go to their peers, as with ``adaptive``. There one
    survivor gives its snapshot to all others; here each goes back to its own, and only joiners are given state.
    """
    return reroute(view, "snapshots", Spawn(workers=vacant(view)), Restore(), Recompute())


def _needs(job: Any) -> str:
    if not job.resilience.snapshot_every:
        return "resilience.snapshot_every: strategy snapshots goes back to snapshots; expected more than 0, got 0"
    return ""


SNAPSHOTS = Strategy(name="snapshots", answer=snapshots, needs=_needs, keeps_steps=False, takes_snapshots=True)
