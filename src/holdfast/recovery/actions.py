"""The typed actions of which every recovery consists: the step from one plan to the next, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.planning.training import Rerouted
from holdfast.recovery.rules import JobRules

__all__ = [
    "Abort",
    "Action",
    "AverageOverSurvivors",
    "Await",
    "ClusterView",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A new generation begins: every survivor ends its communication and drops the unfinished step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """Every layer that swapped ahead of the lowest step among the survivors goes back to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Every survivor goes back to the newest snapshot in its own memory that all of them hold.

    Where no snapshot is held by all, since one of them came after it, this is :class:`TakeBack`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPlan:
    """The survivors join a new generation that runs ``plan``: at once, or after a step that they all finish.

    ``grid``: the plan of the whole grid from that boundary on; None if it stays as it is. ``keeps``: at once, and what
    they have of the interrupted step is kept until it is known what is left of it.
    """

    plan: Plan
    at_boundary: bool = False
    grid: Plan | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """The owners of ``layers`` give ``target`` the state of the step at which the plan is installed, while they train.

    ``target`` takes part in the reductions of these layers meanwhile, and makes the updates that it missed itself.
    """

    layers: LayerRange
    target: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Everyone gives up what it holds and loads its layers as they were before ``step``, from the last checkpoint."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStock:
    """All say what they hold, also whoever has come and holds nothing yet; what they keep of a step stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLayers:
    """Whoever lacks layers that ``plan`` gives it computes them again, from the last checkpoint and from logs.

    Nothing else is touched, and the others wait: they keep their state, and what they have of the interrupted step.
    """

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin:
    """Everybody holds layers: the loss is answered anew, as one after which every layer has an owner.

    ``grid``: the plan of the whole grid from now on; None if it stays as it is.
    """

    grid: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceGrid:
    """``plan`` is that of the whole grid from now on: whoever has no place in it is sent away."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """A new process is started for each of these places."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Nothing is trained until workers have come for the lost layers, for ``limit_s`` seconds at most.

    Then all load the last checkpoint, so there must be one. ``everyone``: until the grid is whole again, not only every
    layer held by somebody.
    """

    limit_s: float
    everyone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """All steps from the one that was gone back to are run again, the interrupted one from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep:
    """The interrupted step is gone on with: of it only what the lost alone had done is run again.

    Where what the survivors have of it does not suffice, this is :class:`TakeBack` and :class:`Recompute`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOverSurvivors:
    """The interrupted step is gone on with, without what the lost had of it: nothing is run again.

    Reductions that somebody has completed stand; all others are the mean of the survivors' micro-batches. So the result
    is another one than that of the run in which nothing failed.

    Attributes:
        microbatches: global numbers of those that the lost were to run.
    """

    microbatches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStep:
    """The interrupted step ends here: layers whose reductions somebody has completed are updated, the others are not.

    So the result is another one than that of the run in which nothing failed.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatStep:
    """The interrupted step ends as with :class:`SkipStep`; then all its micro-batches are run, in a step of their own.

    So layers whose reductions somebody had completed are updated twice with it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Training cannot go on; the survivors join a last generation without a plan.

    Nobody holds the layers ``lost``; if there are none, ``why`` tells why training ends all the same.
    """

    lost: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted:
    """The state that was gone back to is written, of every layer that lives, and the job ends."""


Action = (
    Abort
    | AverageOverSurvivors
    | Await
    | CopyState
    | FinishStep
    | GiveUp
    | InstallPlan
    | LoadState
    | Recompute
    | Rejoin
    | RepeatStep
    | ReplaceGrid
    | ReplayLayers
    | Restore
    | SaveCommitted
    | SkipStep
    | Spawn
    | TakeBack
    | TakeStock
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """What takes the job from one plan to the next, in order, and the strategy that chose it.

    ``period``: what the planner expects a step of its plan to take; None if the planner did not make it.
    ``dormant``: who of the plan computes nothing because of being told so.
    """

    strategy: str
    actions: tuple[Action, ...]
    period: float | None = None
    dormant: frozenset[WorkerId] = frozenset()

    @property
    def plan(self) -> Plan | None:
        """The plan that is installed; None if training ends."""
        return next((action.plan for action in self.actions if isinstance(action, InstallPlan)), None)

    @property
    def keeps_state(self) -> bool:
        """Whether the survivors go on with the state that they hold: then it does not matter what could be loaded."""
        return not any(isinstance(action, Await | GiveUp | LoadState | ReplayLayers) for action in self.actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What a strategy may look at.

    Attributes:
        rules: what the job says once and for all.
        baseline: the plan of the whole grid.
        lost: workers of it that cannot compute: gone, leaving, or without state.
        entering: those of them that are there and get their state now.
        dormant: workers of it that hold their state and are to compute nothing, where their layers have other owners.
        checkpoint: the step of the newest state that can be loaded; None if there is none.
        offer: a plan for this very loss that is better than what would be made at once; None if there is none.
        target: the plan of the whole grid that is to come, by layers handed from worker to worker; None if it stays.
        plan: what runs; None if nothing does.
        step: the first that is not committed, as far as is known.
        elapsed_s: how long it has been run.
        resumes: the step from which all go on; None until that is known.
        snapshot: the newest step of which all have a snapshot in their memory; None if there is none.
        coming: whether new processes are started for the lost.
        updates_ahead: whether updates are made ahead of the verdict.
        spares: how many workers are there that have no place in the grid.
        waited: whether whoever is missing has been waited for as long as the job says.
        interrupted: the plan whose step was interrupted, and how long that had been run; None if nothing of it is kept.
        logs: whether what crosses nodes is logged, so that layers without an owner can be replayed.
    """

    rules: JobRules
    baseline: Plan
    lost: frozenset[WorkerId]
    entering: frozenset[WorkerId] = frozenset()
    dormant: frozenset[WorkerId] = frozenset()
    checkpoint: int | None = None
    offer: Rerouted | None = None
    target: Plan | None = None
    plan: Plan | None = None
    step: int = 0
    elapsed_s: float = 0.0
    resumes: int | None = None
    snapshot: int | None = None
    coming: bool = False
    updates_ahead: bool = False
    spares: int = 0
    waited: bool = False
    interrupted: tuple[Plan, float] | None = None
    logs: bool = False

    @property
    def wait_s(self) -> float:
        """How long to wait for new workers before a smaller grid is chosen; 0: not at all, or no longer."""
        return 0.0 if self.waited else self.rules.wait_s

    @property
    def keeps(self) -> bool:
        """Whether workers keep what they have of an interrupted step, so that it can be gone on with."""
        return self.rules.keeping is not None
