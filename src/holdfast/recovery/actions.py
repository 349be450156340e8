"""The typed actions of which every recovery consists: the step from one plan to the next, as a value.

An action says what is done, when that can be done, and what it costs. What carries it out is a function of its own
(``control/membership/acting.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.profile import costs_from_profile
from holdfast.errors import InfeasiblePlan, InternalError
from holdfast.planning.course import Course
from holdfast.planning.remainder import plan_remainder, progress_at
from holdfast.planning.replays import Logging, logged_boundaries, plan_replays
from holdfast.recovery.rates import Price, Rates, remaining_seconds, replaying_seconds, step_seconds
from holdfast.recovery.view import ClusterView
from holdfast.schedule.evaluate import evaluate

__all__ = [
    "Abort",
    "Action",
    "AverageOverSurvivors",
    "Await",
    "CopyState",
    "FinishStep",
    "GiveUp",
    "InstallPlan",
    "LoadState",
    "Recompute",
    "RecoveryPlan",
    "Rejoin",
    "RepeatStep",
    "ReplaceGrid",
    "ReplayLayers",
    "Restore",
    "SaveCommitted",
    "SkipStep",
    "Spawn",
    "TakeBack",
    "TakeStock",
]


class Action(ABC):
    """One action of a recovery.

    Attributes:
        needs_reports: whether it can be carried out only once all have said at which step their layers are.
        keeps_state: whether the survivors go on with the state that they hold.
    """

    __slots__ = ()
    needs_reports: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True

    @abstractmethod
    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return what it costs in a view.

        Raises:
            InternalError: the view does not tell what that depends on.
        """

    def after(self, view: ClusterView) -> ClusterView:
        """Return the view once it is carried out."""
        return view


