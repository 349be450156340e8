"""Times a plan: every operation as soon as it can run."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.schedule import OpKind
from holdfast.core.timeline import Timeline
from holdfast.schedule.problem import Problem, routes_problem, slowed_down
from holdfast.schedule.timing import Measure, as_soon_as_possible, from_orders, group_windows, measure, to_timeline

__all__ = ["evaluate", "measured", "steady_period"]


def evaluate(plan: Plan, costs: Costs, *, staggered: bool = False, ties: tuple[tuple[int, ...], ...] = ()) -> Timeline:
    """Returns when every operation runs, if each starts as soon as its worker is free and its input is there.

    An output takes the communication cost of the cut to reach the next worker and occupies neither of the two.
    Computation never waits for memory: the orders decide what is held.

    Args:
        plan: a plan that :func:`holdfast.core.validate.validate` accepts.
        costs: costs per layer of the same model.
        staggered: whether each stage runs its optimizer step as soon as its own workers are done.
        ties: tuples of layers that share weights, and are updated together.

    Raises:
        InvalidSchedule: workers wait for one another, so that the step never ends.

    Cost: linear in the number of operations.
    """
    problem = _problem_of(plan, costs, ties)
    return to_timeline(problem, plan, from_orders(problem, plan.orders), staggered=staggered)


def measured(
    plan: Plan,
    costs: Costs,
    *,
    staggered: bool = False,
    ties: tuple[tuple[int, ...], ...] = (),
    behind: Mapping[WorkerId, float] | None = None,
    slowed: Mapping[WorkerId, float] | None = None,
) -> Measure:
    """Returns makespan and period of a plan, those of :func:`evaluate`, in half the time: without its operations.

    Args:
        plan: a plan that :func:`holdfast.core.validate.validate` accepts.
        costs: costs per layer of the same model.
        staggered: whether each stage runs its optimizer step as soon as its own workers are done.
        ties: tuples of layers that share weights, and are updated together.
        behind: seconds from a worker's last operation until it can update; whoever is not in it can at once.
        slowed: how many times as long some workers' operations and updates take.

    Raises:
        InvalidSchedule: workers wait for one another, so that the step never ends.
    """
    problem, later = _problem_of(plan, costs, ties), behind or {}
    if slowed:
        problem = slowed_down(problem, slowed)
    more = [later.get(worker, 0.0) for worker in problem.workers]  # each worker is a group of its own
    return measure(problem, from_orders(problem, plan.orders), staggered=staggered, behind=more)


def steady_period(
    plan: Plan, costs: Costs, *, staggered: bool = False, ties: tuple[tuple[int, ...], ...] = (), steps: int = 12
) -> float:
    """Returns the time between consecutive steps when many are run one after another, each as soon as it can be.

    That is what a run should show. Where every worker computes something, it is never longer than the period of a
    schedule with the same orders, whose stages may have to wait for one another a little differently in the first
    steps.

    Args:
        plan: a plan that :func:`holdfast.core.validate.validate` accepts.
        costs: costs per layer of the same model.
        staggered: whether each stage runs its optimizer step as soon as its own workers are done.
        ties: tuples of layers that share weights, and are updated together.
        steps: how many are run, at least 2; the second half counts.

    Raises:
        InvalidSchedule: workers wait for one another, so that the step never ends.
    """
    problem = _problem_of(plan, costs, ties)
    schedule = from_orders(problem, plan.orders)
    free, begins = [0.0] * problem.num_workers, list[float]()
    for _ in range(steps):
        schedule = as_soon_as_possible(problem, schedule, free=free)
        first, last = group_windows(problem, schedule)  # each worker is a group of its own
        begins.append(min(first))
        ends = list(map(max, free, last))
        if not staggered:
            free = [max(ends) + optimizer for optimizer in problem.optimizer]
            continue
        free = list(ends)
        for window in problem.windows:
            updated = max(ends[each] for each in window.waits_for) + window.optimizer
            free[window.group] = max(free[window.group], updated)
    half = steps // 2
    return (begins[-1] - begins[-1 - half]) / half


def _problem_of(plan: Plan, costs: Costs, ties: tuple[tuple[int, ...], ...]) -> Problem:
    """Returns the problem that a plan has solved, whatever memory it takes."""
    coupled = all(op.kind in (OpKind.F, OpKind.B) for _, row in plan.orders.rows for op in row)
    return routes_problem(plan.placement, plan.routes, costs, coupled=coupled, ties=ties, fits=False)
