"""What each action of a recovery costs: seconds, and whether training stands still for them.

A simulator lets so much time pass; a policy compares recoveries by it. Nothing here is measured on the fly: the same
action, view and rates give the same price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Link, Profile, costs_from_profile
from holdfast.errors import InfeasiblePlan, InternalError
from holdfast.planning.remainder import plan_remainder, progress_at
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
from holdfast.schedule.evaluate import evaluate

__all__ = ["Price", "Rates", "after", "price", "priced", "step_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a cluster is.

    Attributes:
        profile: how long operations, updates and tensors between workers take, and how large states are.
        message_s: seconds of a message between workers that carries no tensor of a micro-batch: a part of a sum, or
            what is known of a step.
        control_s: seconds of a message between the coordinator and a worker, in one direction.
        connect_s: seconds until the workers of a generation are connected.
        start_s: seconds until a new process is there.
        copy: how a worker is given state by its peers.
        load: how a worker reads the state of one layer from a checkpoint.
        save: how a worker writes that of one layer at the end.
    """

    profile: Profile
    message_s: float
    control_s: float
    connect_s: float
    start_s: float
    copy: Link
    load: Link
    save: Link

    def copying_s(self, layers: Iterable[int]) -> float:
        """Returns how long a worker is given the state of these layers, all at once."""
        return self.copy.seconds_of(sum(self._sizes(layers)))

    def loading_s(self, layers: Iterable[int]) -> float:
        """Returns how long a worker reads the state of these layers, one after another."""
        return sum(map(self.load.seconds_of, self._sizes(layers)))

    def saving_s(self, layers: Iterable[int]) -> float:
        """Returns how long a worker writes the state of these layers, one after another."""
        return sum(map(self.save.seconds_of, self._sizes(layers)))

    def _sizes(self, layers: Iterable[int]) -> list[int]:
        return [self.profile.layers[layer].state_bytes for layer in layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds from the begin of an action to its end; ``still``: whether nothing is trained meanwhile."""

    seconds: float
    still: bool = True


def priced(recovery: RecoveryPlan, view: ClusterView, rates: Rates) -> tuple[Price, ...]:
    """Returns the price of each action of a recovery, in order, each in the view that those before it leave."""
    found = []
    for action in recovery.actions:
        found.append(price(action, view, rates))
        view = after(action, view)
    return tuple(found)


def price(action: Action, view: ClusterView, rates: Rates) -> Price:
    """Returns what an action costs in a view.

    Raises:
        InternalError: the view does not tell what that depends on.
    """
    return _PRICES[type(action)](action, view, rates)


def after(action: Action, view: ClusterView) -> ClusterView:
    """Returns the view once an action is carried out."""
    match action:
        case InstallPlan(plan=plan, grid=grid, keeps=keeps):
            interrupted = (view.plan, view.elapsed_s) if keeps and view.plan is not None else None
            baseline = grid or view.baseline
            return replace(view, plan=plan, baseline=baseline, elapsed_s=0.0, interrupted=interrupted)
        case ReplaceGrid(plan=plan):
            return replace(view, baseline=plan, lost=frozenset(), entering=frozenset())
        case TakeBack():
            return replace(view, resumes=view.step if view.resumes is None else view.resumes)
        case Restore():
            return replace(view, resumes=view.step if view.snapshot is None else view.snapshot)
        case LoadState(step=step):
            return replace(view, resumes=step)
        case Recompute() | FinishStep() | AverageOverSurvivors() | SkipStep() | RepeatStep():
            return replace(view, step=view.step + 1, resumes=None, interrupted=None)
        case _:
            return view


def step_seconds(plan: Plan, rates: Rates, *, updates_ahead: bool = False) -> float:
    """Returns how long a step of a plan takes that follows upon another one, from its first operation to its commit.

    What all know of a step, and the verdict, travel along the pipelines beside the last and the first operations: only
    the last part of a sum is waited for.
    """
    timeline = evaluate(plan, costs_from_profile(rates.profile), staggered=updates_ahead)
    return timeline.period + rates.message_s


def _abort(action: Abort, view: ClusterView, rates: Rates) -> Price:
    """The order travels; whoever computes hears it at the end of the operation."""
    return Price(seconds=rates.control_s + _left_of_operations(view, rates))


def _left_of_operations(view: ClusterView, rates: Rates) -> float:
    """Until the survivors have ended the operations that they are in, once the order has come."""
    if view.plan is None:
        return 0.0
    now = view.elapsed_s + rates.control_s
    spans = evaluate(view.plan, costs_from_profile(rates.profile)).spans
    return max(
        (each.end - now for each in spans if each.start <= now < each.end and each.worker not in view.lost), default=0
    )


def _install_plan(action: InstallPlan, view: ClusterView, rates: Rates) -> Price:
    """All connect; meanwhile, unless it is at a boundary, all say what they hold and hear from where they go on.

    Where they keep what they have of a step, only that tells with whom they have to connect.
    """
    if action.keeps:
        return Price(seconds=2 * rates.control_s + rates.connect_s)
    told_s = 0.0 if action.at_boundary else 2 * rates.control_s
    return Price(seconds=max(rates.connect_s, told_s))


def _finish_step(action: FinishStep, view: ClusterView, rates: Rates) -> Price:
    return _finished(view, rates, ())


def _average(action: AverageOverSurvivors, view: ClusterView, rates: Rates) -> Price:
    return _finished(view, rates, action.microbatches)


def _skip_step(action: SkipStep, view: ClusterView, rates: Rates) -> Price:
    return _finished(view, rates, tuple(each.number for each in _plan_of(view).routes.microbatches))


def _repeat_step(action: RepeatStep, view: ClusterView, rates: Rates) -> Price:
    return Price(seconds=_skip_step(SkipStep(), view, rates).seconds + _recompute(Recompute(), view, rates).seconds)


def _finished(view: ClusterView, rates: Rates, left_out: Sequence[int]) -> Price:
    """What is left of the step, as the survivors would plan it if each had come as far as by the plan before."""
    plan, costs = _plan_of(view), costs_from_profile(rates.profile)
    if view.interrupted is None:
        return _recompute(Recompute(), view, rates)
    before, elapsed_s = view.interrupted
    whole = _recompute(Recompute(), view, rates)
    try:
        progress = progress_at(before, costs, elapsed_s, view.step, view.lost)
        rest = plan_remainder(plan, progress, costs=costs, left_out=left_out)
    except InfeasiblePlan:
        return whole
    placement = plan.placement
    update_s = max(sum(costs.optimizer[layer] for layer in placement.layers_of(worker)) for worker in plan.workers)
    return Price(seconds=min(whole.seconds, rest.lasts + update_s + rates.message_s))


def _load_state(action: LoadState, view: ClusterView, rates: Rates) -> Price:
    """Until the last worker has read its layers."""
    left = view.baseline.placement.without(view.lost)
    return Price(seconds=max((rates.loading_s(left.layers_of(who)) for who in left.workers), default=0.0))


def _take_stock(action: TakeStock, view: ClusterView, rates: Rates) -> Price:
    """The order travels, and what all say."""
    return Price(seconds=2 * rates.control_s)


def _replay_layers(action: ReplayLayers, view: ClusterView, rates: Rates) -> Price:
    """Until the last worker has read its layers' checkpoint and run their steps since then, without bubbles.

    As if all that was logged were there in time.
    """
    costs, start = costs_from_profile(rates.profile), view.step if view.checkpoint is None else view.checkpoint
    numbers, held = len(view.baseline.routes.microbatches), view.baseline.placement.without(view.lost)
    most = 0.0
    for worker in action.plan.workers:
        layers = sorted(set(action.plan.placement.held_layers(worker)) - set(held.held_layers(worker)))
        passes_s = sum(costs.forward[i] + costs.input[i] + costs.weight[i] for i in layers)
        step_s = numbers * passes_s + sum(costs.optimizer[i] for i in layers)
        most = max(most, rates.loading_s(layers) + max(0, view.step - start) * step_s)
    return Price(seconds=2 * rates.control_s + most)


def _copy_state(action: CopyState, view: ClusterView, rates: Rates) -> Price:
    return Price(seconds=rates.copying_s(action.layers.indices), still=False)


def _recompute(action: Recompute, view: ClusterView, rates: Rates) -> Price:
    """The steps that were given up, and the one that was interrupted, whole."""
    step_s = step_seconds(_plan_of(view), rates, updates_ahead=view.updates_ahead)
    lost = view.step - (view.step if view.resumes is None else view.resumes)
    return Price(seconds=(lost + 1) * step_s)


def _plan_of(view: ClusterView) -> Plan:
    if view.plan is None:
        raise InternalError("steps are run again before a plan was installed")
    return view.plan


def _await(action: Await, view: ClusterView, rates: Rates) -> Price:
    """New processes come as fast as they start, if somebody starts them."""
    return Price(seconds=min(action.limit_s, _start(rates)) if view.coming else action.limit_s)


def _spawn(action: Spawn, view: ClusterView, rates: Rates) -> Price:
    return Price(seconds=_start(rates) if action.workers else 0.0, still=False)


def _start(rates: Rates) -> float:
    """The order travels, the process starts, and says that it is there."""
    return rates.start_s + 2 * rates.control_s


def _give_up(action: GiveUp, view: ClusterView, rates: Rates) -> Price:
    return Price(seconds=rates.control_s)


def _save_committed(action: SaveCommitted, view: ClusterView, rates: Rates) -> Price:
    """The order travels, the first living owner of each layer writes it, and all say so."""
    left = view.baseline.placement.without(view.lost)
    shares: defaultdict[WorkerId, list[int]] = defaultdict(list)
    for layer in range(left.num_layers):
        for first in left.owners(layer)[:1]:
            shares[first].append(layer)
    return Price(seconds=2 * rates.control_s + max(map(rates.saving_s, shares.values()), default=0.0))


def _at_once(action: Action, view: ClusterView, rates: Rates) -> Price:
    """Nothing but names and pointers changes."""
    return Price(seconds=0.0)


_PRICES: Mapping[type[Action], Callable[[Any, ClusterView, Rates], Price]] = MappingProxyType(
    {
        Abort: _abort,
        AverageOverSurvivors: _average,
        Await: _await,
        CopyState: _copy_state,
        FinishStep: _finish_step,
        GiveUp: _give_up,
        InstallPlan: _install_plan,
        LoadState: _load_state,
        Recompute: _recompute,
        Rejoin: _at_once,
        RepeatStep: _repeat_step,
        ReplaceGrid: _at_once,
        ReplayLayers: _replay_layers,
        Restore: _at_once,
        SaveCommitted: _save_committed,
        SkipStep: _skip_step,
        Spawn: _spawn,
        TakeBack: _at_once,
        TakeStock: _take_stock,
    }
)