class _AtOnce(Action):
    """One by which nothing but names and pointers changes."""

    __slots__ = ()

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return that it takes no time."""
        return Price(seconds=0.0)


class _Ending(Action):
    """One that ends the interrupted step."""

    __slots__ = ()
    needs_reports = True

    def after(self, view: ClusterView) -> ClusterView:
        """Return the view between that step and the next one."""
        return replace(view, step=view.step + 1, resumes=None, interrupted=None)


# --- a generation begins ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Action):
    """A new generation begins: every survivor ends its communication and drops the unfinished step."""

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long the order travels, and until the survivors have ended the operations that they are in."""
        if view.plan is None:
            return Price(seconds=rates.control_s)
        now = view.elapsed_s + rates.control_s
        spans = evaluate(view.plan, costs_from_profile(rates.profile)).spans
        computing = (each.end - now for each in spans if each.start <= now < each.end and each.worker not in view.lost)
        return Price(seconds=rates.control_s + max(computing, default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPlan(Action):
    """The survivors join a new generation that runs ``plan``: at once, or after a step that they all finish.

    ``grid``: the plan of the whole grid from that boundary on; None if it stays as it is. ``keeps``: at once, and what
    they have of the interrupted step is kept until it is known what is left of it.
    """

    plan: Plan
    at_boundary: bool = False
    grid: Plan | None = None
    keeps: bool = False

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return until all are connected; meanwhile, if it is at once, all report and hear from where they go on.

        Where they keep what they have of a step, only that tells with whom they have to connect.
        """
        if self.keeps:
            return Price(seconds=2 * rates.control_s + rates.connect_s)
        told_s = 0.0 if self.at_boundary else 2 * rates.control_s
        return Price(seconds=max(rates.connect_s, told_s))

    def after(self, view: ClusterView) -> ClusterView:
        """Return the view of those who run the plan."""
        interrupted = (view.plan, view.elapsed_s) if self.keeps and view.plan is not None else None
        baseline = self.grid or view.baseline
        return replace(view, plan=self.plan, baseline=baseline, elapsed_s=0.0, interrupted=interrupted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceGrid(_AtOnce):
    """``plan`` is that of the whole grid from now on: whoever has no place in it is sent away."""

    plan: Plan

    def after(self, view: ClusterView) -> ClusterView:
        """Return the view of a grid in which nobody is missing."""
        return replace(view, baseline=self.plan, lost=frozenset(), entering=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin(_AtOnce):
    """Everybody holds layers: the loss is answered anew, as one after which every layer has an owner.

    ``grid``: the plan of the whole grid from now on; None if it stays as it is.
    """

    needs_reports = True
    grid: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn(Action):
    """A new process is started for each of these places."""

    workers: tuple[WorkerId, ...]

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return until the processes say that they are there."""
        return Price(seconds=_starting_s(rates) if self.workers else 0.0, still=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Await(Action):
    """Nothing is trained until workers have come for the lost layers, for ``limit_s`` seconds at most.

    Then all load the last checkpoint, so there must be one. ``everyone``: until the grid is whole again, not only every
    layer held by somebody.
    """

    keeps_state = False
    limit_s: float
    everyone: bool = False

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long new processes take to start, if somebody starts them; else all of the limit."""
        return Price(seconds=min(self.limit_s, _starting_s(rates)) if view.coming else self.limit_s)


# --- what workers hold ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack(_AtOnce):
    """Every layer that swapped ahead of the lowest step among the survivors goes back to it."""

    needs_reports = True

    def after(self, view: ClusterView) -> ClusterView:
        """Return the view of those who agree on a step."""
        return replace(view, resumes=view.step if view.resumes is None else view.resumes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(_AtOnce):
    """Every survivor goes back to the newest snapshot in its own memory that all of them hold.

    Where no snapshot is held by all, since one of them came after it, this is :class:`TakeBack`.
    """

    needs_reports = True

    def after(self, view: ClusterView) -> ClusterView:
        """Return the view of those who hold the snapshot."""
        return replace(view, resumes=view.step if view.snapshot is None else view.snapshot)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState(Action):
    """The owners of ``layers`` give ``target`` the state of the step at which the plan is installed, while they train.

    ``target`` takes part in the reductions of these layers meanwhile, and makes the updates that it missed itself.
    """

    layers: LayerRange
    target: WorkerId

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long the state travels, while all train."""
        return Price(seconds=rates.copying_s(self.layers.indices), still=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState(Action):
    """Everyone gives up what it holds and loads its layers as they were before ``step``, from the last checkpoint."""

    keeps_state = False
    step: int

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return until the last worker has read its layers."""
        left = view.baseline.placement.without(view.lost)
        return Price(seconds=max((rates.loading_s(left.layers_of(who)) for who in left.workers), default=0.0))

    def after(self, view: ClusterView) -> ClusterView:
        """Return the view of those who go on from that step."""
        return replace(view, resumes=self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStock(Action):
    """All say what they hold, also whoever has come and holds nothing yet; what they keep of a step stays."""

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long the order travels, and what all say."""
        return Price(seconds=2 * rates.control_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLayers(Action):
    """Whoever lacks layers that ``plan`` gives it computes them again, from the last checkpoint and from logs.

    Nothing else is touched, and the others wait: they keep their state, and what they have of the interrupted step.
    """

    needs_reports, keeps_state = True, False
    plan: Plan

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return until the last worker has connected, read what it replays and run its share of their steps since then.

        As if all that was logged were there in time, and sums among those who share took none.
        """
        start = view.step if view.checkpoint is None else view.checkpoint
        left, logging = view.baseline.placement.without(view.lost), view.rules.logging or Logging()
        replays = plan_replays(
            self.plan.placement,
            {worker: left.held_layers(worker) for worker in left.workers},
            view.baseline.routes.microbatches,
            logged_boundaries(view.baseline, logging),
            helpers=logging.helpers,
            start=start,
            stop=max(start, view.step),
        )
        return Price(seconds=replaying_seconds(replays, rates))


# --- what becomes of the interrupted step -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(_Ending):
    """All steps from the one that was gone back to are run again, the interrupted one from its beginning."""

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long the steps take that were given up, and the one that was interrupted, whole."""
        step_s = step_seconds(_installed(view), rates, updates_ahead=view.updates_ahead)
        given_up = view.step - (view.step if view.resumes is None else view.resumes)
        return Price(seconds=(given_up + 1) * step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep(_Ending):
    """The interrupted step is gone on with: of it only what the lost alone had done is run again.

    Where what the survivors have of it does not suffice, this is :class:`TakeBack` and :class:`Recompute`.
    """

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long what is left of the step takes."""
        return _remainder(view, rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOverSurvivors(_Ending):
    """The interrupted step is gone on with, without what the lost had of it: nothing is run again.

    Reductions that somebody has completed stand; all others are the mean of the survivors' micro-batches. So the result
    is another one than that of the run in which nothing failed.

    Attributes:
        microbatches: global numbers of those that the lost were to run.
    """

    microbatches: tuple[int, ...]

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long what is left of the step takes without these."""
        return _remainder(view, rates, self.microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStep(_Ending):
    """The interrupted step ends here: layers whose reductions somebody has completed are updated, the others are not.

    So the result is another one than that of the run in which nothing failed.
    """

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long the updates take, and that all agree on them."""
        return _remainder(view, rates, tuple(each.number for each in _installed(view).routes.microbatches))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatStep(_Ending):
    """The interrupted step ends as with :class:`SkipStep`; then all its micro-batches are run, in a step of their own.

    So layers whose reductions somebody had completed are updated twice with it.
    """

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long both take."""
        return Price(seconds=SkipStep().price(view, rates).seconds + Recompute().price(view, rates).seconds)


# --- training ends ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp(Action):
    """Training cannot go on; the survivors join a last generation without a plan.

    Nobody holds the layers ``lost``; if there are none, ``why`` tells why training ends all the same.
    """

    keeps_state = False
    lost: tuple[int, ...]
    why: str = ""

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return how long the order travels."""
        return Price(seconds=rates.control_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted(Action):
    """The state that was gone back to is written, of every layer that lives, and the job ends."""

    needs_reports = True

    def price(self, view: ClusterView, rates: Rates) -> Price:
        """Return until the first living owner of each layer has been told, has written it, and has said so."""
        left = view.baseline.placement.without(view.lost)
        shares: defaultdict[WorkerId, list[int]] = defaultdict(list)
        for layer in range(left.num_layers):
            for first in left.owners(layer)[:1]:
                shares[first].append(layer)
        return Price(seconds=2 * rates.control_s + max(map(rates.saving_s, shares.values()), default=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """What takes the job from one plan to the next, in order, and the strategy that chose it.

    ``period``: what the planner expects a step of its plan to take; None if the planner did not make it.
    ``dormant``: who of the plan computes nothing because of being told so. ``course``: what is expected of it, where
    that was compared with others; ``weighed``: the names of all of them, and how many steps each makes until the next
    failure; ``chosen``: its own.
    """

    strategy: str
    actions: tuple[Action, ...]
    period: float | None = None
    dormant: frozenset[WorkerId] = frozenset()
    course: Course | None = None
    weighed: tuple[tuple[str, float], ...] = ()
    chosen: str = ""

    @property
    def plan(self) -> Plan | None:
        """The plan that is installed; None if training ends."""
        return next((action.plan for action in self.actions if isinstance(action, InstallPlan)), None)

    @property
    def keeps_state(self) -> bool:
        """Whether the survivors go on with the state that they hold: then it does not matter what could be loaded."""
        return all(action.keeps_state for action in self.actions)

    def priced(self, view: ClusterView, rates: Rates) -> tuple[Price, ...]:
        """Return the price of each action, in order, each in the view that those before it leave.

        Raises:
            InternalError: the view does not tell what a price depends on.
        """
        found = []
        for action in self.actions:
            found.append(action.price(view, rates))
            view = action.after(view)
        return tuple(found)


def _installed(view: ClusterView) -> Plan:
    if view.plan is None:
        raise InternalError("steps are run again before a plan was installed")
    return view.plan


def _remainder(view: ClusterView, rates: Rates, left_out: Sequence[int] = ()) -> Price:
    """What is left of the step, as the survivors would plan it if each had come as far as by the plan before."""
    plan, whole = _installed(view), Recompute().price(view, rates)
    if view.interrupted is None:
        return whole
    costs = costs_from_profile(rates.profile)
    before, elapsed_s = view.interrupted
    try:
        progress = progress_at(before, costs, elapsed_s, view.step, view.lost)
        rest = plan_remainder(plan, progress, costs=costs, left_out=left_out, proves=False)
    except InfeasiblePlan:
        return whole
    return Price(seconds=min(whole.seconds, remaining_seconds(plan, rest.lasts, rates)))


def _starting_s(rates: Rates) -> float:
    """The order travels, the process starts, and says that it is there."""
    return rates.start_s + 2 * rates.control_s
