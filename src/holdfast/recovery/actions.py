"""The typed actions of which every recovery consists: the step from one plan to the next, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan

__all__ = [
    "Abort",
    "Action",
    "ClusterView",
    "CopyState",
    "InstallPlan",
    "Recompute",
    "RecoveryPlan",
    "SaveCommitted",
    "TakeBack",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Every survivor ends its communication of the current generation and drops the unfinished step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """Every layer that swapped ahead of the lowest step among the survivors goes back to it."""


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
class Recompute:
    """The interrupted step is run again from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted:
    """Training cannot go on: the last committed step of every layer that lives is written, ``lost`` are the others."""

    lost: tuple[int, ...]


Action = Abort | TakeBack | InstallPlan | CopyState | Recompute | SaveCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """What takes the job from one plan to the next, in order, and the strategy that chose it."""

    strategy: str
    actions: tuple[Action, ...]

    @property
    def plan(self) -> Plan | None:
        """The plan that is installed; None if training ends."""
        return next((action.plan for action in self.actions if isinstance(action, InstallPlan)), None)

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
    """

    healthy: Plan
    lost: frozenset[WorkerId]
    entering: frozenset[WorkerId] = frozenset()
