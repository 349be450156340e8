"""Lossy forward recovery: the survivors end the step without what the lost had of it."""

from __future__ import annotations

from typing import Any

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.recovery.actions import AverageOverSurvivors, RecoveryPlan
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import reroute
from holdfast.strategies.strategy import Strategy

__all__ = ["LOSSY_FORWARD", "lossy_forward"]


def lossy_forward(view: ClusterView) -> RecoveryPlan:
    """The survivors end the interrupted step by themselves: what the lost had of it is left out of its means.

    From the next step on they do what the lost did, as with ``adaptive``. The weights are no longer those of the
    run in which nothing failed, for which nothing is run again.

    Source: Nicolae et al., section III-B, "lossy forward recovery". There the batch of later steps shrinks, too.
    """
    lost = () if view.plan is None else _led_to(view.plan, view.lost)
    return reroute(view, "lossy-forward", AverageOverSurvivors(microbatches=lost), keeps=view.keeps)


def _led_to(plan: Plan, lost: frozenset[WorkerId]) -> tuple[int, ...]:
    """Global numbers of the micro-batches that a plan leads to some of these workers."""
    rows = (row for row in plan.routes.routes if any(visit.worker in lost for visit in row.visits))
    return tuple(sorted(row.microbatch.number for row in rows))


def needs_whole_routes(job: Any) -> str:
    """Returns what a job lacks of which a step is to end without some micro-batches."""
    if max(job.grid.depths) == 1 and job.keeps_steps:
        return ""
    return (
        f"resilience.strategy: {job.resilience.strategy} leaves out whole micro-batches of a step that is kept; "
        "expected pipelines of one stage and resilience.step_log true"
    )


LOSSY_FORWARD = Strategy(name="lossy-forward", answer=lossy_forward, needs=needs_whole_routes, exact=False, loops=True)
