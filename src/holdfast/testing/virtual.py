"""A whole job in one thread, under a virtual clock: the real protocol, the real decisions, no sockets, no waiting.

Coordinator decisions, worker lives, executor and lowering are the code that trains for real; only the shells around
them are replaced. Every delay comes from one seeded source, so one seed is one history.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace as replace_struct

from holdfast.control.membership import (
    Closed,
    Membership,
    Planned,
    Record,
    Tell,
    Tick,
    decide,
    plan_recovery,
    restore,
    to_store,
    unplanned,
)
from holdfast.control.messages import (
    Blob,
    Command,
    Ended,
    Exited,
    Fence,
    Hello,
    Install,
    Message,
    Progress,
    Shutdown,
)
from holdfast.control.store import StoredDecision
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.schedule import Op, OpKind
from holdfast.errors import InternalError, PeerLost, StaleGeneration
from holdfast.runtime.emulated import EmulatedStage
from holdfast.runtime.executor import Committed, Expect, FinishReduce, Give, Reach, Run, StartReduce, Take
from holdfast.runtime.life import Abort, Attach, Build, Life, LifeStage, Listen, Report, WorkerLife
from holdfast.runtime.transport import MessageKey
from holdfast.telemetry.events import CoordinatorLost, CoordinatorReady, Event, FaultInjected, StepOps
from holdfast.testing.memory import Mail

__all__ = ["Delays", "VirtualCluster", "VirtualResult"]

StageFactory = Callable[[WorkerId], LifeStage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Ranges, in virtual seconds, from which every delay is drawn."""

    control: tuple[float, float] = (0.0005, 0.005)
    message: tuple[float, float] = (0.0001, 0.003)
    compute: tuple[float, float] = (0.01, 0.03)
    detect: tuple[float, float] = (0.001, 0.05)
    connect: tuple[float, float] = (0.001, 0.02)
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
        fired: specs of the faults that fired; a fault by effect count is ``kill:WORKER#COUNT``.
        lost: the workers that died.
    """

    outcome: str
    detail: str
    step: int
    generations: int
    digest: str
    events: tuple[tuple[float, Event], ...]
    fired: tuple[str, ...]
    lost: tuple[WorkerId, ...]


@dataclass(slots=True)
class _Worker:
    """A life and what it waits for."""

    life: WorkerLife
    generator: Life
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
        microbatches: per pipeline.
        steps: of the job.
        seed: of every delay.
        faults: at named points.
        kill_at_effect: workers that die when they yield their n-th effect, wherever that is.
        delays: ranges of the delays.
        stage: makes a worker's compute engine; default an emulated one.
        ties: the layers that share weights.
        coordinator_deaths: (when it dies, how long it is away), in virtual seconds; messages on their way are lost.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        microbatches: int,
        steps: int,
        seed: int = 0,
        faults: Iterable[Fault] = (),
        kill_at_effect: Iterable[tuple[WorkerId, int]] = (),
        delays: Delays | None = None,
        stage: StageFactory | None = None,
        ties: tuple[tuple[int, ...], ...] = (),
        coordinator_deaths: Iterable[tuple[float, float]] = (),
    ) -> None:
        self._coordinator_deaths = tuple(coordinator_deaths)
        self._incarnation = 0
        self._attached: set[WorkerId | None] = {None}
        self._outboxes: dict[WorkerId, list[Message]] = defaultdict(list)
        self._exits: tuple[Exited, ...] = ()
        self._stored: StoredDecision | None = None
        self._random = random.Random(seed)
        self._delays = delays or Delays()
        self._faults = tuple(faults)
        self._deaths = dict(kill_at_effect)
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._channels: dict[object, float] = defaultdict(float)
        self._mail = Mail()
        self._events: list[tuple[float, Event]] = []
        self._fired: list[str] = []
        self._ended: Ended | None = None
        self._blank = self._membership = Membership(healthy=plan, steps=steps, strategy="auto", directory="")
        self._saved: dict[int, str] = {}
        make = stage or self._emulated(plan)
        self._workers = {
            worker: self._worker(worker, make(worker), steps, microbatches, ties) for worker in plan.workers
        }

    def _emulated(self, plan: Plan) -> StageFactory:
        placement, total = plan.placement, len(plan.routes.microbatches)
        return lambda worker: EmulatedStage(
            layers=placement.layers_of(worker), num_layers=placement.num_layers, num_microbatches=total
        )

    def _worker(
        self, worker: WorkerId, stage: LifeStage, steps: int, microbatches: int, ties: tuple[tuple[int, ...], ...]
    ) -> _Worker:
        life = WorkerLife(
            worker=worker,
            stage=_Unsaved(stage),  # type: ignore[arg-type]
            steps=steps,
            microbatches=microbatches,
            ties=ties,
            pid=0,
        )
        return _Worker(life=life, generator=life.run())

    def run(self, limit_s: float = 10_000.0) -> VirtualResult:
        """Runs to the end of the job.

        Args:
            limit_s: virtual seconds after which the job counts as stuck.

        Raises:
            InternalError: nothing can happen any more though the job has not ended, or the limit has passed.
        """
        for worker in self._workers.values():
            self._after(self._draw(self._delays.control), lambda w=worker: self._resume(w))  # type: ignore[misc]
        self._tick()
        for at, away_s in self._coordinator_deaths:
            self._after(at, lambda away_s=away_s: self._kill_coordinator(away_s))  # type: ignore[misc]
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
            lost=tuple(sorted(self._membership.lost)),
        )

    def _digest(self) -> str:
        digests = {layer: text for saved in self._membership.saved.values() for layer, text in saved.items()}
        return hashlib.sha256("".join(digests[layer] for layer in sorted(digests)).encode()).hexdigest()

    def _stuck(self) -> str:
        return ", ".join(f"{w.life.worker}: {w.waiting!r}" for w in self._workers.values() if w.alive)

    # Time.

    def _draw(self, limits: tuple[float, float]) -> float:
        return self._random.uniform(*limits)

    def _after(self, delay: float, act: Callable[[], None], channel: object = None) -> None:
        """Lets ``act`` happen later; on one channel, in order."""
        at = self._now + delay
        if channel is not None:
            at = self._channels[channel] = max(at, self._channels[channel])
        heapq.heappush(self._queue, (at, next(self._counter), act))

    def _tick(self) -> None:
        self._after(0.2, self._tick)
        if None in self._attached:
            self._pass_time()

    def _pass_time(self) -> None:
        self._decide(Tick(now=self._now))
        if ahead := unplanned(self._membership):
            lost = self._random.choice(ahead)
            self._decide(Planned(lost=lost, recovery=plan_recovery(self._membership, lost)))

    # The coordinator.

    def _decide(self, event: Message | Closed | Tick | Planned) -> None:
        before = self._membership
        self._membership, outputs = decide(before, event, now=self._now)
        self._stored = to_store(before, self._membership) or self._stored
        for output in outputs:
            match output:
                case Record(event=recorded):
                    self._log(recorded)
                case Tell(to=None, command=Ended() as ended):
                    self._ended = ended
                case Tell(to=None, command=Progress()):
                    pass
                case Tell(to=None, command=Fence(worker=worker)):
                    self._kill(self._workers[worker])
                case Tell(to=WorkerId() as to, command=command) if to in self._attached:
                    self._over_control(
                        lambda to=to, c=command: self._deliver(self._workers[to], c),  # type: ignore[misc]
                        channel=("down", to),
                    )

    def _over_control(self, act: Callable[[], None], channel: object) -> None:
        """What travels between the coordinator and others arrives if the coordinator lives that long."""
        incarnation = self._incarnation

        def arrive() -> None:
            if incarnation == self._incarnation:
                act()

        self._after(self._draw(self._delays.control), arrive, channel=channel)

    def _up(self, worker: WorkerId, message: Message) -> None:
        """A worker sends; while there is no coordinator, its messages wait."""
        if worker in self._attached:
            self._over_control(lambda: self._decide(message), channel=("up", worker))
        else:
            self._outboxes[worker].append(message)

    def _hello(self, who: WorkerId | None) -> None:
        """A worker, or the agent, attaches and says what it could not say before."""
        if None not in self._attached or (who is not None and not self._workers[who].alive):
            return
        hello = Hello(worker=None, pid=0, exits=self._exits) if who is None else self._standing(self._workers[who])
        self._attached.add(who)
        self._over_control(lambda: self._decide(hello), channel=("up", who))
        if who is not None:
            for message in self._outboxes.pop(who, []):
                self._up(who, message)

    def _standing(self, worker: _Worker) -> Hello:
        hello = worker.life.hello()
        return replace_struct(hello, activity="waiting") if worker.newest > hello.generation else hello

    def _kill_coordinator(self, away_s: float) -> None:
        if None not in self._attached:  # it is dead already
            return
        self._incarnation += 1
        self._attached.clear()
        self._log(CoordinatorLost(how="signal 9"))
        self._after(away_s, self._restart_coordinator)

    def _restart_coordinator(self) -> None:
        self._membership = self._blank
        if self._stored is not None:
            self._membership = restore(self._blank, self._stored, reattach_until=self._now + 60.0)
        self._log(CoordinatorReady(pid=0, generation=self._membership.generation))
        self._attached.add(None)
        for who in (None, *self._workers):
            incarnation = self._incarnation

            def come(who: WorkerId | None = who, incarnation: int = incarnation) -> None:
                if incarnation == self._incarnation:
                    self._hello(who)

            self._after(self._draw(self._delays.reattach), come)

    def _log(self, event: Event) -> None:
        self._events.append((self._now, event))

    def _deliver(self, worker: _Worker, command: Command) -> None:
        if not worker.alive or isinstance(command, Blob):
            return
        if isinstance(command, Install):
            worker.newest = command.generation
        if isinstance(command, Shutdown):
            worker.newest = 2**62
        worker.commands.append(command)
        if isinstance(worker.waiting, Listen):
            self._resume(worker, self._next_command)
        elif worker.newest > worker.life.generation and isinstance(worker.waiting, Take | FinishReduce | Build):
            self._throw(worker, StaleGeneration(worker.life.generation))

    # The workers.

    def _kill(self, worker: _Worker) -> None:
        if not worker.alive:
            return
        worker.alive, worker.ready, worker.waiting = False, None, None
        who = worker.life.worker
        exited = Exited(worker=who, status=-9)

        def reap() -> None:
            self._exits += (exited,)
            if None in self._attached:
                self._over_control(lambda: self._decide(exited), channel=("up", None))

        self._after(self._draw(self._delays.detect), reap)
        self._after(self._draw(self._delays.detect), lambda: self._notice(who))

    def _notice(self, dead: WorkerId) -> None:
        """Those that wait for the dead worker see its connection close, sooner or later than the coordinator."""
        for worker in self._workers.values():
            if worker.alive and dead in _peers(worker.waiting) and worker.ready is not None:
                self._throw(worker, PeerLost(str(dead), worker.life.generation))

    def _throw(self, worker: _Worker, error: Exception) -> None:
        worker.waiting, worker.ready = None, None
        self._advance(worker, lambda: worker.generator.throw(error))

    def _resume(self, worker: _Worker, value: Callable[[_Worker], Any] | None = None) -> None:
        if not worker.alive:
            return
        given = value(worker) if value else None
        if value is not None and given is None:
            return
        worker.waiting, worker.ready = None, None
        self._advance(worker, lambda: worker.generator.send(given))

    def _advance(self, worker: _Worker, step: Callable[[], Any]) -> None:
        """Lets a worker go on until it waits for something."""
        while True:
            try:
                effect = step()
            except StopIteration:
                worker.alive = False
                return
            worker.effects += 1
            if self._deaths.get(worker.life.worker) == worker.effects:
                self._fired.append(f"kill:{worker.life.worker}#{worker.effects}")
                self._kill(worker)
                return
            try:
                done, result = self._perform(worker, effect)
            except StaleGeneration as error:
                step = lambda e=error: worker.generator.throw(e)  # type: ignore[misc]  # noqa: E731
                continue
            if not done:
                return
            step = lambda r=result: worker.generator.send(r)  # type: ignore[misc]  # noqa: E731

    def _perform(self, worker: _Worker, effect: Any) -> tuple[bool, Any]:
        """Does what can be done at once; otherwise notes what the worker waits for."""
        life = worker.life
        match effect:
            case Attach():
                self._hello(life.worker)
                return True, None
            case Report(message=message):
                self._up(life.worker, message)
                return True, None
            case Listen():
                command = self._next_command(worker)
                worker.waiting = None if command else effect
                return command is not None, command
            case Abort():
                worker.spans.clear()
                return True, None
        if worker.newest > life.generation:
            raise StaleGeneration(life.generation)
        match effect:
            case Run():
                self._compute(worker, effect)
                return False, None
            case Give(send=send, value=value, step=step):
                self._send(worker, self._key(worker, send, step), send.peer, value.clone())
                return True, None
            case StartReduce(reduction=reduction, value=value, step=step):
                self._contribute(worker, (life.generation, step, reduction), value.clone())
                return True, None
            case Reach(point=point, step=step):
                return self._reach(worker, point, step)
            case Committed(step=step, ops=ops):
                self._commit(worker, step, ops)
                return True, None
            case Expect():
                return True, None
        return self._wait(worker, effect)

    def _wait(self, worker: _Worker, effect: Take | FinishReduce | Build) -> tuple[bool, Any]:
        life = worker.life
        ready: Callable[[], Any]
        match effect:
            case Take(receive=receive, step=step):
                key = self._key(worker, receive, step)
                ready = lambda: self._mail.collect(key, receive.peer, life.worker)  # noqa: E731
            case FinishReduce(reduction=reduction, step=step):
                name = (life.generation, step, reduction)
                ready = lambda: self._mail.total(name, reduction.workers)  # noqa: E731
            case Build(generation=generation, groups=groups):
                ready = lambda: self._mail.complete(generation, groups, life.worker) or None  # noqa: E731
                self._after(self._draw(self._delays.connect), lambda: self._arrive(generation, groups, life.worker))
                worker.waiting, worker.ready = effect, ready
                return False, None
        found = ready()
        if found is None:
            worker.waiting, worker.ready = effect, ready
        return found is not None, found

    def _compute(self, worker: _Worker, run: Run) -> None:
        number = run.op.microbatch.number(worker.life.microbatches)
        stage = worker.life.stage
        if run.op.kind is OpKind.F:
            result = stage.forward(run.step, number, run.value)
        else:
            result = stage.backward(run.op.kind, run.step, number, run.value)
        start, end = self._now, self._now + self._draw(self._delays.compute)
        worker.waiting = run
        microbatch = run.op.microbatch

        def finish() -> None:
            if not worker.alive:
                return
            worker.waiting = None
            if worker.newest > worker.life.generation:
                self._throw(worker, StaleGeneration(worker.life.generation))
                return
            worker.spans.append((run.op.kind.value, microbatch.pipeline, microbatch.index, start, end))
            self._advance(worker, lambda: worker.generator.send(result))

        self._after(end - self._now, finish)

    def _send(self, worker: _Worker, key: MessageKey, peer: WorkerId, value: Any) -> None:
        source = worker.life.worker

        def arrive() -> None:
            self._mail.post(key, source, peer, value)
            self._wake([peer])

        self._after(self._draw(self._delays.message), arrive)

    def _contribute(self, worker: _Worker, name: tuple[int, int, Any], value: Any) -> None:
        who, members = worker.life.worker, name[2].workers

        def arrive() -> None:
            self._mail.contribute(name, who, value)
            self._wake(members)

        self._after(self._draw(self._delays.message), arrive)

    def _arrive(self, generation: int, groups: tuple[tuple[WorkerId, ...], ...], who: WorkerId) -> None:
        if not self._workers[who].alive:
            return
        self._mail.join(generation, groups, who)
        self._wake({peer for group in groups if who in group for peer in group} | {who})

    def _wake(self, workers: Iterable[WorkerId]) -> None:
        for who in sorted(workers):
            worker = self._workers[who]
            if worker.alive and worker.ready is not None:
                ready = worker.ready
                self._resume(worker, lambda _, ready=ready: ready())  # type: ignore[misc]

    def _next_command(self, worker: _Worker) -> Command | None:
        while worker.commands:
            command = worker.commands.popleft()
            if getattr(command, "generation", 2**62) >= worker.newest:
                return command
        return None

    def _reach(self, worker: _Worker, point: Any, step: int) -> tuple[bool, Any]:
        for fault in self._faults:
            if fault.worker == worker.life.worker and fault.point == point and fault.step == step:
                self._fired.append(str(fault))
                injected = FaultInjected(
                    worker=str(fault.worker), kind=fault.kind, step=step, point=point, spec=str(fault)
                )
                self._log(injected)
                self._kill(worker)
                return False, None
        return True, None

    def _commit(self, worker: _Worker, step: int, ops: tuple[Op, ...]) -> None:
        plan = self._membership.plan
        stepped = StepOps(
            worker=str(worker.life.worker),
            generation=worker.life.generation,
            step=step,
            loss=None,
            omitted=worker.life.stage.omitted,
            ops=tuple(worker.spans),
        )
        self._log(stepped)
        worker.spans.clear()
        current = self._membership.generation == worker.life.generation
        if plan is not None and current and ops != plan.orders.of(worker.life.worker):
            raise InternalError(f"worker {worker.life.worker} left its order in step {step}")

    def _key(self, worker: _Worker, instruction: Any, step: int) -> MessageKey:
        number = instruction.microbatch.number(worker.life.microbatches)
        return MessageKey(generation=worker.life.generation, step=step, payload=instruction.payload, microbatch=number)


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


class _Unsaved:
    """A stage that writes no files: the digests are enough here."""

    def __init__(self, stage: LifeStage) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def save(self, layer: int, directory: object) -> None:
        """Writes nothing."""
