"""Auto: of all that can be done about a loss, what makes the most steps until the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.errors import InfeasiblePlan, InternalError
from holdfast.planning.course import Course, handed_over
from holdfast.recovery.actions import (
    Await,
    InstallPlan,
    LoadState,
    Recompute,
    RecoveryPlan,
    Rejoin,
    ReplaceGrid,
    ReplayLayers,
)
from holdfast.recovery.rates import Rates, step_seconds
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import fall_back, give_up, pipelines_of, reroute, resume, ways
from holdfast.strategies.strategy import Strategy
from holdfast.strategies.templates import memory_needs

__all__ = ["AUTO", "auto", "course_of"]


def auto(view: ClusterView) -> RecoveryPlan:
    """Re-routes where every layer keeps an owner; else takes the way that makes the most steps until the next failure.

    The survivors never wait while they can train. Where they can't, replaying lost layers, going back to a checkpoint
    on a grid of any shape, and waiting for whoever comes are compared by their prices. Other pipelines are made behind
    that, as by ``templates``, where it is known what that costs and gains (:mod:`holdfast.planning.reshaping`).
    """
    return reroute(view, "adaptive", unowned=_best)


def _best(view: ClusterView, layers: tuple[int, ...]) -> RecoveryPlan:
    """The best of all ways; the first of them where nothing is known of times, or there is no other one."""
    rates = view.rules.rates
    if rates is None:
        return fall_back(view, layers)
    found = _possible(view, layers)
    if not found:
        return give_up("fallback", layers)
    if len(found) == 1:
        return found[0]
    evened = cache(partial(pipelines_of, view))  # of the same workers, for most ways
    courses = [course_of(each, view, rates, evened) for each in found]
    left_s = max(1, view.rules.steps - view.step) * min(each.period_s for each in courses)
    steps = [each.steps(min(view.expected_s, left_s)) for each in courses]
    names, best = [_name(each) for each in found], steps.index(max(steps))
    weighed = tuple(zip(names, steps, strict=True))
    return replace(found[best], course=courses[best], weighed=weighed, chosen=names[best])


def _possible(view: ClusterView, layers: tuple[int, ...]) -> list[RecoveryPlan]:
    """All ways, but to wait for somebody who is not on the way where a smaller grid can take whoever comes."""
    found: list[RecoveryPlan] = []
    try:
        for each in ways(view, layers):
            found.append(each)
    except InfeasiblePlan:
        if not found:
            raise
    if view.rules.shapes is None or view.coming:
        return found
    return [each for each in found if not isinstance(each.actions[-1], Await)] or found


def course_of(
    recovery: RecoveryPlan,
    view: ClusterView,
    rates: Rates,
    pipelines: Callable[[tuple[WorkerId, ...]], Plan | None],
) -> Course:
    """Returns what is to be expected of a recovery.

    Args:
        recovery: what is done.
        view: the cluster before it.
        rates: how fast it is.
        pipelines: the fastest ones of some workers, see :func:`holdfast.strategies.answers.pipelines_of`.

    Raises:
        InternalError: nothing is trained behind it.
    """
    priced = _to_its_end(recovery, view)
    plan = _last_plan(priced)

    def period_s(of: Plan) -> float:
        ahead = view.updates_ahead
        return view.maker.once(("period", of, ahead), lambda: step_seconds(of, rates, updates_ahead=ahead))

    still_s, own_s = 0.0, period_s(plan)
    for action, price in zip(priced.actions, priced.priced(view, rates), strict=True):
        still_s += price.seconds if price.still else 0.0
        if isinstance(action, Recompute):  # the last of these steps is the first that was not made before
            still_s -= own_s
    workers = view.baseline.workers if view.coming else plan.workers
    evened, shapes = pipelines(workers), view.rules.shapes
    if evened is None or shapes is None or (later_s := period_s(evened)) >= own_s:
        return Course(still_s=still_s, period_s=own_s)
    most = -(-plan.placement.num_layers // shapes.least_workers(len(workers)))
    comes_s = rates.start_s if len(workers) > len(plan.workers) else 0.0
    copy_s = comes_s + rates.copying_s(range(most))
    course = handed_over(own_s, later_s, copy_s, rates.connect_s)
    return replace(course, still_s=course.still_s + still_s)


def _to_its_end(recovery: RecoveryPlan, view: ClusterView) -> RecoveryPlan:
    """The same with what is done once whoever is waited for is there: the whole grid loads the last checkpoint."""
    if not isinstance(recovery.actions[-1], Await):
        return recovery
    if view.checkpoint is None:
        raise InternalError("somebody is waited for, and there is nothing to load then")
    whole = resume(recovery.strategy, view.baseline, ReplaceGrid(plan=view.baseline), LoadState(step=view.checkpoint))
    return replace(recovery, actions=(*recovery.actions, *whole.actions[1:]))


def _last_plan(recovery: RecoveryPlan) -> Plan:
    for action in reversed(recovery.actions):
        match action:
            case InstallPlan(plan=plan) | ReplayLayers(plan=plan):
                return plan
    raise InternalError("a way was compared by which nothing is trained")


def _name(recovery: RecoveryPlan) -> str:
    """For people."""
    actions = recovery.actions
    if isinstance(actions[-1], Await):
        return "wait"
    if any(isinstance(each, Rejoin) for each in actions):
        grown = any(isinstance(each, Rejoin) and each.grid is not None for each in actions)
        return "replay, by neighbours" if grown else "replay, by whoever came"
    grid = next((each.plan for each in actions if isinstance(each, ReplaceGrid)), None)
    if grid is None:
        return "load"
    sizes = sorted(len(row) for row in {route.workers for route in grid.routes.routes})
    return f"load, as pipelines of {' + '.join(map(str, sizes))}"


AUTO = Strategy(name="auto", answer=auto, needs=memory_needs, logs=True, loops=True, makes_pipelines=True, chooses=True)
