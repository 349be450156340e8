"""What of a plan one worker has to know."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.routes import Route, Routes
from holdfast.core.schedule import Orders

__all__ = ["excerpts"]


def excerpts(plan: Plan, workers: Iterable[WorkerId], *, all_routes: bool = False) -> dict[WorkerId, Plan]:
    """Returns for each worker a plan from which its program is lowered as from the whole one, and little more.

    An excerpt has the placement, the worker's own order, and the routes that visit it. It also has those that the
    verdict takes, which all workers must agree on: see :func:`holdfast.core.lower.lower`.

    Args:
        plan: the whole plan.
        workers: whose excerpts; for one that is not in the plan there is no order in it.
        all_routes: whether they must know who runs what, as for audits.

    Cost: linear in the visits of the plan, and in what is returned.
    """
    found: dict[WorkerId, list[Route]] = {worker: [] for worker in workers}
    for_all = {route.microbatch for route in (*plan.routes.covering, *plan.routes.by_index[-1:])}
    for route in plan.routes.routes:
        for worker in found if all_routes or route.microbatch in for_all else route.workers:
            if worker in found:
                found[worker].append(route)
    orders, counted = dict(plan.orders.rows), plan.routes.counted
    return {
        worker: Plan(
            placement=plan.placement,
            routes=Routes(tuple(routes), counted),
            orders=Orders(((worker, orders[worker]),) if worker in orders else ()),
            ahead=tuple(each for each in plan.ahead if each.worker == worker),
        )
        for worker, routes in found.items()
    }
