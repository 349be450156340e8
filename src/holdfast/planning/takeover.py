"""The plan in which those beside lost layers of a pipeline hold them besides their own."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.routes import Visit
from holdfast.errors import InfeasiblePlan
from holdfast.schedule.builders import assigned_plan

__all__ = ["takeover_plan"]


def takeover_plan(baseline: Plan, left: Collection[WorkerId], *, max_layers: int, costs: Costs | None = None) -> Plan:
    """Returns the plan in which whoever is left keeps its layers and takes those that were lost beside it.

    What lies between two of them is halved.

    Args:
        baseline: one pipeline, in which everybody holds one range.
        left: its workers that live.
        max_layers: how many layers a worker may hold.
        costs: costs per layer, whose memory limit is respected.

    Raises:
        InfeasiblePlan: nobody is left, there are several pipelines, or somebody would hold too much.
    """
    rows = sorted(baseline.placement.ranges, key=lambda row: row[1])
    stages = [row for row in rows if row[0] in left]
    if len({route.workers for route in baseline.routes.routes}) != 1 or len(baseline.workers) < len(rows) or not stages:
        raise InfeasiblePlan("layers are taken over within one pipeline, by whoever is left of it")
    ends = [0, *(_half(one[1], other[1]) for one, other in pairwise(stages)), rows[-1][1].stop]
    visits = [Visit(row[0], LayerRange(*cut)) for row, cut in zip(stages, pairwise(ends), strict=True)]
    most = max(visit.layers.stop - visit.layers.start for visit in visits)
    if most > max_layers:
        raise InfeasiblePlan(f"a worker would hold {most} layers; at most {max_layers} are known to fit")
    microbatches = baseline.routes.microbatches
    return assigned_plan([visits], microbatches, [len(microbatches)], costs)


def _half(one: LayerRange, other: LayerRange) -> int:
    return (one.stop + other.start + 1) // 2
