"""What runs, what comes next, and what the members of this generation have said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast.control.messages import Status
from holdfast.core.evaluation import Best
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.planning.course import Course
from holdfast.planning.training import Rerouted
from holdfast.recovery.actions import RecoveryPlan

__all__ = ["Foreseen", "Promised", "Prospects", "RefusedMove", "Reports", "Running", "Situation", "Upcoming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcoming:
    """A generation that is prepared while another one runs.

    Attributes:
        generation: its number.
        plan: its plan.
        entering: workers that enter in it; those that entered before have caught up by then, or it waits for them.
        period: what the planner expects a step to take; None if it did not make the plan.
        baseline: the plan of the whole grid from then on; None if it stays as it is.
        pins: whether a checkpoint is pinned at the boundary before it.
        checkpoint_every: steps between two checkpoints from then on; 0 if the job says that once and for all.
        dormant: workers that are in it and compute nothing, as they were told.
    """

    generation: int
    plan: Plan
    entering: frozenset[WorkerId]
    dormant: frozenset[WorkerId] = frozenset()
    period: float | None = None
    baseline: Plan | None = None
    pins: bool = False
    checkpoint_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What runs. All of it is stored.

    Attributes:
        plan: the plan of this generation; None while gathering and when no plan is possible any more.
        period: what the planner expects a step of that plan to take; None if it did not make it.
        dormant: workers that are in the plan and compute nothing, as they were told.
        upcoming: the generation that is prepared; None if none is.
        staggered: whether updates are made ahead of the verdict.
        refusals: the last steps in which that had to be made up for because gradients were scaled.
        repeated: the steps whose micro-batches are run once more, in a step of their own behind them.
        ends: the step before which the loop of a script was stopped, as far as it is known; None: it was not.
        evaluated: the newest step before which the state was evaluated, by all micro-batches; 0: none was.
        best: the best state so far, and before it the one that was that before: its checkpoint is there until the
            other one's is.
    """

    plan: Plan | None = None
    period: float | None = None
    dormant: frozenset[WorkerId] = frozenset()
    upcoming: Upcoming | None = None
    staggered: bool = False
    refusals: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()
    ends: int | None = None
    evaluated: int = 0
    best: tuple[Best, ...] = ()

    def repeating(self, step: int) -> Running:
        """Returns it where the micro-batches of a step are run once more."""
        return replace(self, repeated=tuple(sorted({*self.repeated, step})))

    def of(self, plan: Plan | None, period: float | None, dormant: frozenset[WorkerId] = frozenset()) -> Running:
        """Returns it once another plan runs, or none."""
        return replace(self, plan=plan, period=period, dormant=dormant)

    def gone_over(self, upcoming: Upcoming) -> Running:
        """Returns it behind the boundary: what was prepared is what runs."""
        return replace(self.of(upcoming.plan, upcoming.period, upcoming.dormant), upcoming=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """What the members of this generation have said. It begins anew with each one that takes effect at once.

    Attributes:
        statuses: what the survivors hold.
        joined: members whose transport of this generation stands.
        joined_early: workers that entered whose transport of the prepared generation stands.
        finished: survivors that ran the last step of the job.
        saved: layer digests of the survivors, once written.
    """

    statuses: Mapping[WorkerId, Status] = field(default_factory=dict)
    joined: frozenset[WorkerId] = frozenset()
    joined_early: frozenset[WorkerId] = frozenset()
    finished: frozenset[WorkerId] = frozenset()
    saved: Mapping[WorkerId, Mapping[int, str]] = field(default_factory=dict)

    def of_status(self, status: Status) -> Reports:
        """Returns them once a worker has said what it holds."""
        return replace(self, statuses={**self.statuses, status.worker: status})

    def of_joined(self, worker: WorkerId) -> Reports:
        """Returns them once a member's transport of this generation stands."""
        return replace(self, joined=self.joined | {worker})

    def gone_over(self) -> Reports:
        """Returns them behind a boundary: whoever was early has joined."""
        return replace(self, joined=self.joined_early, joined_early=frozenset(), finished=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """The plan for when those who change places have caught up; ``lost`` are the workers without which it does."""

    lost: frozenset[WorkerId]
    offer: Rerouted


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedMove:
    """Why the whole grid did not become ``grid`` by layers handed over; ``absent`` are those who could not compute."""

    grid: Plan
    absent: frozenset[WorkerId]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Who is here, as far as it matters for which pipelines they should be.

    Attributes:
        absent: workers of the grid that cannot compute.
        going: others that were told to go.
        spares: workers that can be talked to and have no place in the grid.
    """

    absent: frozenset[WorkerId]
    going: frozenset[WorkerId]
    spares: frozenset[WorkerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What is expected of the way that answered the last loss.

    Attributes:
        chosen: its name.
        course: what was expected of it.
        at_s: when, in seconds of the coordinator's clock.
        step: how many were committed by then.
    """

    chosen: str
    course: Course
    at_s: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """What was planned ahead, and how often failures were seen to come. None of it is stored.

    Attributes:
        planned: answers prepared for the loss of one more worker, by all who would be gone.
        promised: the plan for when those who change places have caught up; None if nobody does.
        refused: the last grid that could not be become; it is not tried again while nobody has come or gone.
        weighed: the last situation in which nothing better was known, and why.
        began: when steps were first seen to run, in seconds of the coordinator's clock; None before.
        losses: how many times workers were lost since.
        foreseen: what is expected of the last answer; None where it was compared with none.
    """

    planned: Mapping[frozenset[WorkerId], RecoveryPlan] = field(default_factory=dict)
    promised: Promised | None = None
    refused: RefusedMove | None = None
    weighed: tuple[Situation, str] | None = None
    began: float | None = None
    losses: int = 0
    foreseen: Foreseen | None = None

    def answered(self, lost: frozenset[WorkerId], recovery: RecoveryPlan) -> Prospects:
        """Returns them with one more answer."""
        return replace(self, planned={**self.planned, lost: recovery})

    def why_not(self, grid: Plan, absent: frozenset[WorkerId]) -> str:
        """Returns why the whole grid cannot become ``grid``, as far as that was tried; empty if nothing is known."""
        known = self.refused is not None and (self.refused.grid, self.refused.absent) == (grid, absent)
        return self.refused.why if self.refused is not None and known else ""

    def has_weighed(self, situation: Situation) -> bool:
        """Whether it is known that nothing better is to be done in this situation."""
        return self.weighed is not None and self.weighed[0] == situation

    def struck(self) -> Prospects:
        """Returns them once workers were lost; before steps were run, that tells nothing."""
        return replace(self, losses=self.losses + (self.began is not None))
