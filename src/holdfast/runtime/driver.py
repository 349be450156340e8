"""What drives a worker: does what its protocol yields, over ports. No threads, no clock and no torch of its own.

A call that may wait is not made here but yielded. In a process a thread makes it, and waits
(``runtime/main/driving.py``). In the virtual cluster the ports raise instead of waiting, and the call is made again
once something has changed.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.control.messages import (
    Blob,
    Command,
    Expel,
    Hello,
    Install,
    Meet,
    Message,
    Obsolete,
    Peer,
    ScoresKept,
    Shutdown,
    StateAt,
)
from holdfast.core.faults import Point
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Compute, Payload, Receive, Reduction, Send
from holdfast.core.plan import Plan
from holdfast.core.program import Wanted
from holdfast.core.schedule import OpKind
from holdfast.core.tensorspec import TensorSpec
from holdfast.core.work import WorkPhase
from holdfast.devices.stamps import AtOnce, Stamps
from holdfast.errors import ClusterError, InternalError, StaleGeneration, WorkFailed
from holdfast.protocol.effects import (
    Asked,
    Attach,
    Boundary,
    Build,
    Consult,
    Consulted,
    Disconnect,
    Drain,
    Evaluate,
    Fetch,
    Fetched,
    Flush,
    Listen,
    Load,
    Pin,
    Release,
    Report,
    ScoresAwaited,
    Serve,
    WorkerEffect,
    Written,
)
from holdfast.protocol.executor import (
    AskPrepared,
    AuditSample,
    Expect,
    FinishReduce,
    Give,
    Keep,
    Kept,
    PollReduce,
    Reach,
    Run,
    RunAll,
    StartReduce,
    StepCommitted,
    Take,
)
from holdfast.protocol.progress_monitor import WAITS, ProgressMonitor, heartbeat
from holdfast.protocol.span_recorder import resident_bytes
from holdfast.protocol.stopping import ends_job
from holdfast.protocol.worker import Engine, WorkerProtocol
from holdfast.runtime.recording import StepRecord
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.runtime.transport.port import Expected, MessageHandle, MessageKey, Sent, SumHandle, SumKey, Transport
from holdfast.telemetry.events import Loaded, Log, Pinned

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Copier", "Driver", "Logs", "SpecOf", "Writer"]

LOOKAHEAD = 4
MOMENT_S = 0.02
FLUSH_S = 10.0
FOREVER = 2**62
AT_ANY_TIME = (Attach, Report, Listen, Disconnect, Release, Load, Keep, Kept)
"""Effects that are performed whichever generation is the newest: what is logged is of what was done already."""
Call = Callable[[], Any]
SpecOf = Callable[[Receive], TensorSpec]
Doing = Generator[Call, Any, Any]


class Copier(Protocol):
    """Both ends of one worker's state transfers; nothing but ``fetched`` waits."""

    def serve(self, serve: Serve) -> None:
        """Offers snapshots to a worker."""

    def release(self, keep: tuple[WorkerId, ...]) -> None:
        """Drops what is offered to all others, and a fetch of our own."""

    def fetch(self, generation: int, holders: Mapping[int, tuple[WorkerId, ...]]) -> None:
        """Begins to fetch layers, each from whoever holds it."""

    def fetched(self, generation: int, wait_s: float) -> Mapping[int, bytes] | None:
        """Returns what was fetched; None while it is not complete, after ``wait_s`` seconds at most.

        Raises:
            PeerLost: nobody is left who could give some layer.
        """


class Writer(Protocol):
    """Writes checkpoints while training goes on."""

    def pin(
        self, generation: int, step: int, layers: Iterable[int], snapshot: Callable[[int], Callable[[], bytes]]
    ) -> float:
        """Copies layers, to be written later; returns the seconds that this took."""

    def then(self, act: Callable[[], None]) -> None:
        """Calls ``act`` once all that was pinned before is written; returns at once."""

    def written(self, limit_s: float) -> bool:
        """Waits until all that was pinned is written or given up, ``limit_s`` seconds at most; whether it is."""


