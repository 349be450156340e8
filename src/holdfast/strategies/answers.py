"""What answers to losses are made of: the survivors go on without the lost, fall back, or give up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from holdfast.core.ids import WorkerId
from holdfast.core.placement import lacking, spared
from holdfast.core.plan import Plan, with_followers, with_listeners
from holdfast.errors import InfeasiblePlan, StateUnavailable
from holdfast.planning.reshaping import regrouped
from holdfast.planning.shrink import shrunken_plan
from holdfast.planning.takeover import takeover_plan
from holdfast.planning.training import Rerouted
from holdfast.recovery.actions import (
    Abort,
    Action,
    Await,
    CopyState,
    FinishStep,
    GiveUp,
    InstallPlan,
    LoadState,
    Recompute,
    RecoveryPlan,
    Rejoin,
    ReplaceGrid,
    ReplayLayers,
    SaveCommitted,
    Spawn,
    TakeBack,
    TakeStock,
)
from holdfast.recovery.view import ClusterView

__all__ = ["at_boundary", "fall_back", "give_up", "pipelines_of", "reroute", "restart", "resume", "vacant", "ways"]


def reroute(
    view: ClusterView,
    name: str,
    *then: Action,
    keeps: bool = False,
    unowned: Callable[[ClusterView, tuple[int, ...]], RecoveryPlan] | None = None,
) -> RecoveryPlan:
    """Returns how the survivors go on without the lost, doing what these did.

    Args:
        view: the cluster.
        name: of the strategy.
        then: what becomes of the interrupted step. By default it is gone on with if it is kept, else run again.
        keeps: whether what is kept of it is needed for that.
        unowned: what is done where layers have no owner; None: :func:`fall_back`.
    """
    try:
        found = _without_lost(view)
    except StateUnavailable as error:
        return (unowned or fall_back)(view, error.layers)
    keeps = keeps or (view.keeps and not then)
    on: tuple[Action, ...] = then or ((FinishStep(),) if keeps else (TakeBack(), Recompute()))
    actions: tuple[Action, ...] = (Abort(), InstallPlan(plan=found.plan, keeps=keeps), *on)
    return RecoveryPlan(strategy=name, actions=actions, period=found.period, dormant=found.dormant)


def _without_lost(view: ClusterView) -> Rerouted:
    """The plan in which the others do what the lost and the dormant did, proved right; the dormant, if they must."""
    placement = view.baseline.placement
    if dormant := spared(placement, view.lost, view.dormant):
        try:
            found = _without_lost(replace(view, lost=view.lost | dormant, dormant=frozenset(), offer=None))
        except InfeasiblePlan:  # they would need more memory than they have
            return _without_lost(replace(view, dormant=frozenset()))
        plan = with_listeners(found.plan, [row for row in placement.ranges if row[0] in dormant])
        view.maker.prove(plan)
        return replace(found, plan=plan, dormant=dormant)
    if view.offer is not None:
        return view.offer
    return view.maker.without(view.baseline, view.lost, view.rules.terms)


def fall_back(view: ClusterView, layers: tuple[int, ...]) -> RecoveryPlan:
    """The first of all :func:`ways`, when layers have no owner; without one what lives is saved, and training ends.

    Args:
        view: the cluster.
        layers: that nobody holds.
    """
    return next(ways(view, layers), None) or give_up("fallback", layers)


def ways(view: ClusterView, layers: tuple[int, ...]) -> Iterator[RecoveryPlan]:
    """Yields what can be done when layers have no owner, that first which is done where costs are not known.

    Where what crosses nodes was logged, whoever takes these layers replays them, and the others keep their state: those
    who have come for them, else the neighbours. Else, where somebody has come for each of these layers, all who are
    there load the last checkpoint at once. Else it is waited for such, if the job may wait. Else every process that
    lives goes on in place, as a member of the fastest grid of those that hold at most twice as many layers per worker
    as before. Last, where pipelines can be made of any number of workers, as a member of these.

    Args:
        view: the cluster.
        layers: that nobody holds.

    Raises:
        InfeasiblePlan: behind all that is possible, if no grid of those who are left can hold the model.

    Source: SWIFT, section 5, for what is replayed.
    """
    baseline, away = view.baseline, view.lost - view.entering
    left = [worker for worker in baseline.workers if worker not in away]
    if view.checkpoint is None or not left:
        return
    replays = bool(view.logs and layers and frozenset(baseline.workers) - view.lost)
    whole = not baseline.placement.unowned_layers(away)
    load = LoadState(step=view.checkpoint)
    if replays and whole:
        yield _replayed(_without_lost(replace(view, lost=away, offer=None)).plan)
    if replays and not whole and view.wait_s <= 0:
        yield from _replayed_by_neighbours(view, frozenset(left))
    if layers and whole:
        yield resume("fallback", _without_lost(replace(view, lost=away, offer=None)).plan, load)
    if view.wait_s > 0:
        yield RecoveryPlan(strategy="fallback", actions=(Abort(), Await(limit_s=view.wait_s)))
        if replays and not whole:
            yield from _replayed_by_neighbours(view, frozenset(left))
    most = max(held.stop - held.start for _, held in baseline.placement.ranges)
    try:
        plan = _shrunken(view, left, 2 * most)
    except InfeasiblePlan:
        if pipelines_of(view, left) is None:
            raise
    else:
        yield resume("fallback", plan, ReplaceGrid(plan=plan), load)
    if (found := pipelines_of(view, left)) is not None:
        yield resume("fallback", found, ReplaceGrid(plan=found), load)


def pipelines_of(view: ClusterView, workers: Sequence[WorkerId]) -> Plan | None:
    """Returns the fastest pipelines of some workers, of any number each; None if none can be made, or none are."""
    baseline, shapes, maker = view.baseline, view.rules.shapes, view.maker
    if shapes is None:
        return None
    about = ("pipelines of", baseline, frozenset(workers))
    return maker.once(about, lambda: regrouped(baseline, sorted(workers), shapes, maker=maker))


def _replayed(plan: Plan, grid: Plan | None = None) -> RecoveryPlan:
    """Whoever lacks what the plan gives it replays that; ``grid``: if the plan is that of another grid."""
    actions = (Abort(), TakeStock(), ReplayLayers(plan=plan), Rejoin(grid=grid))
    return RecoveryPlan(strategy="logging", actions=actions)


def _replayed_by_neighbours(view: ClusterView, left: frozenset[WorkerId]) -> Iterator[RecoveryPlan]:
    """The neighbours of the lost replay what these held, unless they cannot take so much."""
    baseline, terms = view.baseline, view.rules.terms
    most = max(held.stop - held.start for _, held in baseline.placement.ranges)
    try:
        grid = takeover_plan(baseline, left, max_layers=2 * most, costs=None if terms is None else terms.costs)
        plan = grid = view.maker.scheduled(grid, terms)
        if lost := frozenset(grid.workers) - left:  # of their layers there are other owners
            plan = _without_lost(replace(view, baseline=grid, lost=lost, offer=None)).plan
    except InfeasiblePlan:
        return
    yield _replayed(plan, grid)


def _shrunken(view: ClusterView, left: list[WorkerId], max_layers: int) -> Plan:
    """The smaller grid, proved right; the planner schedules it where it can."""
    baseline, terms = view.baseline, view.rules.terms
    costs = None if terms is None else terms.costs
    num_layers, microbatches = baseline.placement.num_layers, baseline.routes.microbatches
    plan = shrunken_plan(left, microbatches, num_layers, max_layers=max_layers, costs=costs)
    return view.maker.scheduled(plan, terms)


def restart(view: ClusterView, name: str) -> RecoveryPlan:
    """Returns how all stop, new processes take the lost places, and all go on from the last checkpoint."""
    if view.checkpoint is None or view.wait_s <= 0:
        return fall_back(view, view.baseline.placement.unowned_layers(view.lost))
    missing = Spawn(workers=vacant(view))
    return RecoveryPlan(strategy=name, actions=(Abort(), Await(limit_s=view.wait_s, everyone=True), missing))


def vacant(view: ClusterView) -> tuple[WorkerId, ...]:
    """Returns the places of the grid for which nobody has come, sorted."""
    return tuple(sorted(view.lost - view.entering))


def resume(strategy: str, plan: Plan, *before: Action) -> RecoveryPlan:
    """Returns what begins a generation in which all run ``plan`` from the step that they agree on."""
    return RecoveryPlan(strategy=strategy, actions=(Abort(), *before, InstallPlan(plan=plan), TakeBack(), Recompute()))


def give_up(strategy: str, lost: tuple[int, ...], why: str = "") -> RecoveryPlan:
    """Returns what ends the job, with all layers saved but those that nobody holds; ``why``: if there are none."""
    return RecoveryPlan(strategy=strategy, actions=(Abort(), GiveUp(lost=lost, why=why), TakeBack(), SaveCommitted()))


def at_boundary(view: ClusterView, grid: Plan | None = None) -> RecoveryPlan:
    """Returns how workers come and go between two steps, nothing being given up or run again.

    Whatever strategy answers losses, the micro-batches of whoever goes are re-routed. Workers that enter follow the
    layers of their places meanwhile; so do those that are to take layers over, beside what they hold.

    Args:
        view: who computes afterwards, who enters, and what the grid is to become.
        grid: the plan of the whole grid from then on; None if it stays as it is.
    """
    # No checkpoint: nobody goes back for this.
    answer = reroute(replace(view, entering=frozenset(), checkpoint=None, target=None), "adaptive")
    if answer.plan is None:
        return answer
    rows = [row for row in view.baseline.placement.ranges if row[0] in view.entering]
    if view.target is not None:
        rows += lacking(answer.plan.placement, view.target.placement)
    plan = with_followers(answer.plan, rows)
    view.maker.prove(plan)
    copies = tuple(CopyState(layers=layers, target=worker) for worker, layers in rows)
    actions: tuple[Action, ...] = (*copies, InstallPlan(plan=plan, at_boundary=True, grid=grid))
    return RecoveryPlan(strategy=answer.strategy, actions=actions, period=answer.period, dormant=answer.dormant)
