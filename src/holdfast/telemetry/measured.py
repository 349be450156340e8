"""What operations took in a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.telemetry.events import StepOps, Timed

__all__ = ["Ran", "measured_costs", "ran_by_step"]

Ran = dict[WorkerId, tuple[tuple[str, int, int, float, float], ...]]
"""What every worker ran in one step: kind, pipeline and index of the micro-batch, start and end."""


def ran_by_step(timed: Iterable[Timed], *, whole: bool = False) -> dict[tuple[int, int], Ran]:
    """Returns what was run in every generation and step that somebody finished; ``whole``: of those not interrupted."""
    found: dict[tuple[int, int], Ran] = defaultdict(dict)
    for _, event in timed:
        if isinstance(event, StepOps) and (event.whole or not whole):
            found[event.generation, event.step][WorkerId.parse(event.worker)] = event.ops
    return found


def measured_costs(plan: Plan, steps: Iterable[Ran]) -> Costs:
    """Returns costs per layer, in seconds, from the medians of what workers took: a worker's, shared by its layers.

    Messages and the optimizer are not measured, and cost nothing here.
    """
    layers = {
        (visit.worker, str(route.microbatch)): len(visit.layers.indices)
        for route in plan.routes.routes
        for visit in route.visits
    }
    taken: dict[tuple[WorkerId, str], list[float]] = defaultdict(list)
    for ran in steps:
        for worker, ops in ran.items():
            for kind, pipeline, index, since, until in ops:
                taken[worker, kind].append((until - since) / layers[worker, f"{pipeline}.{index}"])
    owners = [plan.placement.owners(layer) for layer in range(plan.placement.num_layers)]

    def row(kinds: str) -> tuple[float, ...]:
        return tuple(max((_share(taken, worker, kinds) for worker in each), default=0.0) for each in owners)

    zeros, ones = (0.0,) * len(owners), (1.0,) * len(owners)
    return Costs(
        forward=row("F"),
        input=row("IB"),
        weight=row("W"),
        optimizer=zeros,
        comm=zeros[1:],
        takes=ones,
        gives_input=zeros,
        gives_weight=ones,
    )


def _share(taken: Mapping[tuple[WorkerId, str], list[float]], worker: WorkerId, kinds: str) -> float:
    """What one layer of a worker takes of the first of these kinds that it ran."""
    return next((median(taken[worker, k]) for k in kinds if (worker, k) in taken), 0.0)
