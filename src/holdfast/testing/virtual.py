"""A whole job in one thread, under a virtual clock: the real protocol, the real decisions, no sockets, no waiting.

Coordinator decisions, workers' protocol, executor and lowering are the code that trains for real; only the drivers
around them are replaced. Every delay comes from one seeded source, so one seed is one history.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace as replace_struct

from holdfast.control.checkpoint_ledger import Settled, WriteManifest
from holdfast.control.detection import PATIENCE, Watch
from holdfast.control.membership import (
    AnswerPlanned,
    Closed,
    Grid,
    Handover,
    Improved,
    Membership,
    Record,
    Restoring,
    Rules,
    Running,
    Tell,
    Tick,
    decide,
    plan_recovery,
    restore,
    to_store,
    unplanned,
)
from holdfast.control.membership.cadence import Cadence
from holdfast.control.messages import (
    Blob,
    Command,
    Ended,
    Exited,
    Expel,
    Failure,
    Fence,
    Heartbeat,
    Hello,
    Install,
    Leaving,
    Message,
    NodeLost,
    Preempted,
    Progress,
    ShardWritten,
    Shutdown,
    Started,
    StartWorker,
    StateAt,
    Strike,
    WorkerOffer,
)
from holdfast.control.store import StoredDecision
from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.core.placement import group_into_nodes
from holdfast.core.plan import Plan
from holdfast.core.profile import unit_costs
from holdfast.core.schedule import Op, OpKind
from holdfast.errors import InternalError, PeerLost, StaleGeneration, WorkFailed
from holdfast.planning.migration import Migration
from holdfast.planning.planner import Technique
from holdfast.planning.training import Rerouted, Terms, replanned
from holdfast.protocol.executor import Committed, Expect, FinishReduce, Give, Reach, Ready, Run, StartReduce, Take
from holdfast.protocol.pace import WAITS, Pace
from holdfast.protocol.snapshots import Snapshots
from holdfast.protocol.stopping import ends_job
from holdfast.protocol.worker import (
    Attach,
    Boundary,
    Build,
    Disconnect,
    Drain,
    Engine,
    Fetch,
    Fetched,
    Listen,
    Load,
    Pin,
    Release,
    Report,
    Script,
    Serve,
    WorkerProtocol,
    Written,
)
from holdfast.recovery.actions import RecoveryPlan
from holdfast.runtime.engine.emulated import EmulatedStage
from holdfast.runtime.injection import strikes
from holdfast.runtime.transport.port import MessageKey
from holdfast.storage.checkpoints import Shard
from holdfast.telemetry.events import CoordinatorLost, CoordinatorReady, Event, FaultInjected, StepOps
from holdfast.testing.memory import Mail
from holdfast.testing.raising import Raise, RaisingStage

__all__ = ["Delays", "Pause", "VirtualCluster", "VirtualResult"]

HANG_S = 2.0
BEAT_S = 0.25
REATTACH_S = 60.0
AGENT = 0
_ANSWERS: dict[tuple[str, Plan, frozenset[WorkerId], Terms | None], RecoveryPlan] = {}
_MOST_ANSWERS = 4096
StageFactory = Callable[[WorkerId], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Ranges, in virtual seconds, from which every delay is drawn."""

    control: tuple[float, float] = (0.0005, 0.005)
    message: tuple[float, float] = (0.0001, 0.003)
    compute: tuple[float, float] = (0.01, 0.03)
    detect: tuple[float, float] = (0.001, 0.05)
    connect: tuple[float, float] = (0.001, 0.02)
    copy: tuple[float, float] = (0.001, 0.3)
    start: tuple[float, float] = (0.01, 0.5)
    store: tuple[float, float] = (0.001, 0.1)
    reattach: tuple[float, float] = (0.001, 0.06)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualResult:
    """How a virtual job ended.

    Attributes:
        outcome: done, lost or error.
        detail: what was wrong.
        step: the last committed step number plus one.
        generations: plans installed.
        digest: over the digests of all layers, in order; empty unless done.
        events: (virtual time, event), as a real run logs them.
        fired: specs of the faults that fired; one by effect count is ``kill:WORKER#COUNT`` or ``raise:WORKER#COUNT``,
            one at a time ``kill-coordinator#TIME``, ``break:WORKER#TIME`` or as :class:`Pause` says. What found nothing
            to strike, or held nothing up, is not among them.
        lost: the workers that died.
        pinned: what was pinned for checkpoints, in order.
        checkpoints: per step whose manifest was written, the digest of each layer's state.
        saved: the layers that were saved at the end, however it came, and the digest of each.
        layers: what each worker that lives at the end holds or follows.
        effects: how many effects the last process of each worker has yielded; it can be killed at any of these.
    """

    outcome: str
    detail: str
    step: int
    generations: int
    digest: str
    events: tuple[tuple[float, Event], ...]
    fired: tuple[str, ...]
    lost: tuple[WorkerId, ...]
    pinned: tuple[VirtualPin, ...] = ()
    checkpoints: tuple[tuple[int, tuple[str, ...]], ...] = ()
    saved: tuple[tuple[int, str | None], ...] = ()
    layers: Mapping[WorkerId, tuple[int, ...]] = field(default_factory=dict)
    effects: Mapping[WorkerId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Some processes are stopped, and go on.

    Attributes:
        at: when they are stopped, in virtual seconds.
        lasts_s: for how long.
        workers: which.
        coordinator: whether the coordinator is, too.

    >>> str(Pause(at=1.5, lasts_s=0.2, workers=(WorkerId(0, 1),), coordinator=True))
    'pause:0.1,coordinator#1.5'
    """

    at: float
    lasts_s: float
    workers: tuple[WorkerId, ...] = ()
    coordinator: bool = False

    def __str__(self) -> str:
        who = [*map(str, self.workers), *(["coordinator"] if self.coordinator else [])]
        return f"pause:{','.join(who)}#{self.at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPin:
    """A worker pinned a layer for the checkpoint of a step."""

    worker: WorkerId
    generation: int
    step: int
    layer: int


def _answered(state: Membership, lost: frozenset[WorkerId]) -> RecoveryPlan:
    """What :func:`plan_recovery` returns: a function of a few values, and many runs ask for the same ones."""
    about = (state.rules.strategy, state.grid.baseline, lost, state.rules.terms)
    if about not in _ANSWERS:
        if len(_ANSWERS) >= _MOST_ANSWERS:
            _ANSWERS.clear()
        _ANSWERS[about] = plan_recovery(state, lost)
    return _ANSWERS[about]


@dataclass(slots=True)
class _Sleep:
    """For how long a process has been stopped so far, until when it is, and by which pause so long."""

    total_s: float = 0.0
    until: float = 0.0
    by: Pause | None = None

    def fall(self, now: float, pause: Pause) -> None:
        """It is stopped."""
        until = now + pause.lasts_s
        if until > self.until:
            self.total_s += until - max(self.until, now)
            self.until, self.by = until, pause

    def awake_s(self, now: float) -> float:
        """For how long it has run."""
        return min(now, self.until) - self.total_s if now < self.until else now - self.total_s


@dataclass(slots=True)
class _Worker:
    """One process: its protocol and what it waits for; ``stopped`` processes do nothing, ``stalled`` ones only beat."""

    protocol: WorkerProtocol
    generator: Script
    pace: Pace
    prepared: Install | None = None
    fetched: dict[int, bytes] | None = None
    stopped: bool = False
    asleep: _Sleep = field(default_factory=lambda: _Sleep())
    attaches: bool = False
    leaving: bool = False
    strikes: list[str] = field(default_factory=list)
    stalled: bool = False
    commands: deque[Command] = field(default_factory=deque)
    newest: int = 0
    waiting: Any = None
    ready: Callable[[], Any] | None = None
    effects: int = 0
    alive: bool = True
    spans: list[tuple[str, int, int, float, float]] = field(default_factory=list)


class VirtualCluster:
    """Runs one job.

    Args:
        plan: the plan of the healthy grid.
        steps: of the job.
        seed: of every delay.
        faults: at named points.
        kill_at_effect: workers that die when they yield their n-th effect, wherever that is.
        raises: exceptions of the user's code.
        raise_at_effect: workers in which an exception comes when they yield their n-th effect, whatever that is.
        tolerate: how many workers may be lost to exceptions within 100 steps.
        delays: ranges of the delays.
        stage: makes a worker's compute engine; default an emulated one.
        ties: the layers that share weights.
        workers_per_node: consecutive workers that fail together.
        kill_joiner_at_effect: a worker whose second process dies when it yields its n-th effect.
        checkpoint_every: a checkpoint after so many steps; 0 for none.
        sets_interval: whether CheckFreq's rule changes that as it runs.
        synchronous: whether training stands still until a checkpoint is written.
        snapshot_every: a snapshot in every worker's memory after so many steps; 0 for none.
        strategy: what answers a loss.
        wait_for_replacement: virtual seconds to wait for a worker when a layer has no owner left.
        coordinator_deaths: (when it dies, how long it is away), in virtual seconds; messages on their way are lost.
        broken_streams: (when, whose) connections to the coordinator break; messages on their way are lost.
        staggered: whether updates are made ahead of the verdict.
        technique: of the planner, which then makes all plans, the healthy one too; None: they keep to 1F1B's rules.
        scaled: which share of the steps has gradients that must be scaled.
        preempted_at: when the agent is told to end, in virtual seconds, so that a checkpoint is made; None: never.
        pauses: processes that are stopped for a while.
        spares: (when it is started, whose) further processes, that nobody asked for.
        better: tells a better plan for who is here, if need be once some have changed places, or None; asked five
            times a second.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        steps: int,
        seed: int = 0,
        faults: Iterable[Fault] = (),
        kill_at_effect: Iterable[tuple[WorkerId, int]] = (),
        raises: Iterable[Raise] = (),
        raise_at_effect: Iterable[tuple[WorkerId, int]] = (),
        tolerate: int = 0,
        delays: Delays | None = None,
        stage: StageFactory | None = None,
        ties: tuple[tuple[int, ...], ...] = (),
        workers_per_node: int = 1,
        kill_joiner_at_effect: tuple[WorkerId, int] | None = None,
        checkpoint_every: int = 0,
        sets_interval: bool = False,
        synchronous: bool = False,
        snapshot_every: int = 0,
        strategy: str = "auto",
        wait_for_replacement: float = 0.0,
        coordinator_deaths: Iterable[tuple[float, float]] = (),
        broken_streams: Iterable[tuple[float, WorkerId]] = (),
        staggered: bool = False,
        technique: Technique | None = None,
        scaled: float = 0.0,
        preempted_at: float | None = None,
        pauses: Iterable[Pause] = (),
        spares: Iterable[tuple[float, WorkerId]] = (),
        better: Callable[[Membership], Rerouted | Migration | Handover | None] = lambda membership: None,
    ) -> None:
        terms = None
        if technique is not None:
            depth = max(len(route.visits) for route in plan.routes.routes)
            costs = unit_costs(plan.placement.num_layers)
            terms = Terms(technique=technique, costs=costs, in_flight=2 * depth, ties=ties)
            plan = replanned(plan, terms)
        self._better = better
        self._preempted_at, self._preempted = preempted_at, False
        self._scaled = scaled
        self._pauses = tuple(pauses)
        self._spares = tuple(spares)
        self._asleep = _Sleep()
        self._looked_at = 0.0
        self._coordinator_deaths = tuple(coordinator_deaths)
        self._incarnation = 0
        self._broken_streams = tuple(broken_streams)
        self._leads = True
        self._attached: set[int] = set()
        self._streams: dict[int, int] = defaultdict(int)
        self._outboxes: dict[int, list[Message]] = defaultdict(list)
        self._for_agent: list[Command] = []
        self._exits: tuple[Exited, ...] = ()
        self._offers: list[WorkerId | None] = []
        self._coming: set[WorkerId] = set()
        self._decision: StoredDecision | None = None
        self._random = random.Random(seed)
        self._delays = delays or Delays()
        self._faults = tuple(faults)
        self._deaths = dict(kill_at_effect)
        self._raises = tuple(raises)
        self._raises_at = dict(raise_at_effect)
        self._saved_layers: dict[int, str | None] = {}
        self._death_of_joiner = kill_joiner_at_effect
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._channels: dict[object, float] = defaultdict(float)
        self._mail = Mail()
        self._events: list[tuple[float, Event]] = []
        self._fired: list[str] = []
        self._ended: Ended | None = None
        self._checkpoint_every = checkpoint_every
        self._synchronous = synchronous
        self._snapshot_every = snapshot_every
        self._pinned: list[VirtualPin] = []
        self._stored: dict[tuple[int, int], bytes] = {}
        self._checkpoints: dict[int, tuple[str, ...]] = {}
        watch = Watch(limit_s=HANG_S)
        start = (StateAt(url=None, step=0),) if checkpoint_every else ()
        self._blank = self._membership = Membership(
            rules=Rules(
                steps=steps,
                strategy=strategy,
                directory="",
                terms=terms,
                wait_s=wait_for_replacement,
                tolerate=tolerate,
            ),
            grid=Grid(baseline=plan),
            running=Running(staggered=staggered),
            restoring=Restoring(restorable=start),
            watch=watch,
            cadence=Cadence(every=checkpoint_every, wanted=checkpoint_every) if sets_interval else None,
        )
        self._nodes = group_into_nodes(plan.workers, workers_per_node)
        self._struck: set[Fault] = set()
        self._served: dict[tuple[int, WorkerId], dict[WorkerId, dict[int, bytes]]] = defaultdict(dict)
        self._pids = itertools.count(1)
        self._make = stage or self._emulated(plan)
        self._about = (steps, ties)
        self._processes: dict[int, _Worker] = {}
        self._workers = {worker: self._worker(worker) for worker in plan.workers}

    def _emulated(self, plan: Plan) -> StageFactory:
        placement, total = plan.placement, len(plan.routes.microbatches)
        return lambda worker: EmulatedStage(
            layers=placement.layers_of(worker) if worker in placement.workers else (),
            num_layers=placement.num_layers,
            num_microbatches=total,
            scaled=self._scaled,
        )

    def _worker(self, worker: WorkerId) -> _Worker:
        """A new process of a worker."""
        steps, ties = self._about
        protocol = WorkerProtocol(
            worker=worker,
            stage=self._raising(worker, self._make(worker)),
            steps=steps,
            ties=ties,
            pid=next(self._pids),
            checkpoint_every=self._checkpoint_every,
            synchronous=self._synchronous,
            snapshots=Snapshots(every=self._snapshot_every),
        )
        asleep = _Sleep()
        pace = Pace(lambda: asleep.awake_s(self._now), PATIENCE * HANG_S, lambda: self._now)
        self._processes[protocol.pid] = made = _Worker(
            protocol=protocol, generator=protocol.run(), pace=pace, asleep=asleep
        )
        return made

    def _raising(self, worker: WorkerId, stage: Engine) -> Engine:
        """A stage that raises as scheduled and writes no files."""
        return RaisingStage(  # type: ignore[return-value]
            stage,
            worker,
            [each for each in self._raises if not (each.once and str(each) in self._fired)],
            fired=lambda each: self._fired.append(str(each)),
            saved=self._saved_layers.__setitem__,
        )

    def run(self, limit_s: float = 10_000.0) -> VirtualResult:
        """Runs to the end of the job.

        Args:
            limit_s: virtual seconds after which the job counts as stuck.

        Raises:
            InternalError: nothing can happen any more though the job has not ended, or the limit has passed.
        """
        for worker in self._workers.values():
            self._begin(worker, self._draw(self._delays.control))
        self._hello(AGENT)
        self._tick()
        for at, who in self._broken_streams:
            self._after(at, lambda at=at, who=who: self._break_stream(at, who))  # type: ignore[misc]
        if self._preempted_at is not None:
            self._after(self._preempted_at, self._preempt)
        for at, who in self._spares:
            self._after(at, lambda who=who: self._start(who))  # type: ignore[misc]
        for pause in self._pauses:
            self._after(pause.at, lambda pause=pause: self._pause(pause))  # type: ignore[misc]
        for at, away_s in self._coordinator_deaths:
            self._after(at, lambda at=at, away_s=away_s: self._kill_coordinator(at, away_s))  # type: ignore[misc]
        while self._ended is None:
            if not self._queue or self._now > limit_s:
                raise InternalError(f"stuck at {self._now:.3f} s: {self._stuck()}")
            self._now, _, act = heapq.heappop(self._queue)
            act()
        return self._result(self._ended)

    def _result(self, ended: Ended) -> VirtualResult:
        return VirtualResult(
            outcome=ended.outcome,
            detail=ended.detail,
            step=ended.step,
            generations=ended.generations,
            digest=self._digest() if ended.outcome == "done" else "",
            events=tuple(self._events),
            fired=tuple(self._fired),
            lost=tuple(sorted(self._membership.roster.lost)),
            pinned=tuple(self._pinned),
            checkpoints=tuple(sorted(self._checkpoints.items())),
            saved=tuple(sorted(self._saved_layers.items())),
            layers={who: worker.protocol.stage.layers for who, worker in self._workers.items() if worker.alive},
            effects={who: worker.effects for who, worker in self._workers.items()},
        )

    def _digest(self) -> str:
        digests = {layer: text for saved in self._membership.reports.saved.values() for layer, text in saved.items()}
        return hashlib.sha256("".join(digests[layer] for layer in sorted(digests)).encode()).hexdigest()

    def _stuck(self) -> str:
        return ", ".join(f"{w.protocol.worker}: {w.waiting!r}" for w in self._workers.values() if w.alive)

    # Time.

    def _draw(self, limits: tuple[float, float]) -> float:
        return self._random.uniform(*limits)

    def _after(self, delay: float, act: Callable[[], None], channel: object = None) -> None:
        """Lets ``act`` happen later; on one channel, in order."""
        at = self._now + delay
        if channel is not None:
            at = self._channels[channel] = max(at, self._channels[channel])
        self._at(at, act)

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (moment, next(self._counter), act))

    def _pause(self, pause: Pause) -> None:
        """Stops processes. What they would do happens when they go on; what is under way between them arrives."""
        for worker in filter(self._living, pause.workers):
            self._workers[worker].asleep.fall(self._now, pause)
        if pause.coordinator:
            self._asleep.fall(self._now, pause)

    def _sleeps(self, asleep: _Sleep, act: Callable[[], None]) -> bool:
        """Whether a process is stopped; then it acts as soon as it goes on."""
        if self._now < asleep.until:
            self._fire_once(str(asleep.by))
            self._at(asleep.until, act)
            return True
        return False

    def _tick(self) -> None:
        if self._sleeps(self._asleep, self._tick):
            return
        self._after(0.2, self._tick)
        if self._leads:
            self._pass_time()
        self._looked_at = self._now

    def _pass_time(self) -> None:
        self._decide(Tick(gap_s=self._now - self._looked_at))
        if ahead := unplanned(self._membership):
            lost = self._random.choice(ahead)
            self._decide(AnswerPlanned(lost=lost, recovery=_answered(self._membership, lost)))
        if offer := self._better(self._membership):
            self._decide(Improved(lost=self._membership.absent, offer=offer))

    def _begin(self, worker: _Worker, delay: float) -> None:
        def begin() -> None:
            if not self._sleeps(worker.asleep, begin):
                self._resume(worker)
                self._beat(worker)

        self._after(delay, begin)

    def _beat(self, worker: _Worker) -> None:
        """Tells of progress, as long as the process lives."""
        if not worker.alive or worker.stopped or self._ended is not None:
            return
        if self._sleeps(worker.asleep, lambda: self._beat(worker)):
            return
        protocol, execution = worker.protocol, worker.protocol.execution
        if protocol.generation > 0:
            beat = Heartbeat(
                worker=protocol.worker,
                generation=protocol.generation,
                step=execution.step if execution else 0,
                op=len(execution.ops) if execution else 0,
                moves=worker.pace.moves,
                busy_s=worker.pace.busy_s(),
                slowest_s=max(worker.pace.slowest_s, 1e-6) if worker.pace.warm else 0.0,
            )
            self._up(worker, beat)
        self._after(BEAT_S, lambda: self._beat(worker))

    # The coordinator.

    def _decide(self, event: Message | Closed | Tick | AnswerPlanned | Improved | Settled) -> None:
        if self._sleeps(self._asleep, self._while_it_lives(lambda: self._decide(event))):
            return
        before = self._membership
        self._membership, outputs = decide(before, event, now=self._asleep.awake_s(self._now))
        self._decision = to_store(before, self._membership) or self._decision
        for output in outputs:
            match output:
                case Record(event=recorded):
                    self._log(recorded)
                case WriteManifest():
                    write = self._while_it_lives(lambda c=output: self._write_manifest(c))  # type: ignore[misc]
                    self._after(self._draw(self._delays.store), write, "store")
                case Tell(to=None, command=Ended() as ended):
                    self._ended = ended
                case Tell(to=None, command=command):
                    self._tell_agent(command)
                case Tell(to=WorkerId() as to, command=command) if output.pid or to in self._membership.roster.pids:
                    self._tell(self._processes[output.pid or self._membership.roster.pids[to]], command)

    def _write_manifest(self, commit: WriteManifest) -> None:
        self._checkpoints[commit.step] = tuple(shard.sha256 for shard in commit.shards)
        self._decide(Settled(step=commit.step, url="virtual"))

    def _kill_coordinator(self, at: float, away_s: float) -> None:
        if not self._leads:  # it is dead already
            return
        self._fired.append(f"kill-coordinator#{at}")
        self._leads = False
        self._incarnation += 1
        self._attached.clear()
        self._for_agent.clear()
        self._log(CoordinatorLost(how="signal 9"))
        self._after(away_s, self._restart_coordinator)

    def _restart_coordinator(self) -> None:
        self._leads, self._membership = True, self._blank
        if self._decision is not None:
            until = self._asleep.awake_s(self._now) + REATTACH_S
            self._membership = restore(self._blank, self._decision, reattach_until=until)
        self._log(CoordinatorReady(pid=0, generation=self._membership.generation))
        self._come_back(AGENT)
        for process in self._processes.values():
            if process.attaches:
                self._come_back(process.protocol.pid)

    # Between the coordinator and others.

    def _come_back(self, pid: int) -> None:
        self._after(self._draw(self._delays.reattach), self._while_it_lives(lambda: self._hello(pid)))

    def _while_it_lives(self, act: Callable[[], None]) -> Callable[[], None]:
        """What is lost with this coordinator."""
        incarnation = self._incarnation
        return lambda: act() if incarnation == self._incarnation else None

    def _over_control(self, pid: int, direction: str, act: Callable[[], None]) -> None:
        """What travels between the coordinator and a process arrives if the connection lasts that long."""
        stream = self._streams[pid]
        arrive = self._while_it_lives(lambda: act() if stream == self._streams[pid] else None)
        self._after(self._draw(self._delays.control), arrive, channel=(direction, pid))

    def _tell(self, process: _Worker, command: Command) -> None:
        if process.protocol.pid in self._attached:
            self._over_control(process.protocol.pid, "down", lambda: self._deliver(process, command))

    def _tell_agent(self, command: Command) -> None:
        """What the agent is to be told while it is away waits for it."""
        if AGENT in self._attached:
            self._over_control(AGENT, "down", lambda: self._obey(command))
        else:
            self._for_agent.append(command)

    def _up(self, worker: _Worker, message: Message) -> None:
        """A worker sends; while it has no connection, its messages wait, but for what its hello says too."""
        pid = worker.protocol.pid
        if pid in self._attached:
            self._over_control(pid, "up", lambda: self._decide(message))
        elif not isinstance(message, Heartbeat | Strike | Leaving):
            self._outboxes[pid].append(message)

    def _agent_up(self, message: Message) -> None:
        if AGENT in self._attached:
            self._over_control(AGENT, "up", lambda: self._decide(message))

    def _hello(self, pid: int) -> None:
        """A process attaches and says where it stands, and what it could not say before."""
        process = self._processes.get(pid)
        if not self._leads or (process is not None and (not process.alive or process.stopped)):
            return
        self._attached.add(pid)
        hello = self._agent_hello() if process is None else self._standing(process)
        self._over_control(pid, "up", lambda: self._decide(hello))
        for message in self._outboxes.pop(pid, []):
            self._over_control(pid, "up", lambda m=message: self._decide(m))  # type: ignore[misc]
        if process is None:
            waiting, self._for_agent = self._for_agent, []
            for command in waiting:
                self._tell_agent(command)

    def _standing(self, process: _Worker) -> Hello:
        hello, prepared = process.protocol.hello(), process.prepared
        return replace_struct(
            hello,
            activity=hello.activity if process.newest <= hello.generation else "waiting",
            prepared=prepared.generation if prepared is not None else 0,
            leaving=process.leaving,
            strikes=tuple(process.strikes),
        )

    def _break_stream(self, at: float, worker: WorkerId) -> None:
        """A connection breaks; the process connects again."""
        pid = self._workers[worker].protocol.pid
        if pid not in self._attached:
            return
        self._fired.append(f"break:{worker}#{at}")
        self._attached.discard(pid)
        self._streams[pid] += 1
        self._decide(Closed(worker=worker, pid=pid))
        self._come_back(pid)

    def _hang_up(self, worker: _Worker) -> None:
        """The connection of a process that is gone closes, after what it had sent, before or after its end is told."""
        pid = worker.protocol.pid

        def close() -> None:
            self._attached.discard(pid)
            self._streams[pid] += 1
            self._decide(Closed(worker=worker.protocol.worker, pid=pid))

        if pid in self._attached:
            self._over_control(pid, "up", close)

    # The agent.

    def _agent_hello(self) -> Hello:
        coming = tuple(sorted(worker for worker in self._coming if self._workers[worker].alive))
        started = tuple(self._started(each) for each in self._workers.values() if each.alive)
        offers = tuple(self._offers)
        return Hello(
            worker=None,
            pid=AGENT,
            exits=self._exits,
            offers=offers,
            coming=coming,
            started=started,
            preempted=self._preempted,
        )

    def _started(self, worker: _Worker) -> Started:
        return Started(worker=worker.protocol.worker, pid=worker.protocol.pid)

    def _preempt(self) -> None:
        self._preempted = True
        self._agent_up(Preempted())

    def _obey(self, command: Command) -> None:
        match command:
            case Progress(step=step):
                self._offer(step + 1)
            case Fence(pid=pid) if pid in self._processes:
                self._kill(self._processes[pid])
            case StartWorker(worker=worker):
                taken = worker if worker in self._offers else None
                if taken in self._offers:
                    self._offers.remove(taken)
                self._coming.add(worker)
                self._start(worker)
            case Strike(spec=spec):
                self._kill_node(Fault.parse(spec))

    def _start(self, worker: WorkerId) -> None:
        """Starts a process of a worker, the first one or another."""
        if worker in self._workers:
            later = {who: effect for who, effect in self._deaths.items() if who != worker}
            self._deaths = later | dict(filter(None, [self._death_of_joiner]))
        self._workers[worker] = self._worker(worker)
        self._agent_up(self._started(self._workers[worker]))
        self._begin(self._workers[worker], self._draw(self._delays.start))

    def _offer(self, step: int) -> None:
        for fault in self._faults:
            if fault.kind is FaultKind.JOIN and fault.step <= step and fault not in self._struck:
                self._note(fault, str(fault.worker or "new"), "", fault.step)
                self._offers.append(fault.worker)
                self._agent_up(WorkerOffer(worker=fault.worker))

    def _kill_node(self, fault: Fault) -> None:
        if fault in self._struck:
            return
        assert fault.node is not None
        members = self._nodes[fault.node]
        for worker in members:
            self._note(fault, str(worker), str(fault.point), fault.step)
            self._kill(self._workers[worker])
        self._agent_up(NodeLost(node=fault.node, workers=members))

    def _reap(self, worker: _Worker, status: int) -> None:
        """Tells the coordinator of a process that ended; what is lost on the way is told again in a hello."""
        exited = Exited(worker=worker.protocol.worker, pid=worker.protocol.pid, status=status)

        def tell() -> None:
            self._exits += (exited,)
            self._agent_up(exited)

        self._after(self._draw(self._delays.detect), tell)

    def _note(self, fault: Fault, worker: str, point: str, step: int) -> None:
        if fault not in self._struck:
            self._struck.add(fault)
            self._fired.append(str(fault))
        self._log(FaultInjected(worker=worker, kind=fault.kind, step=step, point=point, spec=str(fault)))

    def _fire_once(self, spec: str) -> None:
        if spec not in self._fired:
            self._fired.append(spec)

    def _log(self, event: Event) -> None:
        self._events.append((self._now, event))

    def _deliver(self, worker: _Worker, command: Command) -> None:
        """A command arrives. What comes to a stopped process waits for ever, as it never wakes here."""
        if not worker.alive or worker.stopped or isinstance(command, Blob):
            return
        if self._sleeps(worker.asleep, lambda: self._deliver(worker, command)):
            return
        if isinstance(command, Expel):
            self._kill(worker)
            return
        if isinstance(command, Install) and command.at_boundary:
            worker.prepared = command
            return
        if isinstance(command, Install):
            worker.newest, worker.prepared = command.generation, None
        if isinstance(command, Shutdown):
            worker.newest = 2**62
        worker.commands.append(command)
        if isinstance(worker.waiting, Listen):
            self._resume(worker, self._next_command)
        elif worker.newest > worker.protocol.generation and isinstance(
            worker.waiting, Take | FinishReduce | Build | Written
        ):
            self._throw(worker, StaleGeneration(worker.protocol.generation))

    # The workers.

    def _kill(self, worker: _Worker) -> None:
        if not worker.alive:
            return
        worker.alive, worker.ready, worker.waiting = False, None, None
        who = worker.protocol.worker
        self._hang_up(worker)
        self._reap(worker, -9)
        generation = worker.protocol.generation
        self._after(self._draw(self._delays.detect), lambda: self._notice(who, generation))

    def _notice(self, dead: WorkerId, generation: int) -> None:
        """Those that wait for the dead worker see its connection close, sooner or later than the coordinator."""
        for worker in self._workers.values():
            self._see_gone(worker, dead, generation)

    def _see_gone(self, worker: _Worker, dead: WorkerId, generation: int) -> None:
        if self._sleeps(worker.asleep, lambda: self._see_gone(worker, dead, generation)):
            return
        waits = worker.ready is not None and dead in _peers(worker.waiting)
        if worker.alive and worker.protocol.generation == generation and waits:
            self._throw(worker, PeerLost(str(dead), worker.protocol.generation))

    def _throw(self, worker: _Worker, error: Exception) -> None:
        if worker.stopped or worker.stalled:
            return
        worker.waiting, worker.ready = None, None
        self._advance(worker, lambda: worker.generator.throw(error))

    def _resume(self, worker: _Worker, value: Callable[[_Worker], Any] | None = None) -> None:
        if not worker.alive or worker.stopped:
            return
        given = value(worker) if value else None
        if value is not None and given is None:
            return
        worker.waiting, worker.ready = None, None
        self._advance(worker, lambda: worker.generator.send(given))

    def _advance(self, worker: _Worker, step: Callable[[], Any]) -> None:
        """Lets a worker go on until it waits for something."""
        while True:
            worker.pace.move(waiting=False)
            try:
                effect = step()
            except StopIteration:
                self._end(worker)
                return
            except Exception as problem:  # noqa: BLE001 - as the driver of a real worker does
                if not self._stop(worker, problem):
                    return
                step = lambda: next(worker.generator)  # noqa: E731
                continue
            worker.pace.move(waiting=isinstance(effect, WAITS))
            worker.effects += 1
            if self._raises_at.get(worker.protocol.worker) == worker.effects:
                self._fired.append(f"raise:{worker.protocol.worker}#{worker.effects}")
                step = lambda: worker.generator.throw(RuntimeError("it cannot go on"))  # noqa: E731
                continue
            if self._deaths.get(worker.protocol.worker) == worker.effects:
                self._fired.append(f"kill:{worker.protocol.worker}#{worker.effects}")
                self._kill(worker)
                return
            try:
                done, result = self._perform(worker, effect)
            except (StaleGeneration, WorkFailed) as error:
                step = lambda e=error: worker.generator.throw(e)  # type: ignore[misc]  # noqa: E731
                continue
            if not done:
                return
            step = lambda r=result: worker.generator.send(r)  # type: ignore[misc]  # noqa: E731

    def _stop(self, worker: _Worker, problem: Exception) -> bool:
        """An exception has come out of a protocol; returns whether that of a worker that has stopped follows."""
        if ends_job(problem):
            raise problem
        protocol = worker.protocol
        if protocol.raised is None:
            worker.generator = protocol.stopped(problem)
            return True
        self._up(worker, Failure(worker=protocol.worker, pid=protocol.pid, error=str(problem), user_fault=False))
        worker.alive = False
        self._hang_up(worker)
        self._reap(worker, 1)
        return False

    def _end(self, worker: _Worker) -> None:
        """A protocol is over in order: its process ends."""
        worker.alive = False
        self._hang_up(worker)
        self._reap(worker, 0)

    def _perform(self, worker: _Worker, effect: Any) -> tuple[bool, Any]:
        """Does what can be done at once; otherwise notes what the worker waits for."""
        protocol = worker.protocol
        match effect:
            case Attach():
                worker.attaches = True
                self._hello(protocol.pid)
                return True, None
            case Report(message=message, when_written=when_written):
                if when_written:
                    self._later_written(worker, lambda: self._up(worker, message))
                else:
                    self._up(worker, message)
                return True, None
            case Listen():
                command = self._next_command(worker)
                worker.waiting = None if command else effect
                return command is not None, command
            case Disconnect():
                worker.spans.clear()
                return True, None
            case Release():
                return True, None
            case Load(plan=plan, state=state):
                worker.pace.cool_down()
                return True, self._load(worker, plan, state)
        if worker.newest > protocol.generation:
            raise StaleGeneration(protocol.generation)
        match effect:
            case Run():
                worker.pace.compute()
                self._compute(worker, effect)
                return False, None
            case Give(send=send, value=value, step=step):
                self._send(worker, MessageKey.of(send, worker.protocol.generation, step), send.peer, value.clone())
                return True, None
            case StartReduce(reduction=reduction, value=value, step=step):
                self._contribute(worker, (protocol.generation, step, reduction), value.clone())
                return True, None
            case Pin(generation=generation, step=step, layers=layers):
                self._pin(worker, generation, step, layers)
                return True, None
            case Written():
                worker.waiting = effect
                self._later_written(worker, lambda: self._resume(worker) if worker.waiting is effect else None)
                return False, None
            case Reach(point=point, step=step):
                return self._reach(worker, point, step)
            case Committed(step=step, ops=ops):
                self._commit(worker, step, ops)
                return True, None
            case Expect() | Drain():
                return True, None
            case Ready():
                return True, None if worker.prepared is None else worker.prepared.plan
            case Boundary():
                return True, self._go_over(worker)
            case Serve(generation=generation, target=target, snapshots=snapshots):
                made = {layer: encode() for layer, encode in snapshots.items()}
                self._served[generation, target][protocol.worker] = made
                return True, None
            case Fetch(holders=holders):
                worker.fetched = None
                self._fetch(worker, protocol.generation, dict(holders))
                return True, None
            case Fetched():
                return True, worker.fetched
        return self._wait(worker, effect)

    def _go_over(self, worker: _Worker) -> Install:
        install, worker.prepared = worker.prepared, None
        if install is None:
            raise StaleGeneration(worker.protocol.generation)
        return install

    def _fetch(self, worker: _Worker, generation: int, holders: dict[int, tuple[WorkerId, ...]]) -> None:
        """Copies when every layer has a living holder that serves it; all its holders must serve the same bits."""

        def attempt() -> None:
            if not worker.alive or worker.protocol.generation != generation:
                return
            served = self._served[generation, worker.protocol.worker]
            states = {}
            for layer, sources in holders.items():
                found = {served[source][layer] for source in sources if source in served and self._living(source)}
                if len(found) > 1:
                    raise InternalError(f"holders of layer {layer} serve different bits")
                if not found:
                    self._after(self._draw(self._delays.copy), attempt)
                    return
                (states[layer],) = found
            worker.fetched = states

        self._after(self._draw(self._delays.copy), attempt)

    def _living(self, worker: WorkerId) -> bool:
        return self._workers[worker].alive and not self._workers[worker].stopped

    def _later_written(self, worker: _Worker, act: Callable[[], None]) -> None:
        """Lets a worker's writer do something, after all that it has to do before; not if the worker dies first."""

        def write() -> None:
            if worker.alive and not self._sleeps(worker.asleep, write):
                act()

        self._after(self._draw(self._delays.store), write, channel=("writer", worker.protocol.pid))

    def _pin(self, worker: _Worker, generation: int, step: int, layers: tuple[int, ...]) -> None:
        who = worker.protocol.worker
        for index, layer in enumerate(layers):
            self._pinned.append(VirtualPin(worker=who, generation=generation, step=step, layer=layer))
            data = worker.protocol.stage.snapshot(layer)()
            self._stored[step, layer] = data
            digest = hashlib.sha256(data).hexdigest()
            name = f"layer-{layer:04d}-{digest[:16]}.safetensors"
            shard = Shard(layer=layer, name=name, sha256=digest, size=len(data))
            written = ShardWritten(worker=who, generation=generation, step=step, shard=shard)
            at = self._now
            self._later_written(worker, lambda i=index, w=written, t=at: self._write_shard(worker, i, w, t))  # type: ignore[misc]

    def _write_shard(self, worker: _Worker, index: int, written: ShardWritten, pinned_at: float) -> None:
        written = replace_struct(written, write_s=self._now - pinned_at)
        if index == 0:
            self._reach(worker, Point.CHECKPOINT, written.step)
        if worker.alive:
            self._up(worker, written)

    def _load(self, worker: _Worker, plan: Plan, state: StateAt | None) -> Engine:
        """A new emulated stage for the worker's place in a plan, with what was pinned for a checkpoint."""
        layers, total = plan.placement.layers_of(worker.protocol.worker), len(plan.routes.microbatches)
        stage = EmulatedStage(
            layers=layers, num_layers=plan.placement.num_layers, num_microbatches=total, scaled=self._scaled
        )
        if state is None:
            stage.inherit(worker.protocol.stage)
        elif state.url is not None:
            for layer in layers:
                stage.restore(layer, self._stored[state.step, layer])
        return self._raising(worker.protocol.worker, stage)

    def _wait(self, worker: _Worker, effect: Take | FinishReduce | Build) -> tuple[bool, Any]:
        protocol = worker.protocol
        ready: Callable[[], Any]
        match effect:
            case Take(receive=receive, step=step):
                key = MessageKey.of(receive, protocol.generation, step)
                ready = lambda: self._mail.collect(key, receive.peer, protocol.worker)  # noqa: E731
            case FinishReduce(reduction=reduction, step=step):
                name = (protocol.generation, step, reduction)
                ready = lambda: self._mail.total(name, reduction.workers)  # noqa: E731
            case Build(generation=generation, groups=groups):
                ready = lambda: self._mail.complete(generation, groups, protocol.worker) or None  # noqa: E731
                self._after(self._draw(self._delays.connect), lambda: self._arrive(generation, groups, protocol.worker))
                worker.waiting, worker.ready = effect, ready
                return False, None
        found = ready()
        if found is None:
            worker.waiting, worker.ready = effect, ready
        return found is not None, found

    def _compute(self, worker: _Worker, run: Run) -> None:
        number = run.op.microbatch.number
        stage = worker.protocol.stage
        if run.op.kind is OpKind.F:
            result = stage.forward(run.step, number, run.value, run.layers)
        else:
            result = stage.backward(run.op.kind, run.step, number, run.value)
        start, end = self._now, self._now + self._draw(self._delays.compute)
        worker.waiting = run
        microbatch = run.op.microbatch

        def finish() -> None:
            if not worker.alive or worker.stopped or self._sleeps(worker.asleep, finish):
                return
            worker.waiting = None
            if worker.newest > worker.protocol.generation:
                self._throw(worker, StaleGeneration(worker.protocol.generation))
                return
            worker.spans.append((run.op.kind.value, microbatch.pipeline, microbatch.index, start, end))
            self._advance(worker, lambda: worker.generator.send(result))

        self._after(end - self._now, finish)

    def _send(self, worker: _Worker, key: MessageKey, peer: WorkerId, value: Any) -> None:
        source = worker.protocol.worker

        def arrive() -> None:
            self._mail.post(key, source, peer, value)
            self._wake([peer])

        self._after(self._draw(self._delays.message), arrive)

    def _contribute(self, worker: _Worker, name: tuple[int, int, Any], value: Any) -> None:
        who, members = worker.protocol.worker, name[2].workers

        def arrive() -> None:
            self._mail.contribute(name, who, value)
            self._wake(members)

        self._after(self._draw(self._delays.message), arrive)

    def _arrive(self, generation: int, groups: tuple[tuple[WorkerId, ...], ...], who: WorkerId) -> None:
        if not self._living(who):
            return
        if self._sleeps(self._workers[who].asleep, lambda: self._arrive(generation, groups, who)):
            return
        self._mail.join(generation, groups, who)
        self._wake({peer for group in groups if who in group for peer in group} | {who})

    def _wake(self, workers: Iterable[WorkerId]) -> None:
        for who in sorted(workers):
            worker = self._workers[who]
            if self._sleeps(worker.asleep, lambda who=who: self._wake([who])):  # type: ignore[misc]
                continue
            if worker.alive and not worker.stopped and worker.ready is not None:
                ready = worker.ready
                self._resume(worker, lambda _, ready=ready: ready())  # type: ignore[misc]

    def _next_command(self, worker: _Worker) -> Command | None:
        while worker.commands:
            command = worker.commands.popleft()
            if getattr(command, "generation", 2**62) >= worker.newest:
                return command
        return None

    def _reach(self, worker: _Worker, point: Point, step: int) -> tuple[bool, Any]:
        for fault in self._faults:
            if fault in self._struck or not strikes(fault, point, step):
                continue
            who = worker.protocol.worker
            if fault.kind is FaultKind.KILL_NODE and fault.node is not None and who == self._nodes[fault.node][0]:
                worker.waiting = fault
                worker.strikes.append(str(fault))
                self._up(worker, Strike(worker=who, spec=str(fault)))
                return False, None
            if fault.worker == who:
                self._note(fault, str(who), str(point), step)
                if not self._strike(worker, fault.kind):
                    return False, None
        return True, None

    def _strike(self, worker: _Worker, kind: FaultKind) -> bool:
        """Lets a fault happen to a worker; returns whether it goes on."""
        match kind:
            case FaultKind.HANG | FaultKind.PARTITION:
                worker.stopped = True
            case FaultKind.STALL:
                worker.stalled = True
            case FaultKind.LEAVE:
                worker.leaving = True
                self._up(worker, Leaving(worker=worker.protocol.worker))
                return True
            case _:
                self._kill(worker)
        return False

    def _commit(self, worker: _Worker, step: int, ops: tuple[Op, ...]) -> None:
        plan = self._membership.running.plan
        stepped = StepOps(
            worker=str(worker.protocol.worker),
            generation=worker.protocol.generation,
            step=step,
            loss=None,
            omitted=worker.protocol.stage.omitted,
            ops=tuple(worker.spans),
        )
        if not worker.pace.warm:
            worker.pace.warm_up()
        self._log(stepped)
        worker.spans.clear()
        current = self._membership.generation == worker.protocol.generation
        if plan is not None and current and ops != plan.orders.of(worker.protocol.worker):
            raise InternalError(f"worker {worker.protocol.worker} left its order in step {step}")


def _peers(waiting: Any) -> set[WorkerId]:
    """Whom a worker waits for."""
    match waiting:
        case Take(receive=receive):
            return {receive.peer}
        case FinishReduce(reduction=reduction):
            return set(reduction.workers)
        case Build(groups=groups):
            return {worker for group in groups for worker in group}
    return set()
