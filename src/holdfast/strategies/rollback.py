"""Rollback: the survivors keep their weights, and run the interrupted mini-batch once more."""

from __future__ import annotations

from typing import Any

from holdfast.recovery.actions import RecoveryPlan, RepeatStep
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import reroute
from holdfast.strategies.lossy_forward import needs_whole_routes
from holdfast.strategies.strategy import Strategy

__all__ = ["ROLLBACK", "rollback"]


def rollback(view: ClusterView) -> RecoveryPlan:
    """The survivors keep their weights, perhaps with some layers updated, and run the same mini-batch once more.

    Source: Nicolae et al., section III-B, "immediate mini-batch rollback". There it waits for new workers, which are
    given the survivors' weights; here the survivors do what the lost did, and whoever comes enters later.
    """
    return reroute(view, "rollback", RepeatStep(), keeps=view.keeps)


def _needs(job: Any) -> str:
    if lacking := needs_whole_routes(job):
        return lacking
    if not job.loops:
        return (
            "resilience.strategy: rollback runs a mini-batch once more, which only a script's loop can; expected skip"
        )
    if job.checkpoint_every:
        return "checkpoint.every: no checkpoint knows which mini-batches rollback has run once more; expected 0"
    return ""


ROLLBACK = Strategy(name="rollback", answer=rollback, needs=_needs, exact=False, loops=True)
