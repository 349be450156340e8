"""What the coordinator knows, what can happen to it, and what it answers: values only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from holdfast.control.checkpoint_ledger import CheckpointLedger, WriteManifest
from holdfast.control.detection import Watch, forget
from holdfast.control.membership.agreement import Doubts, Forming, Restoring
from holdfast.control.membership.audits import AuditState
from holdfast.control.membership.blame import Exceptions
from holdfast.control.membership.cadence import Cadence
from holdfast.control.membership.grid import GridState
from holdfast.control.membership.roster import Contact, Roster
from holdfast.control.membership.running import Prospects, RefusedMove, Reports, Running, Situation
from holdfast.control.membership.starting import Vacancies
from holdfast.control.messages import Command, Ended, Expel, Fence, Raised
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process
from holdfast.core.placement import spared
from holdfast.core.plan import Plan
from holdfast.planning.maker import PROVING, PlanMaker
from holdfast.planning.migration import Migration
from holdfast.planning.replays import logged_boundaries
from holdfast.planning.training import Rerouted
from holdfast.recovery.actions import RecoveryPlan
from holdfast.recovery.rules import JobRules
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
    "Record",
    "Stay",
    "Tell",
    "Tick",
    "Unadvised",
    "expulsion",
    "held_for_lost",
    "notice",
    "prefixed",
    "tell_each",
]

_SUPPOSED_S = 6 * 3600.0
"""How often something fails where nothing is known of it."""


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

    ``worker``: whose; None for an agent.
    """

    worker: WorkerId | None
    process: Process | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Event: time passed.

    ``gap_s``: seconds since the tick before, those included for which the coordinator was stopped.
    """

    gap_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Output: send ``command`` to a worker (to ``process`` of it, if given), or to agents if ``to`` is None.

    ``node``: to its agent alone; None: to all.
    """

    to: WorkerId | None
    command: Command
    process: Process | None = None
    node: NodeId | None = None


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
class Handover:
    """Workers are to hold other layers: ``grid`` is the plan of all of them then.

    It may leave out workers that are absent: their places are given up, and processes offered for these take others.
    It may have spares in it, which then get places of their own.

    Nothing is given up for it: layers are followed first, and let go of when their takers hold them.

    ``leaving``: workers that were told to go and are not in it; they stay until others hold what they do. ``why``: for
    people.
    """

    grid: Plan
    leaving: frozenset[WorkerId] = frozenset()
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Whoever is here goes on as it is, or whoever was told to go may go at once; ``why``: for people."""

    situation: Situation
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """Event: a better plan is known, or there will be one once workers have changed places or handed layers over.

    ``lost`` are the workers without which it does.
    """

    lost: frozenset[WorkerId]
    offer: Rerouted | Migration | Handover | Stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Unadvised:
    """Event: whoever was asked before workers go is not asked any more."""


Output = Tell | Record | WriteManifest
Decision = tuple["Membership", tuple[Output, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """All that the coordinator knows.

    Attributes:
        rules: what the job says once and for all.
        grid: the plan of the whole grid, from which every other is derived.
        phase: where the job is.
        generation: version of the membership; 0 until everyone attached once.
        generations: how many of them installed a plan.
        roster: who there is.
        contact: who of them can be talked to.
        vacancies: how vacant places may be filled.
        running: what runs, and what is prepared to.
        reports: what the members of this generation have said.
        forming: what answers the last loss, and how far that has come.
        restoring: from where state can be loaded.
        exceptions: what workers met, and what was made of it.
        audits: what audits have found.
        scores: what was told of evaluations that are not complete: by the steps before which they are and the numbers
            of micro-batches, each score by its name. It is not stored: workers tell of it again.
        doubts: what time will tell.
        prospects: what was planned ahead.
        watch: who was heard of when.
        last_step: the newest step that all who go on have behind them, as far as was told; -1 before the first.
        checkpoints: what is written of checkpoints.
        cadence: how often checkpoints are made, where that is set by what they cost; None where the job says it.
        preempted: whether the agent was told to end.
        pinned: step and generation of the checkpoint that was pinned for that, and then ends the job, or since whoever
            is needed was told to go; None before. No generation (0): a recovery made it uncertain that all will write
            their parts, so it is pinned again.
        revision: how many changes there were that a coordinator which is started again must know of.
        past_lost: why what was decided before is not known; empty if it is.
        ended: how the job ended; None before.
        maker: of the plans that all go over to.
    """

    rules: JobRules
    grid: GridState
    phase: Phase = Phase.GATHERING
    generation: int = 0
    generations: int = 0
    roster: Roster = field(default_factory=Roster)
    contact: Contact = field(default_factory=Contact)
    vacancies: Vacancies = field(default_factory=Vacancies)
    running: Running = field(default_factory=Running)
    reports: Reports = field(default_factory=Reports)
    forming: Forming = field(default_factory=Forming)
    restoring: Restoring = field(default_factory=Restoring)
    exceptions: Exceptions = field(default_factory=Exceptions)
    audits: AuditState = field(default_factory=AuditState)
    scores: Mapping[int, Mapping[int, Mapping[str, float]]] = field(default_factory=dict)
    doubts: Doubts = field(default_factory=Doubts)
    prospects: Prospects = field(default_factory=Prospects)
    watch: Watch = field(default_factory=Watch)
    last_step: int = -1
    checkpoints: CheckpointLedger = field(default_factory=CheckpointLedger)
    cadence: Cadence | None = None
    preempted: bool = False
    pinned: tuple[int, int] | None = None
    revision: int = 0
    past_lost: str = ""
    ended: Ended | None = None
    maker: PlanMaker = PROVING

    @classmethod
    def before(cls, rules: JobRules, plan: Plan, **known: Any) -> Membership:
        """Returns that of a job which has not begun.

        Args:
            rules: what the job says once and for all.
            plan: of the whole grid.
            known: attributes that are known by then.
        """
        every = rules.checkpoint_every
        return cls(
            rules=rules,
            grid=GridState(baseline=plan),
            running=Running(staggered=rules.staggered),
            cadence=Cadence(every=every, wanted=every) if rules.sets_interval else None,
            **known,
        )

    @property
    def num_steps(self) -> int:
        """How many steps the job has, with those that are run once more."""
        ends = self.running.ends
        return self.rules.steps + len(self.running.repeated) if ends is None else ends

    @property
    def unsettled(self) -> tuple[WriteManifest, ...]:
        """The manifests that are being written, in order."""
        return tuple(replace(each, best=self.running.best) for each in self.checkpoints.unsettled)

    @property
    def interval(self) -> int:
        """Steps between two checkpoints from the next generation on; 0 if the job says that once and for all."""
        return 0 if self.cadence is None else self.cadence.wanted

    @property
    def present(self) -> frozenset[WorkerId]:
        """Everyone who is not lost, in this generation or on the way to one."""
        return frozenset(self.grid.baseline.workers) - self.roster.lost

    @property
    def placed(self) -> frozenset[WorkerId]:
        """Who needs its place in the grid: everyone of it who is here, or for whom a process is being started."""
        return self.present | self.roster.expected.intersection(self.grid.baseline.workers)

    @property
    def absent(self) -> frozenset[WorkerId]:
        """Who of the grid cannot compute: lost, or without its layers' state so far."""
        roster = self.roster
        return frozenset(self.grid.baseline.workers) & (
            roster.lost | roster.arriving | (roster.entering - roster.synced)
        )

    @property
    def catching_up(self) -> frozenset[WorkerId]:
        """The members that follow layers, whether or not they hold others, and have not told that they have them."""
        plan = self.running.plan
        followers = () if plan is None else (worker for worker, _ in plan.placement.followed)
        return frozenset(followers) - self.roster.synced

    @property
    def missing(self) -> frozenset[WorkerId]:
        """Who of the grid is lost."""
        return self.roster.lost.intersection(self.grid.baseline.workers)

    @property
    def vacant(self) -> frozenset[WorkerId]:
        """Who of the grid is lost and nobody is expected to come for, nor could it still be needed itself."""
        return self.missing - self.roster.expected - self.roster.kept

    @property
    def going(self) -> frozenset[WorkerId]:
        """The members that hold their layers' state and were told to go."""
        return self.roster.leaving & frozenset(self.full)

    @property
    def dormant(self) -> frozenset[WorkerId]:
        """Who of those that were told to compute nothing can be spared, now that nobody else is there than who is."""
        return spared(self.grid.baseline.placement, self.absent, self.roster.dormant)

    @property
    def situation(self) -> Situation:
        """What an adviser goes by."""
        return Situation(absent=self.absent, going=self.going, spares=self.roster.spares - self.contact.detached.keys())

    @property
    def full(self) -> tuple[WorkerId, ...]:
        """The members that hold their layers' state, in order: whoever can compute and recover."""
        absent = self.absent
        return tuple(worker for worker in self.grid.baseline.workers if worker not in absent)

    @property
    def fewest_owners(self) -> int:
        """How many of :attr:`full` hold the layer that the fewest hold."""
        return min(map(len, self.grid.baseline.placement.without(self.absent).owners_by_layer))

    @property
    def alive(self) -> tuple[WorkerId, ...]:
        """The members of this generation, in order: full ones and those that are entering."""
        absent = self.roster.lost | self.roster.arriving
        return tuple(worker for worker in self.grid.baseline.workers if worker not in absent)

    def is_alive(self, worker: WorkerId) -> bool:
        """Whether a worker is one of :attr:`alive`, which need not be gone through for that."""
        roster = self.roster
        return worker not in roster.lost and worker not in roster.arriving and worker in self.grid.baseline.placement

    @property
    def failure_every_s(self) -> float | None:
        """How often failures are to be expected: as the job says, else as often as so far; None if unknown.

        Failures that keep no schedule are expected as far ahead at any moment. A coordinator that was started again
        counts anew.
        """
        if self.rules.failure_every_s > 0:
            return self.rules.failure_every_s
        if self.prospects.began is None or self.watch.now is None or self.prospects.losses == 0:
            return None
        return (self.watch.now - self.prospects.began) / self.prospects.losses

    @property
    def expected_s(self) -> float:
        """Seconds until the next failure, on average: as the job says, else as so far, if six hours had gone before.

        So long as little is known, that says it; each failure, and each hour without one, counts against it.
        """
        if self.rules.failure_every_s > 0:
            return self.rules.failure_every_s
        began, now = self.prospects.began, self.watch.now
        passed_s = 0.0 if began is None or now is None else now - began
        return (passed_s + _SUPPOSED_S) / (self.prospects.losses + 1)

    @property
    def all_joined(self) -> bool:
        """Whether the transport of every member of this generation stands."""
        return self.has_all(self.reports.joined)

    def has_all(self, workers: Collection[WorkerId]) -> bool:
        """Whether all members of this generation are among these workers; a matter of counting while they are few.

        All tell something behind a loss, one by one, and each time this is asked.
        """
        fewest = len(self.grid.baseline.workers) - len(self.roster.lost | self.roster.arriving)
        return len(workers) >= fewest and all(worker in workers for worker in self.alive)

    @property
    def only_saves(self) -> bool:
        """Whether nothing is left to be done but to save what lives."""
        return bool(self.exceptions.blame or self.past_lost)

    @property
    def unjudged(self) -> tuple[Raised, ...]:
        """What members that have stopped reported and was not judged yet."""
        if self.only_saves or not self.exceptions.raised:
            return ()
        present, now = self.present, self.roster.processes
        return tuple(
            each for each in self.exceptions.raised if each.worker in present and now[each.worker] == each.process
        )

    def logging_in(self, grid: Plan, step: int) -> Membership:
        """Returns it once what crosses nodes in ``grid`` is logged, from ``step`` on: whoever replays may need both."""
        if self.rules.logging is None:
            return self
        now, then = (logged_boundaries(each, self.rules.logging) for each in (self.grid.baseline, grid))
        return self if now == then else replace(self, restoring=self.restoring.with_grid(then, now, step))

    def refusing(self, why: str) -> Membership:
        """Returns it once the grid that was to come cannot; with who is here now, it is not tried again."""
        if self.grid.target is None:
            return self
        refused = RefusedMove(grid=self.grid.target, absent=self.absent, why=why)
        return replace(self, prospects=replace(self.prospects, refused=refused))

    def departed(self, gone: frozenset[WorkerId]) -> Membership:
        """Returns it once ``gone`` are lost: nothing is expected of them any more, nor held against them."""
        return replace(
            self,
            roster=self.roster.departed(gone),
            contact=self.contact.departed(gone),
            audits=self.audits.departed(gone),
            watch=forget(self.watch, gone),
        )

    def attached(self, worker: WorkerId, process: Process, *, arriving: bool) -> Membership:
        """Returns it once a process of a worker is here; ``arriving``: it has yet to enter a generation."""
        return replace(
            self,
            roster=self.roster.attached(worker, process, arriving=arriving),
            contact=self.contact.connected(worker),
            watch=forget(self.watch, (worker,)),
        )

    def with_spare(self, worker: WorkerId, process: Process) -> Membership:
        """Returns it once a process is here for which there is no place."""
        state = self.attached(worker, process, arriving=False)
        return replace(state, roster=replace(state.roster, spares=state.roster.spares | {worker}))


