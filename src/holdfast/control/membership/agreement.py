"""The agreement on a generation: what is carried out, from which state, and what is in doubt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.control.messages import StateAt
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.remainder import Remainder
from holdfast.recovery.actions import Action, AverageOverSurvivors, RecoveryPlan

__all__ = ["Doubts", "Forming", "LostWork", "Pair", "Restoring"]

Pair = tuple[int, int]
"""A layer, and the global number of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWork:
    """What a worker that is lost had run forward, as far as it was heard of, and what it may have run.

    Attributes:
        step: that its last heartbeat told; -1 if none of this generation did.
        ran: the pairs of that step that it had run.
        rest: the step that all had gone on with; -1 if none.
        ran_of_rest: the pairs of that step that it had run, those before it was interrupted among them.
        of_rest: all pairs of that step that were its own.
        of_plan: all pairs of any other step that were its own.
        exact: whether it had surely run nothing else.
    """

    step: int = -1
    ran: tuple[Pair, ...] = ()
    rest: int = -1
    ran_of_rest: tuple[Pair, ...] = ()
    of_rest: tuple[Pair, ...] = ()
    of_plan: tuple[Pair, ...] = ()
    exact: bool = False

    def known(self, step: int) -> tuple[Pair, ...]:
        """Returns the pairs of a step that it had surely run."""
        if step == self.rest:
            return self.ran_of_rest
        return self.ran if step == self.step else self.of_plan if step < self.step else ()

    def possible(self, step: int) -> tuple[Pair, ...]:
        """Returns the pairs of a step that it may have run."""
        if self.exact:
            return self.known(step)
        return self.of_rest if step == self.rest else self.of_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming:
    """What answers the last loss, and how far that has come.

    Attributes:
        answer: what is being carried out, or was last; None before the first generation.
        pending: what of it is still to be done, once all have said what they hold.
        resume_step: the step from which this generation runs.
        votes: those that settle the step before ``resume_step``, if some have updated ahead of its verdict.
        copying: to whom state is copied from the next boundary on.
        lost_work: of the workers lost since training last went on.
        rest: what is left of the step that is gone on with; None if it is run whole.
        left_out: micro-batches of those lost since training last went on, where these are left out of a step.
        lost_layers: layers without an owner; empty while training can go on.
        too_few: why training ends although every layer has an owner; empty otherwise.
        wait_until: when waiting for workers ends, however often those who come die again; None once a step was done
            since.
        wait_for_all: whether what is waited for is the whole grid; False unless waiting.
    """

    answer: RecoveryPlan | None = None
    pending: tuple[Action, ...] = ()
    resume_step: int = 0
    votes: tuple[bytes, ...] = ()
    copying: frozenset[WorkerId] = frozenset()
    lost_work: tuple[LostWork, ...] = ()
    rest: Remainder | None = None
    left_out: frozenset[int] = frozenset()
    lost_layers: tuple[int, ...] = ()
    too_few: str = ""
    wait_until: float | None = None
    wait_for_all: bool = False

    def answered(self, recovery: RecoveryPlan) -> Forming:
        """Returns it once this is to be carried out; what one that was overtaken has left out stays left out."""
        averages = (each for each in recovery.actions if isinstance(each, AverageOverSurvivors))
        left_out = self.left_out.union(*(each.microbatches for each in averages))
        return replace(self, answer=recovery, pending=recovery.actions, left_out=left_out)

    def left_out_of(self, step: int) -> frozenset[int]:
        """Returns what is left out of a step, also by a recovery before that went on with it."""
        before = self.rest.left_out if self.rest is not None and self.rest.step == step else ()
        return self.left_out.union(before)

    @property
    def strategy(self) -> str:
        """What has answered the last loss; empty before the first generation."""
        return self.answer.strategy if self.answer is not None else ""

    @property
    def dormant(self) -> frozenset[WorkerId]:
        """Who computes nothing by the plan of the answer, because of being told so."""
        return self.answer.dormant if self.answer is not None else frozenset()

    @property
    def period(self) -> float | None:
        """What the planner expects of the plan of the answer; None if it did not make it."""
        return self.answer.period if self.answer is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """From where state can be loaded. All of it is stored.

    Attributes:
        restorable: states that everyone could load, the newest first.
        loading: what everyone was told to load, until all have; whoever has not heard of it must be told again.
        logged: the boundaries at which something was logged in every step since the newest checkpoint, if the grid was
            another one in some of these, and the step before which it was; None: those of the grid.
        unlogged: whether what was logged does not suffice to replay what was lost, until all go on.
    """

    restorable: tuple[StateAt, ...] = ()
    loading: StateAt | None = None
    logged: tuple[int, tuple[int, ...]] | None = None
    unlogged: bool = False

    def over(self) -> Restoring:
        """Returns it once all go on; what comes behind a checkpoint that they loaded is logged in the grid that is."""
        return replace(self, loading=None, unlogged=False, logged=self.logged if self.loading is None else None)

    def with_grid(self, boundaries: Iterable[int], before: Iterable[int], step: int) -> Restoring:
        """Returns it once ``boundaries`` are logged, from ``step`` on, and no longer those of ``before``."""
        common = set(boundaries).intersection(before if self.logged is None else self.logged[1])
        return replace(self, logged=(step, tuple(sorted(common))))

    def with_checkpoint(self, found: StateAt, most: int) -> Restoring:
        """Returns it once there is one more checkpoint; of all, so many as ``most`` are remembered."""
        older = tuple(each for each in self.restorable if each.url is not None and each.step != found.step)
        restorable = tuple(sorted((*older, found), key=lambda each: -each.step)[:most])
        logged = None if self.logged is not None and restorable[0].step >= self.logged[0] else self.logged
        return replace(self, restorable=restorable, logged=logged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubts:
    """What time will tell. None of it is stored.

    Attributes:
        suspected_at: when the first unexplained suspicion of this generation came; None if none.
        suspicions: what they say, by who suspects whom; the first one first.
        reformations: generations begun in a row because of suspicions alone.
        renewed: when links were made anew last because of each pair of nodes, in order, of which workers had suspected
            each other.
        raised_at: when the first exception came that was not judged; None if all are.
        slow: who was told to be slow, and still is.
        waited_for: who is stuck, was told to be waited for, and still is.
    """

    suspected_at: float | None = None
    suspicions: Mapping[tuple[WorkerId, WorkerId | None], str] = field(default_factory=dict)
    reformations: int = 0
    renewed: Mapping[tuple[NodeId, NodeId], float] = field(default_factory=dict)
    raised_at: float | None = None
    slow: frozenset[WorkerId] = frozenset()
    waited_for: frozenset[WorkerId] = frozenset()

    def dispelled(self) -> Doubts:
        """Returns them once a generation has begun since."""
        return replace(self, suspected_at=None, suspicions={})
