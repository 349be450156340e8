"""What the coordinator knows, what can happen to it, and what it answers: values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from holdfast.control.checkpoint_ledger import CheckpointLedger, WriteManifest
from holdfast.control.detection import Watch, forget
from holdfast.control.membership.cadence import Cadence
from holdfast.control.membership.starting import Starting
from holdfast.control.messages import Command, Ended, Expel, Fence, Hello, Raised, StateAt, Status
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.planning.migration import Migration
from holdfast.planning.training import Rerouted, Terms
from holdfast.recovery.actions import Action, RecoveryPlan
from holdfast.telemetry.events import Detected, Event, Notice

__all__ = [
    "AnswerPlanned",
    "Closed",
    "Decision",
    "Handover",
    "Improved",
    "Membership",
    "Output",
    "Phase",
    "Promised",
    "Record",
    "Tell",
    "Tick",
    "Upcoming",
    "departed",
    "expulsion",
    "held_for_lost",
    "notice",
    "prefixed",
    "tell_each",
    "without",
]

_V = TypeVar("_V")


class Phase(StrEnum):
    """Where the job is."""

    GATHERING = "gathering"
    FORMING = "forming"
    RUNNING = "running"
    WAITING = "waiting"
    SAVING = "saving"
    REATTACHING = "reattaching"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Event: the control connection of a process is gone. It may live, and then connects again.

    ``worker``: whose; None for the agent.
    """

    worker: WorkerId | None
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Event: time passed.

    ``gap_s``: seconds since the tick before, those included for which the coordinator was stopped.
    """

    gap_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Output: send ``command`` to a worker (its process ``pid``, if given), or to the agent if ``to`` is None."""

    to: WorkerId | None
    command: Command
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Output: write ``event`` into the job's log."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlanned:
    """Event: the answer to a loss that has not happened yet; ``lost`` are all workers that would be gone."""

    lost: frozenset[WorkerId]
    recovery: RecoveryPlan


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
    """

    generation: int
    plan: Plan
    entering: frozenset[WorkerId]
    period: float | None = None
    baseline: Plan | None = None
    pins: bool = False
    checkpoint_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The same workers are to hold other layers: ``grid`` is the plan of all of them then.

    Nothing is given up for it: layers are followed first, and let go of when their takers hold them.
    """

    grid: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """Event: a better plan is known, or there will be one once workers have changed places or handed layers over.

    ``lost`` are the workers without which it does.
    """

    lost: frozenset[WorkerId]
    offer: Rerouted | Migration | Handover


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """The plan for when those who change places have caught up; ``lost`` are the workers without which it does."""

    lost: frozenset[WorkerId]
    offer: Rerouted


