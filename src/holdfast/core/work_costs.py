"""What the operations of a plan cost: those of a worker alike, unless it is visited on parts of what it holds."""

from __future__ import annotations

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.profile import Costs, StageCosts
from holdfast.core.routes import Routes

__all__ = ["WorkCosts"]


class WorkCosts:
    """The costs of every visit.

    Attributes:
        whole: per worker, the costs of all layers that it holds or follows: its state, capacity and optimizer step.
    """

    def __init__(self, placement: Placement, routes: Routes, costs: Costs) -> None:
        """Prices the visits.

        Args:
            placement: who holds what.
            routes: the visits, over workers of the placement.
            costs: costs per layer.

        Cost: linear in visits.
        """
        priced: dict[tuple[LayerRange, ...], StageCosts] = {}
        owned: dict[WorkerId, tuple[LayerRange, ...]] = {}
        for worker, layers in (*placement.ranges, *placement.followed):
            owned[worker] = (*owned.get(worker, ()), layers)
        self.whole: dict[WorkerId, StageCosts] = {}
        for worker, parts in owned.items():
            self.whole[worker] = priced[parts] = priced.get(parts) or costs.of(*sorted(parts))
        self._parts: dict[tuple[WorkerId, MicroBatch], StageCosts] = {}
        for route in routes.routes:
            for visit in route.visits:
                if (visit.layers,) != owned[visit.worker]:
                    priced[visit.layers,] = part = priced.get((visit.layers,)) or costs.of(visit.layers)
                    self._parts[visit.worker, route.microbatch] = part

    def of(self, worker: WorkerId, microbatch: MicroBatch) -> StageCosts:
        """Returns the costs of a micro-batch's visit; its state, capacity and optimizer are of no meaning."""
        if self._parts:
            return self._parts.get((worker, microbatch)) or self.whole[worker]
        return self.whole[worker]