def held_for_lost(state: Membership, worker: WorkerId, how: str) -> tuple[Output, ...]:
    """Returns what tells that a worker is lost, and ends its process should it live."""
    spare = worker in state.roster.spares
    event = Detected(worker=str(worker), how=how, generation=state.generation, spare=spare)
    return (Record(event=event), *expulsion(state, worker, f"held for lost: {how}"))


def expulsion(state: Membership, worker: WorkerId, reason: str) -> tuple[Tell, ...]:
    """Returns what ends a worker for good: it must not act any more, and its place is free only when it is gone."""
    process = state.roster.processes.get(worker)
    expel = Tell(to=worker, process=process, command=Expel(reason=reason))
    return (expel, *fence(worker, process))


def fence(worker: WorkerId, process: Process | None) -> tuple[Tell, ...]:
    """Returns what has its agent see to it that a process is gone; nothing if none is known of."""
    if process is None:
        return ()
    return (Tell(to=None, node=process.node, command=Fence(worker=worker, process=process)),)


def prefixed(outputs: Iterable[Output], decision: Decision) -> Decision:
    """Returns ``decision`` with ``outputs`` before its own."""
    return decision[0], (*outputs, *decision[1])


def tell_each(workers: Iterable[WorkerId], command: Command) -> tuple[Tell, ...]:
    """Returns what sends one command to several workers."""
    return tuple(Tell(to=worker, command=command) for worker in workers)


def notice(worker: WorkerId, text: str) -> Record:
    """Returns what tells the user something about a worker."""
    return Record(event=Notice(worker=str(worker), text=text))
