"""Strategies: pure functions from a view of the cluster to a RecoveryPlan.

The runtime carries the actions out, a simulator can price the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from holdfast.core.builders import adaptive_plan
from holdfast.core.ids import WorkerId
from holdfast.core.placement import lacking, spared
from holdfast.core.plan import Plan, with_followers, with_listeners
from holdfast.core.shrink import shrunken_plan
from holdfast.core.takeover import takeover_plan
from holdfast.core.validate import validate
from holdfast.errors import ConfigError, InfeasiblePlan, StateUnavailable
from holdfast.planning.training import Rerouted, Terms, replanned, rerouted
from holdfast.recovery.actions import (
    Abort,
    Action,
    AverageOverSurvivors,
    Await,
    ClusterView,
    CopyState,
    FinishStep,
    GiveUp,
    InstallPlan,
    LoadState,
    Recompute,
    RecoveryPlan,
    Rejoin,
    RepeatStep,
    ReplaceGrid,
    ReplayLayers,
    Restore,
    SaveCommitted,
    SkipStep,
    Spawn,
    TakeBack,
    TakeStock,
)

__all__ = [
    "STRATEGIES",
    "Strategy",
    "adaptive",
    "at_boundary",
    "checkfreq",
    "checkpoint_restart",
    "fall_back",
    "give_up",
    "lossy_forward",
    "resume",
    "rollback",
    "skip",
    "snapshots",
    "strategy_named",
    "templates",
]

Strategy = Callable[[ClusterView], RecoveryPlan]


def adaptive(view: ClusterView) -> RecoveryPlan:
    """Re-routes the micro-batches of lost workers to their peers, and redoes what of the interrupted step was lost.

    When a layer has no owner left, see :func:`fall_back`.

    Source: SlipStream, section 3.1 and "Rerouting micro-batches" in 4.3. Here the plan is always computed from the
    baseline and the set of all lost workers, so that it does not depend on the order of the failures. With the
    ``decoupled`` and ``staggered`` techniques (3.2, 3.3) the planner makes it.
    """
    return _reroute(view, "adaptive")


def templates(view: ClusterView) -> RecoveryPlan:
    """Re-routes as :func:`adaptive`, so that nobody waits for state; then the others become other pipelines.

    To which, :mod:`holdfast.planning.reshaping` says once the loss is answered; nothing is run again for it. Where too
    few are left for the pipelines that the next failures take, what lives is saved and training ends.

    Source: Oobleck, section 5, where training stands still while pipelines are made anew and states are copied, and
    section 4.1.1 for how many nodes are enough.
    """
    left = len(frozenset(view.baseline.workers) - (view.lost - view.entering)) + view.spares
    if left < view.fewest:
        why = f"{left} workers are left, and {view.fewest} are needed to tolerate as many failures as the job is to"
        return give_up("templates", view.baseline.placement.unowned_layers(view.lost - view.entering), why)
    return _reroute(view, "templates")


def lossy_forward(view: ClusterView) -> RecoveryPlan:
    """The survivors end the interrupted step by themselves: what the lost had of it is left out of its means.

    From the next step on they do what the lost did, as with :func:`adaptive`. The weights are no longer those of the
    run in which nothing failed, for which nothing is run again.

    Source: Nicolae et al., section III-B, "lossy forward recovery". There the batch of later steps shrinks, too.
    """
    lost = () if view.plan is None else _led_to(view.plan, view.lost)
    return _reroute(view, "lossy-forward", AverageOverSurvivors(microbatches=lost), keeps=view.keeps)


def rollback(view: ClusterView) -> RecoveryPlan:
    """The survivors keep their weights, perhaps with some layers updated, and run the same mini-batch once more.

    Source: Nicolae et al., section III-B, "immediate mini-batch rollback". There it waits for new workers, which are
    given the survivors' weights; here the survivors do what the lost did, and whoever comes enters later.
    """
    return _reroute(view, "rollback", RepeatStep(), keeps=view.keeps)


def skip(view: ClusterView) -> RecoveryPlan:
    """The survivors leave the interrupted step as it is, perhaps with some layers updated, and go on behind it.

    Source: Nicolae et al., section V, where it is future work.
    """
    return _reroute(view, "skip", SkipStep(), keeps=view.keeps)


def _led_to(plan: Plan, lost: frozenset[WorkerId]) -> tuple[int, ...]:
    """Global numbers of the micro-batches that a plan leads to some of these workers."""
    rows = (row for row in plan.routes.routes if any(visit.worker in lost for visit in row.visits))
    return tuple(sorted(row.microbatch.number for row in rows))


def _reroute(view: ClusterView, name: str, *then: Action, keeps: bool = False) -> RecoveryPlan:
    """The survivors go on without the lost; ``then``: how. By default with the interrupted step, if it is kept."""
    try:
        found = _without_lost(view)
    except StateUnavailable as error:
        return fall_back(view, error.layers)
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
        validate(plan)
        return replace(found, plan=plan, dormant=dormant)
    if view.offer is not None:
        return view.offer
    if view.terms is not None:
        return rerouted(view.baseline, view.lost, view.terms)
    plan = adaptive_plan(view.baseline, view.lost)
    validate(plan)
    return Rerouted(plan=plan)


def fall_back(view: ClusterView, layers: tuple[int, ...]) -> RecoveryPlan:
    """What is left when layers have no owner: replay them, or wait for workers, then a smaller grid, from a checkpoint.

    Where what crosses nodes was logged, whoever takes these layers replays them, and the others keep their state. Else,
    where somebody has come for each of these layers, all who are there load it at once. Else every process that lives
    goes on in place, as a member of the fastest grid of those that hold at most twice as many layers per worker as
    before. Without a state to load, what lives is saved and training ends.

    Args:
        view: the cluster.
        layers: that nobody holds.

    Source: SWIFT, section 5, for what is replayed.
    """
    baseline, away = view.baseline, view.lost - view.entering
    left = [worker for worker in baseline.workers if worker not in away]
    if view.checkpoint is None or not left:
        return give_up("fallback", layers)
    if view.logs and layers and (replayed := _replayed(view)) is not None:
        return replayed
    load = LoadState(step=view.checkpoint)
    if layers and not baseline.placement.unowned_layers(away):
        return resume("fallback", _without_lost(replace(view, lost=away, offer=None)).plan, load)
    if view.wait_s > 0:
        return RecoveryPlan(strategy="fallback", actions=(Abort(), Await(limit_s=view.wait_s)))
    most = max(held.stop - held.start for _, held in baseline.placement.ranges)
    plan = _shrunken(left, baseline, 2 * most, view.terms)
    return resume("fallback", plan, ReplaceGrid(plan=plan), load)


def _replayed(view: ClusterView) -> RecoveryPlan | None:
    """Those who have come replay what they are to hold; without them, and if nobody is waited for, the neighbours do.

    None if that is impossible: nobody who lives holds anything, or the neighbours cannot take so much.
    """
    baseline, away = view.baseline, view.lost - view.entering
    if not frozenset(baseline.workers) - view.lost:
        return None
    if not baseline.placement.unowned_layers(away):
        plan = _without_lost(replace(view, lost=away, offer=None)).plan
        return RecoveryPlan(strategy="logging", actions=(Abort(), TakeStock(), ReplayLayers(plan=plan), Rejoin()))
    if view.wait_s > 0:
        return None
    most = max(held.stop - held.start for _, held in baseline.placement.ranges)
    costs = None if view.terms is None else view.terms.costs
    left = frozenset(baseline.workers) - away
    try:
        plan = takeover_plan(baseline, left, max_layers=2 * most, costs=costs)
    except InfeasiblePlan:
        return None
    validate(plan)
    plan = plan if view.terms is None else replanned(plan, view.terms)
    return RecoveryPlan(strategy="logging", actions=(Abort(), TakeStock(), ReplayLayers(plan=plan), Rejoin(grid=plan)))


def _shrunken(left: list[WorkerId], baseline: Plan, max_layers: int, terms: Terms | None) -> Plan:
    """The smaller grid, proved right; the planner schedules it where it can."""
    costs = None if terms is None else terms.costs
    num_layers, microbatches = baseline.placement.num_layers, baseline.routes.microbatches
    plan = shrunken_plan(left, microbatches, num_layers, max_layers=max_layers, costs=costs)
    validate(plan)
    return plan if terms is None else replanned(plan, terms)


def checkpoint_restart(view: ClusterView) -> RecoveryPlan:
    """Global checkpointing: all stop, new processes take the lost places, and all go on from the last checkpoint.

    A baseline. The processes that live stay, which a restart of the whole job would not grant. When the grid is not
    whole in time, or nothing can be loaded, see :func:`fall_back`.

    Source: SWIFT, sections 2.1 and 7.1 ("global checkpointing").
    """
    return _restart(view, "checkpoint-restart")


def checkfreq(view: ClusterView) -> RecoveryPlan:
    """CheckFreq: recovers as :func:`checkpoint_restart`, from checkpoints that are written while training goes on.

    Source: CheckFreq, FAST '21, as described by SWIFT, section 2.2; how often, see :mod:`holdfast.recovery.checkfreq`.
    """
    return _restart(view, "checkfreq")


def _restart(view: ClusterView, name: str) -> RecoveryPlan:
    if view.checkpoint is None or view.wait_s <= 0:
        return fall_back(view, view.baseline.placement.unowned_layers(view.lost))
    missing = Spawn(workers=_vacant(view))
    return RecoveryPlan(strategy=name, actions=(Abort(), Await(limit_s=view.wait_s, everyone=True), missing))


def snapshots(view: ClusterView) -> RecoveryPlan:
    """Elastic Horovod: the survivors go back to snapshots in their memory and on; new processes come in later.

    A baseline. When a layer has no owner left, see :func:`fall_back`.

    Source: Elastic Horovod's ``state.commit()`` and ``state.restore()``; SWIFT, sections 1 and 2.2. There the batch
    shrinks with the workers; here the micro-batches of the lost go to their peers, as with :func:`adaptive`. There one
    survivor gives its snapshot to all others; here each goes back to its own, and only joiners are given state.
    """
    return _reroute(view, "snapshots", Spawn(workers=_vacant(view)), Restore(), Recompute())


def _vacant(view: ClusterView) -> tuple[WorkerId, ...]:
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
    answer = adaptive(replace(view, entering=frozenset(), checkpoint=None, target=None))
    if answer.plan is None:
        return answer
    rows = [row for row in view.baseline.placement.ranges if row[0] in view.entering]
    if view.target is not None:
        rows += lacking(answer.plan.placement, view.target.placement)
    plan = with_followers(answer.plan, rows)
    validate(plan)
    copies = tuple(CopyState(layers=layers, target=worker) for worker, layers in rows)
    actions: tuple[Action, ...] = (*copies, InstallPlan(plan=plan, at_boundary=True, grid=grid))
    return RecoveryPlan(strategy=answer.strategy, actions=actions, period=answer.period, dormant=answer.dormant)


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "auto": adaptive,
        "adaptive": adaptive,
        "templates": templates,
        "checkpoint-restart": checkpoint_restart,
        "checkfreq": checkfreq,
        "snapshots": snapshots,
        "lossy-forward": lossy_forward,
        "rollback": rollback,
        "skip": skip,
    }
)


def strategy_named(name: str) -> Strategy:
    """Returns the strategy of this name; ``auto`` is the best one that there is.

    Raises:
        ConfigError: there is none.
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ConfigError(f"resilience.strategy: unknown {name!r}; known: {', '.join(STRATEGIES)}") from None
