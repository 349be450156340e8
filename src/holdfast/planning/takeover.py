"""The grid in which those beside lost layers hold them besides their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.routes import Route, Routes, Visit
from holdfast.errors import InfeasiblePlan
from holdfast.schedule.builders import one_f_one_b

__all__ = ["takeover_plan"]


def takeover_plan(baseline: Plan, left: Collection[WorkerId], *, max_layers: int, costs: Costs | None = None) -> Plan:
    """Returns the grid in which whoever is left keeps its layers and takes those beside it that nobody holds any more.

    What lies between two of them is halved. In every pipeline in which somebody can, they are taken; others stay as
    they are. Those who are lost keep their places as far as these have layers that somebody holds.

    Args:
        baseline: pipelines in which everybody holds one range, and whose stages are one worker each.
        left: its workers that live.
        max_layers: how many layers a worker may hold.
        costs: costs per layer, whose memory limit is respected.

    Raises:
        InfeasiblePlan: nobody is beside these layers, who is would hold too much, or stages have lanes.
    """
    lost = frozenset(baseline.workers).difference(left)
    unowned = frozenset(baseline.placement.unowned_layers(lost))
    rows = dict.fromkeys(route.visits for route in baseline.routes.routes)
    if sum(map(len, rows)) != len(baseline.workers) or len(baseline.workers) != len(baseline.placement.ranges):
        raise InfeasiblePlan("layers are taken over within pipelines whose stages are one worker each")
    taken = {row: _taken_over(row, lost, unowned, max_layers) for row in rows}
    if not any(taken.values()):
        names = ", ".join(map(str, sorted(unowned)))
        raise InfeasiblePlan(
            f"nobody who is left beside layer(s) {names} can hold them, at most {max_layers} altogether"
        )
    visits = {row: found or row for row, found in taken.items()}
    held = tuple(sorted((visit.worker, visit.layers) for row in visits.values() for visit in row))
    placement = Placement(num_layers=baseline.placement.num_layers, ranges=held)
    routes = Routes(tuple(Route(each.microbatch, visits[each.visits]) for each in baseline.routes.routes))
    return Plan(placement=placement, routes=routes, orders=one_f_one_b(placement, routes, costs))


def _taken_over(
    row: Sequence[Visit], lost: frozenset[WorkerId], unowned: frozenset[int], max_layers: int
) -> tuple[Visit, ...] | None:
    """The stages of a pipeline in which its own workers hold these layers; None if they cannot."""
    stages: list[tuple[WorkerId, int, int]] = []
    for visit in row:
        kept = [i for i in visit.layers.indices if visit.worker not in lost or i not in unowned]
        if kept and kept[-1] - kept[0] + 1 > len(kept):
            return None  # whoever comes for this place would hold two ranges
        if kept:
            stages.append((visit.worker, kept[0], kept[-1] + 1))
    if not stages:
        return None
    cuts = [0]
    for (one, _, stop), (other, start, _) in pairwise(stages):
        cuts.append(stop if one in lost else start if other in lost else (stop + start + 1) // 2)
    cuts.append(row[-1].layers.stop)
    found = [Visit(worker, LayerRange(*cut)) for (worker, _, _), cut in zip(stages, pairwise(cuts), strict=True)]
    grown = {worker: stop - start for worker, start, stop in stages}
    for visit in found:
        more = len(visit.layers.indices) - grown[visit.worker]
        if more and (visit.worker in lost or len(visit.layers.indices) > max_layers):
            return None
    return tuple(found)
