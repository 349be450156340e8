"""A strategy in one file: each stage's worker also holds the next stage's layers, and runs them forward ahead."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.placement import LayerRange
from holdfast.core.plan import Ahead, Plan
from holdfast.recovery.actions import RecoveryPlan
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import reroute
from holdfast.strategies.strategy import Strategy


def shadowed(plan: Plan) -> Plan:
    """Every worker but those of last stages holds what comes next in its pipeline, and runs it ahead of it."""
    behind = {
        visit.worker: after.layers
        for route in plan.routes.routes
        for visit, after in zip(route.visits, route.visits[1:], strict=False)
    }
    rows = (
        (worker, LayerRange(layers.start, behind[worker].stop) if worker in behind else layers)
        for worker, layers in plan.placement.ranges
    )
    ahead = (
        Ahead(visit.worker, route.microbatch, behind[visit.worker])
        for route in plan.routes.routes
        for visit in route.visits
        if visit.worker in behind
    )
    return replace(plan, placement=replace(plan.placement, ranges=tuple(rows)), ahead=tuple(sorted(ahead)))


def shadow(view: ClusterView) -> RecoveryPlan:
    """The shadow, or another owner, does what the lost did; nothing is run ahead from then on."""
    return reroute(view, "shadow")


ROW = Strategy(name="shadow", answer=shadow, healthy=shadowed)
