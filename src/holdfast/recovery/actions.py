"""The typed actions of which every recovery consists: the step from one plan to the next, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.planning.training import Rerouted, Terms

__all__ = [
    "Abort",
    "Action",
    "Await",
    "ClusterView",
    "CopyState",
    "InstallPlan",
    "LoadState",
    "Recompute",
    "RecoveryPlan",
    "Restore",
    "SaveCommitted",
    "Spawn",
    "TakeBack",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Every survivor ends its communication of the current generation and drops the unfinished step."""


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
    """The survivors join a new generation that runs ``plan``: at once, or after a step that they all finish."""

    plan: Plan
    at_boundary: bool = False


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
class Spawn:
    """A new process is started for each of these places."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Nothing is trained until workers have come for the lost layers, for ``limit_s`` seconds at most.

    ``everyone``: until the grid is whole again, not only every layer held by somebody.
    """

    limit_s: float
    everyone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """All steps from the one that was gone back to are run again, the interrupted one from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted:
    """Training cannot go on: the last committed step of every layer that lives is written, ``lost`` are the others."""

    lost: tuple[int, ...]


Action = Abort | TakeBack | Restore | InstallPlan | CopyState | LoadState | Spawn | Await | Recompute | SaveCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """What takes the job from one plan to the next, in order, and the strategy that chose it.

    ``note``: what the user should know of how its plan was made; empty if nothing. ``period``: what the planner expects
    a step of its plan to take; None if the planner did not make it.
    """

    strategy: str
    actions: tuple[Action, ...]
    note: str = ""
    period: float | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan that is installed; None if training ends."""
        return next((action.plan for action in self.actions if isinstance(action, InstallPlan)), None)

    @property
    def loads(self) -> int | None:
        """The step whose state everyone loads; None if all keep what they hold."""
        return next((action.step for action in self.actions if isinstance(action, LoadState)), None)

    @property
    def awaits_s(self) -> float:
        """How long workers are waited for; 0 if they are not."""
        return next((action.limit_s for action in self.actions if isinstance(action, Await)), 0.0)

    @property
    def awaits_everyone(self) -> bool:
        """Whether it is waited until the grid is whole."""
        return any(action.everyone for action in self.actions if isinstance(action, Await))

    @property
    def spawns(self) -> tuple[WorkerId, ...]:
        """The places for which new processes are started."""
        return next((action.workers for action in self.actions if isinstance(action, Spawn)), ())

    @property
    def lost_layers(self) -> tuple[int, ...]:
        """Layers that no survivor holds; empty if training goes on."""
        return next((action.lost for action in self.actions if isinstance(action, SaveCommitted)), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What a strategy may look at.

    Attributes:
        healthy: the plan of the whole grid.
        lost: workers of it that cannot compute: gone, leaving, or without state.
        entering: those of them that are there and get their state now.
        checkpoint: the step of the newest state that can be loaded; None if there is none.
        wait_s: how long to wait for new workers before a smaller grid is chosen.
        terms: what the planner goes by; None if plans keep to 1F1B's rules.
        offer: a plan for this very loss that is better than what would be made at once; None if there is none.
    """

    healthy: Plan
    lost: frozenset[WorkerId]
    entering: frozenset[WorkerId] = frozenset()
    checkpoint: int | None = None
    wait_s: float = 0.0
    terms: Terms | None = None
    offer: Rerouted | None = None
