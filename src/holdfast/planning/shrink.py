"""The best regular plan for whoever is left, when too many are gone for the grid that there was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, unit_costs
from holdfast.core.routes import Visit
from holdfast.errors import InfeasiblePlan
from holdfast.schedule.builders import assigned_plan
from holdfast.schedule.evaluate import measured

__all__ = ["shrunken_plan"]


def shrunken_plan(
    workers: Sequence[WorkerId],
    microbatches: Sequence[MicroBatch],
    num_layers: int,
    *,
    max_layers: int | None = None,
    costs: Costs | None = None,
) -> Plan:
    """Returns the fastest plan of a smaller grid: the same micro-batches, cut evenly over pipelines of equal depth.

    Workers keep their ids; in their order they fill the new pipelines stage by stage. Those that no grid can use are
    not in the plan. Every grid is timed; among equally fast ones the one with fewer stages wins.

    Args:
        workers: whoever is left.
        microbatches: of one step.
        num_layers: of the model.
        max_layers: how many layers a worker should hold at most, where some grid allows it: what has run so far says
            nothing about the memory for many more. Default: no limit.
        costs: costs per layer, whose memory limit is always respected; default F = I = W = 1 without a limit.

    Raises:
        InfeasiblePlan: nobody is left, or no worker's memory suffices.
    """
    costs = unit_costs(num_layers) if costs is None else costs
    found: list[tuple[float, int, Plan]] = []
    grids = _grids(len(workers), len(microbatches), num_layers)
    wanted = [grid for grid in grids if max_layers is None or -(-num_layers // grid[1]) <= max_layers]
    for pipelines, stages in wanted or grids[:1]:
        try:
            plan = _plan(sorted(workers), sorted(microbatches), num_layers, pipelines, stages, costs)
        except InfeasiblePlan:
            continue
        found.append((measured(plan, costs).makespan, stages, plan))
    if not found:
        raise InfeasiblePlan(f"no grid of {len(workers)} worker(s) can hold the {num_layers} layers of the model")
    return min(found, key=lambda each: each[:2])[2]


def _grids(num_workers: int, num_microbatches: int, num_layers: int) -> list[tuple[int, int]]:
    """(pipelines, stages) that fit: the deepest for each number of pipelines, the deepest of all first."""
    most = min(num_workers, num_microbatches)
    deepest = {pipelines: min(num_workers // pipelines, num_layers) for pipelines in range(1, most + 1)}
    return list(deepest.items())


def _plan(
    workers: list[WorkerId],
    microbatches: list[MicroBatch],
    num_layers: int,
    pipelines: int,
    stages: int,
    costs: Costs,
) -> Plan:
    ranges = split_evenly(num_layers, stages)
    rows = [
        tuple(map(Visit, workers[start : start + stages], ranges)) for start in range(0, pipelines * stages, stages)
    ]
    shares = Counter(index * pipelines // len(microbatches) for index in range(len(microbatches)))
    return assigned_plan(rows, microbatches, [shares[row] for row in range(pipelines)], costs)
