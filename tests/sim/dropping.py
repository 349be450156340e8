"""A strategy in one file: the pipelines of lost workers are dropped, and steps have fewer contributions."""

from __future__ import annotations

from holdfast.core.placement import Placement
from holdfast.core.plan import Plan, with_listeners
from holdfast.core.routes import Routes
from holdfast.core.schedule import Orders
from holdfast.core.validate import validate
from holdfast.recovery.actions import RecoveryPlan
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import give_up, resume
from holdfast.strategies.strategy import Strategy


def drop(view: ClusterView) -> RecoveryPlan:
    """The pipelines that are whole go on with their own micro-batches; who lives of the others listens."""
    grid = view.baseline
    broken = {worker.pipeline for worker in view.lost}
    whole = frozenset(worker for worker in grid.workers if worker.pipeline not in broken)
    if not whole:
        return give_up("drop", tuple(range(grid.placement.num_layers)))
    rows = [row for row in grid.placement.ranges if row[0] not in view.lost]
    plan = Plan(
        placement=Placement(num_layers=grid.placement.num_layers, ranges=tuple(r for r in rows if r[0] in whole)),
        routes=Routes(tuple(route for route in grid.routes.routes if route.microbatch.pipeline not in broken)),
        orders=Orders(tuple(row for row in grid.orders.rows if row[0] in whole)),
    )
    plan = with_listeners(plan, [row for row in rows if row[0] not in whole])
    validate(plan)
    return resume("drop", plan)


ROW = Strategy(name="drop", answer=drop, exact=False)
