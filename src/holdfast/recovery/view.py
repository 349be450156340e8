"""What is known of a cluster when it is to be decided how a job goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.planning.maker import PROVING, PlanMaker
from holdfast.planning.training import Rerouted
from holdfast.recovery.rules import JobRules

__all__ = ["ClusterView"]


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
        expected_s: seconds until the next failure, on average, as far as anybody knows.
        maker: of plans.
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
    expected_s: float = math.inf
    maker: PlanMaker = PROVING

    @property
    def wait_s(self) -> float:
        """How long to wait for new workers before a smaller grid is chosen; 0: not at all, or no longer."""
        return 0.0 if self.waited else self.rules.wait_s

    @property
    def keeps(self) -> bool:
        """Whether workers keep what they have of an interrupted step, so that it can be gone on with."""
        return self.rules.keeping is not None