class Logs(Protocol):
    """What a worker logs of its steps for others, and reads of theirs to replay what they cannot."""

    def keep(self, keep: Keep) -> None:
        """Logs a value; never waits, unless the job wants it to.

        Raises:
            ReplicaDiverged: in a replay, it is not what was logged when the step was first run.
        """

    def kept(self, step: int, why: str = "") -> None:
        """All of a step was logged; or nothing of it counts, if that is ``why``."""

    def idle(self) -> AbstractContextManager[None]:
        """Within it the worker waits for others."""

    def flush(self, limit_s: float) -> bool:
        """Waits until others can read all that was logged, ``limit_s`` seconds at most; whether they can."""

    def collect(self, before: int) -> None:
        """Steps before this one are not needed any more; called in any thread, never waits."""

    def consult(self, consult: Consult) -> None:
        """Begins to read what a replay needs, in order."""

    def consulted(self, step: int, limit_s: float) -> Mapping[Wanted, Any] | None:
        """Returns what was read of a step; None while it is not there, after ``limit_s`` seconds at most.

        Raises:
            StorageError: something is not logged (LogGap), damaged (CorruptBlob), or cannot be read.
        """

    def leave(self) -> None:
        """Whatever was replayed is not gone on with, for now."""


@dataclass(slots=True, kw_only=True)
class Driver:
    """Drives one worker's protocol.

    Three threads meet here in a process. The *driver thread* runs it; it alone touches the stage and what is posted.
    The *control thread* brings commands: it only queues them, and interrupts whatever the driver thread waits for in an
    older generation. The *heartbeat thread* reads where we stand. While a script's loop runs operations at a stretch,
    the driver thread waits, and the loop's stands for it. What the first two share is one reference each, written by
    one of them or set to None, so there is no lock: ``_newest``, the newest generation that anybody has heard of, and
    ``_prepared``, the order that is to be gone over to.

    Attributes:
        protocol: what it does.
        transport: carries tensors.
        meet: learns who the other workers' processes are now.
        exchange: carries offers of states.
        commands: what the coordinator has told and the protocol has not listened to yet.
        attach: connects to the coordinator, with :meth:`hello` at the beginning of each connection.
        send: queues a message to the coordinator.
        log: the job's events.
        clock: seconds, of the spans and the log.
        spec_of: what a message that comes in holds.
        copier: state transfers.
        rebuild: makes a compute engine for the layers that a plan gives us, with a state from a store if one is named;
            also says what it is sent.
        expelled: called, in the control thread, when we are no member any more; ends the process.
        monitor: how we move along.
        writer: writes checkpoints; None if the job makes none.
        logs: what is logged for others, and read; None if the job logs nothing.
        asks: whether the loop of a user's script is where an `Asked` wants it, after so many seconds at most, see
            :meth:`holdfast.runtime.loop.turns.Turns.between`; None: there is none.
        outside_s: how long that may take.
        memory: bytes that the process has in memory.
        stamps: when what is queued on a device begins and ends.
        on_effect: called with each effect before it is performed; may wait, as any call that is yielded; None: nobody.
        on_point: called at each named point, with its step; may wait.
        on_run: called with the step of each operation that was run, and the seconds that it took; what that takes is
            the operation's.
        strikes: faults that the agent was asked to carry out, told again in every hello.
        leaving: whether the worker was told to go.
        dormant: whether it was told to compute nothing.
    """

    protocol: WorkerProtocol
    transport: Transport
    meet: Callable[[Iterable[Peer]], None]
    exchange: RelayExchange
    commands: queue.SimpleQueue[Command]
    attach: Callable[[], None]
    send: Callable[[Message], None]
    log: Log
    clock: Callable[[], float]
    spec_of: SpecOf
    copier: Copier
    rebuild: Callable[[Plan, StateAt | None], tuple[Engine, SpecOf]]
    expelled: Callable[[str], None]
    monitor: ProgressMonitor
    writer: Writer | None = None
    logs: Logs | None = None
    asks: Callable[..., bool] | None = None
    outside_s: float = float("inf")
    memory: Callable[[], int] = resident_bytes
    stamps: Stamps = field(default_factory=AtOnce)
    on_effect: Callable[[WorkerEffect], None] | None = None
    on_point: Callable[[Point, int], None] = lambda point, step: None
    on_run: Callable[[int, float], None] = lambda step, duration_s: None
    strikes: Callable[[], tuple[str, ...]] = tuple
    leaving: bool = False
    dormant: bool = False
    _prepared: Install | None = None
    _newest: int = 0
    _upcoming: deque[tuple[Receive, int]] = field(default_factory=deque)
    _posted: dict[tuple[Receive, int], MessageHandle] = field(default_factory=dict)
    _reducing: dict[Reduction, SumHandle] = field(default_factory=dict)
    _record: StepRecord = field(init=False)

    def __post_init__(self) -> None:
        """What is recorded has the driver's clock."""
        self._record = StepRecord(
            protocol=self.protocol, log=self.log, clock=self.clock, memory=self.memory, stamps=self.stamps
        )

    def hello(self) -> Hello:
        """Where the worker stands, in any thread."""
        told = {"leaving": self.leaving, "dormant": self.dormant}
        return self.protocol.hello(self._newest, self._prepared, **told, strikes=self.strikes())

    def on_command(self, command: Command) -> None:
        """Takes a command, in the control thread; a newer generation interrupts the older one at once."""
        if isinstance(command, Blob):
            self.exchange.deliver(command.generation, command.key, command.value)
            return
        if isinstance(command, Meet):
            self.meet(command.peers)
            return
        if isinstance(command, ScoresKept):
            self.protocol.stops = command.ends if self.protocol.stops is None else self.protocol.stops
            self.protocol.scores_kept = max(self.protocol.scores_kept, command.step)
            if self.protocol.awaits_scores:
                self.commands.put(command)
            return
        if isinstance(command, Obsolete):
            if self.logs is not None:
                self.logs.collect(command.step)
            return
        if isinstance(command, Expel):
            self.expelled(command.reason)
        if isinstance(command, Install) and command.at_boundary:
            self._prepared = command  # read by the driver thread at its next boundary
            return
        if isinstance(command, Install):
            self._prepared = None
            self._interrupt(command.generation)
        if isinstance(command, Shutdown):
            self._interrupt(FOREVER)
        self.commands.put(command)

    def _interrupt(self, newest: int) -> None:
        self._newest = max(self._newest, newest)
        self.exchange.end(newest - 1)
        self.transport.abort(newest - 1)

    def beat(self) -> None:
        """Tells of our progress, in any thread; a spare only says that it lives."""
        if self.protocol.generation > 0 or not self.protocol.stage.layers:
            self.send(heartbeat(self.protocol, self.monitor))

    def run(self) -> Generator[Call, Any, None]:
        """Follows the protocol to its end; yields the calls that may wait.

        Whoever runs this makes each call, and sends in what it returns or throws in what it raises.

        Raises:
            BaseException: what ends the job at once, or came out of a worker that had been stopped by one before.
        """
        script = self.protocol.run()
        result: Any = None
        error: BaseException | None = None
        while True:
            try:
                effect = script.send(result) if error is None else script.throw(error)
            except StopIteration:
                return
            except BaseException as problem:
                if ends_job(problem) or self.protocol.raised is not None:
                    raise
                script = self.protocol.stopped(problem)
                result, error = None, None
                continue
            result, error = None, None
            try:
                if self.on_effect is not None:
                    yield partial(self.on_effect, effect)
                waits = isinstance(effect, WAITS)
                if waits:
                    yield partial(self._hand_on, effect)
                self.monitor.move(waiting=waits)
                self._record.recorder.yielded(effect)
                result = yield from self._perform(effect)
                self._record.recorder.performed(effect)
            except GeneratorExit:  # we are dropped
                raise
            except BaseException as problem:  # noqa: BLE001 - thrown into the protocol, which handles what it can
                error = problem
            if isinstance(effect, WAITS):
                self.monitor.move(waiting=False)

    def _hand_on(self, effect: WorkerEffect) -> None:
        """Nobody waits for us while we wait: that our device is not done yet is no wait for others."""
        if self.protocol.raised is not None:  # whoever has failed, perhaps with its device, has nothing more to say
            return
        try:
            self.transport.hand_on()
        except ClusterError:
            if not isinstance(effect, (Listen, Build)):  # another generation follows, with or without whom is lost
                raise

    def _perform(self, effect: WorkerEffect) -> Doing:
        if not isinstance(effect, AT_ANY_TIME):
            self._refuse_stale()
        match effect:
            case Run():
                return self._run(effect)
            case RunAll():
                return self._run_all(effect)
            case AuditSample(layer=layer, microbatch=number, message=message, times=times):
                return self.protocol.stage.audit(layer, number, message, times)
            case Take(receive=receive, step=step):
                return (yield self._taken(receive, step))
            case Give(send=send, step=step, value=value):
                return self.transport.send(self._key(send, step), send.peer, value)
            case Reach(point=point, step=step):
                if point is Point.START:
                    self._record.clear()
                return (yield partial(self.on_point, point, step))
            case StartReduce() | PollReduce() | FinishReduce():
                return (yield from self._reduce(effect))
            case Expect(receives=receives):
                self._upcoming.extend(receives)
                return self._post()
            case AskPrepared():
                return None if self._prepared is None else self._prepared.plan
            case StepCommitted():
                return self._committed(effect)
            case Keep() | Kept() | Flush() | Consult() | Consulted():
                return (yield from self._perform_of_logs(effect))
            case _:
                return (yield from self._perform_between_steps(effect))

    def _reduce(self, effect: StartReduce | PollReduce | FinishReduce) -> Doing:
        reduction = effect.reduction
        if isinstance(effect, StartReduce):
            key = SumKey(self.protocol.generation, effect.step, reduction)
            self._reducing[reduction] = self.transport.all_reduce(key, effect.value)
            return None
        if isinstance(effect, PollReduce) and not self._reducing[reduction].ready:
            return None
        return (yield self._idle(self._reducing.pop(reduction).wait))

    def _perform_between_steps(self, effect: WorkerEffect) -> Doing:
        match effect:
            case Attach():
                return self.attach()
            case Report(message=message, when_written=True) if self.writer is not None:
                return self.writer.then(partial(self.send, message))
            case Report(message=message):
                self._record.told(message)
                return self.send(message)
            case Listen():
                return (yield from self._listen())
            case Disconnect():
                return self._forget()
            case Load(plan=plan, state=state, beside=beside):
                return self._load(plan, state, beside=beside)
            case Build():
                return (yield self._building(effect))
            case Boundary():
                return self._go_over()
            case Drain():
                return (yield self.transport.drain)
            case Evaluate():
                return self._evaluate(effect)
            case ScoresAwaited(step=step):
                return (yield from self._await_scores(step))
            case Serve():
                return self.copier.serve(effect)
            case Release(keep=keep):
                return self.copier.release(keep)
            case Fetch(generation=generation, holders=holders):
                return self.copier.fetch(generation, holders)
            case Fetched(wait=wait):
                return (yield partial(self.copier.fetched, self.protocol.generation, MOMENT_S if wait else 0.0))
            case Pin(generation=generation, step=step, layers=layers):
                return self._pin(generation, step, layers)
            case Written():
                return (yield from self._await_writer())
            case Asked():
                return (yield from self._await_loop(effect))
        raise InternalError(f"unknown effect {effect!r}")

    def _perform_of_logs(self, effect: Keep | Kept | Flush | Consult | Consulted) -> Doing:
        assert self.logs is not None, "only a worker that logs replays"
        match effect:
            case Keep():
                return self.logs.keep(effect)
            case Kept(step=step, why=why):
                return self.logs.kept(step, why)
            case Flush():
                return (yield partial(self.logs.flush, FLUSH_S))
            case Consult():
                return self.logs.consult(effect)
            case Consulted(step=step):
                return (yield partial(self.logs.consulted, step, MOMENT_S))

    def _idle(self, wait: Callable[[], Any]) -> Call:
        """A wait for others, in which there is time to write logs."""
        logs = self.logs
        if logs is None:
            return wait

        def waiting() -> Any:
            with logs.idle():
                return wait()

        return waiting

    @property
    def superseded(self) -> bool:
        """Whether somebody has heard of a newer generation than the one that runs; in any thread."""
        return self._newest > self.protocol.generation

    def _refuse_stale(self) -> None:
        if self.superseded:
            raise StaleGeneration(self.protocol.generation, self._newest if self._newest < FOREVER else None)

    def _building(self, build: Build) -> Call:
        expected = Expected.of(self.protocol.programs, self._spec_of, self.protocol.stage.message_size)
        if build.sums is not None:
            expected = Expected(messages=(), sums=build.sums)
        of = (build.generation, build.groups, build.neighbours)
        return partial(self.transport.build, *of, step=build.step, expected=expected)

    def _spec_of(self, receive: Receive) -> TensorSpec:
        if receive.payload is Payload.SUM:
            return TensorSpec(shape=(self.protocol.stage.sum_bytes(receive.layers),), dtype="uint8")
        if receive.payload is Payload.AUDIT:
            return TensorSpec(shape=(self.protocol.stage.audit_bytes(*receive.layers),), dtype="uint8")
        return self.spec_of(receive)

    def _listen(self) -> Doing:
        """The next command that is not of an older generation."""
        while True:
            command = yield self.commands.get
            if not isinstance(command, ScoresKept) and getattr(command, "generation", FOREVER) >= self._newest:
                return command

    def _await_scores(self, step: int) -> Doing:
        """Waits until an evaluation is kept; what else comes meanwhile is left for later.

        Raises:
            StaleGeneration: superseded: others need us meanwhile.
        """
        others: list[Command] = []
        try:
            while self.protocol.scores_kept < step:
                self._refuse_stale()
                command = yield self.commands.get
                if not isinstance(command, ScoresKept):
                    others.append(command)
        finally:
            for command in others:
                self.commands.put(command)

    def _forget(self) -> None:
        """Ends the communication of a generation; what has come of a step is kept with what was handed on."""
        for (receive, step), handle in self._posted.items():
            kept = receive.payload in (Payload.ACTIVATION, Payload.GRADIENT) and receive.microbatch.trains
            if kept and (value := handle.kept()) is not None:
                log, number = self.protocol.log, receive.microbatch.number
                log.keep(step, receive.payload, receive.boundary, number, value)
        self._upcoming.clear()
        self._posted.clear()
        self._reducing.clear()
        if self.logs is not None:
            self.logs.leave()

    def _post(self) -> None:
        while self._upcoming and len(self._posted) < LOOKAHEAD:
            receive, step = self._upcoming.popleft()
            key, spec = self._key(receive, step), self._spec_of(receive)
            self._posted[receive, step] = self.transport.receive(key, receive.peer, spec)

    def _taken(self, receive: Receive, step: int) -> Callable[[], torch.Tensor]:
        handle = self._posted.pop((receive, step))
        self._post()  # before the wait: whatever comes after it holds up what the value is for
        return self._idle(handle.wait)

    def _key(self, message: Send | Receive, step: int) -> MessageKey:
        return MessageKey.of(message, self.protocol.generation, step)

    def _run(self, run: Run) -> Any:
        stage, op, step, number = self.protocol.stage, run.op, run.step, run.op.microbatch.number
        self.monitor.compute()
        start, began = self.clock(), self._record.run(step)
        if op.kind is OpKind.F:
            result = stage.forward(step, number, run.value, run.layers, adds=run.adds)
        else:
            result = stage.backward(op.kind, step, number, run.value, run.layers, adds=run.adds)
        self.on_run(step, self.clock() - start)
        self._record.ran(op, began)
        return result

    def _evaluate(self, effect: Evaluate) -> Any:
        self.monitor.compute()
        return self.protocol.stage.evaluate(effect.number, effect.value, effect.layers)

    def _run_all(self, run: RunAll) -> None:
        """Runs operations in the thread of a script's loop, as long as no newer generation is heard of."""
        execution, step = self.protocol.execution, run.step
        assert execution is not None, "it has yielded this"
        self.monitor.compute()
        start, began = self.clock(), self._record.run(step)

        def ran(compute: Compute) -> bool:
            nonlocal start, began
            self.on_run(step, self.clock() - start)
            began = self._record.ran(compute.op, began)
            execution.ran(compute)
            self.monitor.move(waiting=False)
            start = self.clock()
            return not self.superseded

        self.protocol.stage.run(step, run.computes, ran)
        self._refuse_stale()

    def _go_over(self) -> Install:
        """The order that all were found to be ready for."""
        install, self._prepared = self._prepared, None
        if install is None:  # a newer generation came in between
            raise StaleGeneration(self.protocol.generation)
        return install

    def _load(self, plan: Plan, state: StateAt | None, *, beside: bool) -> Engine:
        self.monitor.cool_down()
        began = self.clock()
        stage, spec_of = self.rebuild(plan, state)
        if state is not None:
            worker, now = str(self.protocol.worker), self.clock()
            self.log.write(now, Loaded(worker=worker, step=state.step, layers=stage.layers, seconds=now - began))
        elif not beside:
            stage.inherit(self.protocol.stage)
        if not beside:
            self.spec_of = spec_of
        return stage

    def _pin(self, generation: int, step: int, layers: tuple[int, ...]) -> None:
        assert self.writer is not None, "no checkpoint is pinned in a job that makes none"
        waited_s = self.writer.pin(generation, step, layers, partial(self.protocol.stage.snapshot, to_file=True))
        self.log.write(self.clock(), Pinned(worker=str(self.protocol.worker), step=step, seconds=waited_s))

    def _await_writer(self) -> Doing:
        """Waits for the writer; that it is still at work counts as moving along.

        Raises:
            StaleGeneration: superseded; what was pinned is written all the same.
        """
        assert self.writer is not None, "nothing is pinned in a job that makes no checkpoints"
        while not (yield partial(self.writer.written, MOMENT_S)):
            self._refuse_stale()
            self.monitor.move(waiting=True)

    def _await_loop(self, asked: Asked) -> Doing:
        """Waits for the loop of a user's script to come back; that it is elsewhere is no sign of a hang.

        Raises:
            StaleGeneration: superseded: others need us meanwhile.
            WorkFailed: it stays there for too long.
        """
        assert self.asks is not None, "only a loop asks for steps"
        since = self.clock()
        while not (yield partial(self.asks, asked.step, MOMENT_S, repeated=asked.repeated, begins=asked.begins)):
            self._refuse_stale()
            self.monitor.move(waiting=True)
            if self.clock() - since > self.outside_s:
                what = f"step {asked.step} was not asked for within {self.outside_s:g} s (control.outside_s)"
                raise WorkFailed(WorkPhase.SCRIPT, TimeoutError(what))

    def _committed(self, committed: StepCommitted) -> None:
        """Logs the step, and has the coordinator know how fast a first one was."""
        if not self.monitor.warm:
            self.monitor.warm_up()
            self.beat()  # so that whoever stops right now is judged by what it needs when warm
        self._record.committed(committed, self.transport.sent or Sent())