Output = Tell | Record | WriteManifest
Decision = tuple["Membership", tuple[Output, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """All that the coordinator knows.

    Attributes:
        baseline: the plan of the whole grid.
        steps: how many steps the job has; the last committed one is ``steps - 1`` at the end.
        strategy: name of the recovery strategy.
        terms: what the planner goes by; None if plans keep to 1F1B's rules.
        directory: where the final (or last committed) layers are written.
        generation: version of the membership; 0 until everyone attached once.
        generations: how many of them installed a plan.
        plan: the plan of this generation; None while gathering and when no plan is possible any more.
        period: what the planner expects a step of that plan to take; None if it did not make it.
        pids: the process of each worker that attached.
        lost: workers that are gone.
        arriving: workers that attached to the running job and are in no generation yet.
        entering: members of this generation without state.
        synced: those of ``entering`` that have caught up.
        leaving: workers that were told to go; one without state goes when it has caught up.
        upcoming: the generation that is prepared; None if none is.
        expected: lost workers for which a new process is being started.
        abandoned: vacant places whose joiner died without state; nobody is started there again unasked.
        starting: processes that were started and have yet to attach.
        offers: places (None: any) for which a new worker could be started and that were not vacant so far.
        watch: who was heard of when.
        statuses: what the survivors said about this generation.
        joined: members whose transport of this generation stands.
        joined_early: workers that entered whose transport of the prepared generation stands.
        finished: survivors that ran the last step of the job.
        saved: layer digests of the survivors, once written.
        planned: answers prepared for the loss of one more worker, by all who would be gone.
        answer: what is being carried out, or was last; None before the first generation.
        pending: what of it is still to be done, once all have said what they hold.
        tallies: those that settle the step before ``resume_step``, if some have updated ahead of its verdict.
        copying: to whom state is copied from the next boundary on.
        lost_work: (step, pairs run of it) of the workers lost since training last went on.
        lost_layers: layers without an owner; empty while training can go on.
        restorable: states that everyone could load, the newest first.
        wait_s: how long to wait for workers when a layer has no owner.
        wait_until: when that ends, however often those who come die again; None once a step was done since.
        wait_for_all: whether what is waited for is the whole grid; False unless waiting.
        loading: what everyone was told to load, until all have; whoever has not heard of it must be told again.
        resume_step: the step from which this generation runs.
        last_step: the newest step that was reported done; -1 before the first.
        suspected_at: when the first unexplained suspicion of this generation came; None if none.
        reformations: generations begun in a row because of suspicions alone.
        checkpoints: what is written of checkpoints.
        cadence: how often checkpoints are made, where that is set by what they cost; None where the job says it.
        staggered: whether updates are made ahead of the verdict.
        began: when steps were first seen to run, in seconds of the coordinator's clock; None before.
        target: the plan that the whole grid is to have once layers were handed over; None if it stays as it is.
        former: the plan of the whole grid that ``baseline`` was taken to have replaced, until all have said what they
            hold; None otherwise.
        promised: the plan for when those who change places have caught up; None if nobody does.
        losses: how many times workers were lost since.
        failure_every_s: how often a failure is to be expected, in seconds; 0: as often as so far.
        refusals: the last steps in which that had to be made up for because gradients were scaled.
        tolerate: how many workers may be lost to exceptions within 100 steps, before it is the program; at least 1.
        raised: exceptions in workers that have stopped, of steps that are not committed, the oldest first.
        raised_at: when the first of those came that were not judged; None if all are.
        kept: lost workers that have stopped and whose process stays until it is known whose fault it was.
        losses_by_exception: of the last 100 steps.
        blame: why the program ends the job, which then only saves what lives; empty unless it does.
        preempted: whether the agent was told to end.
        pinned: step and generation of the checkpoint that was pinned for that, and that ends the job; None before. No
            generation (0): a recovery made it uncertain that all will write their parts, so it is pinned again.
        revision: how many changes there were that a coordinator which is started again must know of.
        detached: workers that are not lost and whose process has no connection, and since when.
        returned: workers that are back at a coordinator that was started again, and what they said.
        reattach_until: when those that are not back are given up.
        agent_away: whether the agent has to say first what it has seen and started.
        ended: how the job ended; None before.
        job: which of all jobs this is; whose decisions are in a store is told by it.
        past_lost: why what was decided before is not known; empty if it is.
        told_gone: processes whose loss, or leaving, a coordinator has told of whose decisions are not known.
    """

    baseline: Plan
    steps: int
    strategy: str
    directory: str
    terms: Terms | None = None
    phase: Phase = Phase.GATHERING
    generation: int = 0
    generations: int = 0
    plan: Plan | None = None
    period: float | None = None
    pids: Mapping[WorkerId, int] = field(default_factory=dict)
    lost: frozenset[WorkerId] = frozenset()
    arriving: frozenset[WorkerId] = frozenset()
    entering: frozenset[WorkerId] = frozenset()
    synced: frozenset[WorkerId] = frozenset()
    leaving: frozenset[WorkerId] = frozenset()
    upcoming: Upcoming | None = None
    expected: frozenset[WorkerId] = frozenset()
    abandoned: frozenset[WorkerId] = frozenset()
    offers: tuple[WorkerId | None, ...] = ()
    starting: Starting = field(default_factory=Starting)
    watch: Watch = field(default_factory=Watch)
    statuses: Mapping[WorkerId, Status] = field(default_factory=dict)
    joined: frozenset[WorkerId] = frozenset()
    joined_early: frozenset[WorkerId] = frozenset()
    finished: frozenset[WorkerId] = frozenset()
    saved: Mapping[WorkerId, Mapping[int, str]] = field(default_factory=dict)
    planned: Mapping[frozenset[WorkerId], RecoveryPlan] = field(default_factory=dict)
    answer: RecoveryPlan | None = None
    pending: tuple[Action, ...] = ()
    tallies: tuple[bytes, ...] = ()
    copying: frozenset[WorkerId] = frozenset()
    lost_work: tuple[tuple[int, int], ...] = ()
    lost_layers: tuple[int, ...] = ()
    restorable: tuple[StateAt, ...] = ()
    wait_s: float = 0.0
    wait_until: float | None = None
    loading: StateAt | None = None
    wait_for_all: bool = False
    resume_step: int = 0
    last_step: int = -1
    suspected_at: float | None = None
    suspicion: str = ""
    reformations: int = 0
    checkpoints: CheckpointLedger = field(default_factory=CheckpointLedger)
    cadence: Cadence | None = None
    staggered: bool = False
    began: float | None = None
    target: Plan | None = None
    former: Plan | None = None
    promised: Promised | None = None
    losses: int = 0
    failure_every_s: float = 0.0
    refusals: tuple[int, ...] = ()
    tolerate: int = 0
    raised: tuple[Raised, ...] = ()
    raised_at: float | None = None
    kept: frozenset[WorkerId] = frozenset()
    losses_by_exception: tuple[Raised, ...] = ()
    blame: str = ""
    preempted: bool = False
    pinned: tuple[int, int] | None = None
    revision: int = 0
    detached: Mapping[WorkerId, float] = field(default_factory=dict)
    returned: Mapping[WorkerId, Hello] = field(default_factory=dict)
    reattach_until: float = 0.0
    agent_away: bool = False
    ended: Ended | None = None
    job: str = ""
    past_lost: str = ""
    told_gone: frozenset[tuple[WorkerId, int]] = frozenset()

    @property
    def interval(self) -> int:
        """Steps between two checkpoints from the next generation on; 0 if the job says that once and for all."""
        return 0 if self.cadence is None else self.cadence.wanted

    @property
    def present(self) -> frozenset[WorkerId]:
        """Everyone who is not lost, in this generation or on the way to one."""
        return frozenset(self.baseline.workers) - self.lost

    @property
    def absent(self) -> frozenset[WorkerId]:
        """Who of the grid cannot compute: lost, or without its layers' state so far."""
        return frozenset(self.baseline.workers) & (self.lost | self.arriving | (self.entering - self.synced))

    @property
    def full(self) -> tuple[WorkerId, ...]:
        """The members that hold their layers' state, in order: whoever can compute and recover."""
        absent = self.absent
        return tuple(worker for worker in self.baseline.workers if worker not in absent)

    @property
    def only_saves(self) -> bool:
        """Whether nothing is left to be done but to save what lives."""
        return bool(self.blame or self.past_lost)

    @property
    def unjudged(self) -> tuple[Raised, ...]:
        """What members that have stopped reported and was not judged yet."""
        if self.only_saves:
            return ()
        return tuple(each for each in self.raised if each.worker in self.present and self.pids[each.worker] == each.pid)

    @property
    def alive(self) -> tuple[WorkerId, ...]:
        """The members of this generation, in order: full ones and those that are entering."""
        absent = self.lost | self.arriving
        return tuple(worker for worker in self.baseline.workers if worker not in absent)


def departed(state: Membership, gone: frozenset[WorkerId]) -> Membership:
    """Returns the membership once ``gone`` are lost: nothing is expected of them any more, nor held against them."""
    return replace(
        state,
        lost=state.lost | gone,
        arriving=state.arriving - gone,
        entering=state.entering - gone,
        synced=state.synced - gone,
        leaving=state.leaving - gone,
        detached=without(state.detached, *gone),
        returned=without(state.returned, *gone),
        watch=forget(state.watch, gone),
    )


def held_for_lost(state: Membership, worker: WorkerId, how: str) -> tuple[Output, ...]:
    """Returns what tells that a worker is lost, and ends its process should it live."""
    detected = Record(event=Detected(worker=str(worker), how=how, generation=state.generation))
    return (detected, *expulsion(state, worker, f"held for lost: {how}"))


def expulsion(state: Membership, worker: WorkerId, reason: str) -> tuple[Tell, Tell]:
    """Returns what ends a worker for good: it must not act any more, and its place is free only when it is gone."""
    pid = state.pids.get(worker)
    expel = Tell(to=worker, pid=pid, command=Expel(reason=reason))
    return expel, Tell(to=None, command=Fence(worker=worker, pid=pid or 0))


def prefixed(outputs: Iterable[Output], decision: Decision) -> Decision:
    """Returns ``decision`` with ``outputs`` before its own."""
    return decision[0], (*outputs, *decision[1])


def tell_each(workers: Iterable[WorkerId], command: Command) -> tuple[Tell, ...]:
    """Returns what sends one command to several workers."""
    return tuple(Tell(to=worker, command=command) for worker in workers)


def notice(worker: WorkerId, text: str) -> Record:
    """Returns what tells the user something about a worker."""
    return Record(event=Notice(worker=str(worker), text=text))


def without(values: Mapping[WorkerId, _V], *workers: WorkerId) -> Mapping[WorkerId, _V]:
    """Returns ``values`` without those of ``workers``."""
    return {worker: value for worker, value in values.items() if worker not in workers}
