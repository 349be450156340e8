"""What drives a real worker: does what its protocol yields, over transport, control connection and clock."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.control.messages import (
    Blob,
    Command,
    Expel,
    Hello,
    Install,
    Meet,
    Message,
    Shutdown,
    StateAt,
    StepDone,
)
from holdfast.core.lower import Receive, Reduction, Send
from holdfast.core.plan import Plan
from holdfast.core.schedule import Op, OpKind
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import InternalError, StaleGeneration
from holdfast.protocol.besides import Besides, add_span, resident_bytes
from holdfast.protocol.executor import (
    Committed,
    Expect,
    FinishReduce,
    Give,
    PollReduce,
    Reach,
    Ready,
    Run,
    StartReduce,
    Take,
)
from holdfast.protocol.pace import WAITS, Pace, heartbeat
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
    WorkerEffect,
    WorkerProtocol,
    Written,
    mean_loss,
)
from holdfast.runtime.checkpointing import CheckpointWriter
from holdfast.runtime.engine.build import StageParts
from holdfast.runtime.injection import WorkerInjector
from holdfast.runtime.transport.copying import StateCopier
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.runtime.transport.port import Expected, Handle, MessageKey, Sent, SumHandle, SumKey, Transport
from holdfast.telemetry.events import EventLog, Notice, Pinned, StepOmitted, StepOps

__all__ = ["Driver"]

LOOKAHEAD = 4
STUCK_S = 0.05
WRITING_S = 0.02
_INTERRUPTED = object()
FOREVER = 2**62


@dataclass(slots=True, kw_only=True)
class Driver:
    """Drives one worker's protocol.

    Four threads meet here. The *driver thread* advances the protocol and performs its effects; it alone touches the
    stage and what is posted. The *control thread* brings commands: it only queues them, and interrupts whatever the
    driver thread waits for in an older generation. The *main thread* waits in :meth:`run`, and puts another driver
    thread in the place of one that nothing can wake. The *heartbeat thread* reads where the others stand. Between the
    first three, ``_turn`` guards three values: ``_thread``, which driver thread has the protocol; ``_waits_in``, the
    generation whose message it waits for; and ``_newest``, the newest generation that anybody has heard of.

    Attributes:
        protocol: what it does.
        stage: the compute engine.
        transport: carries tensors.
        exchange: carries addresses.
        attach: connects to the coordinator, with :meth:`hello` at the beginning of each connection.
        send: queues a message to the coordinator.
        log: the job's events.
        spec_of: what a message that comes in holds.
        injector: scheduled faults.
        copier: state transfers.
        rebuild: makes a compute engine for the layers that a plan gives us, with a state from a store if one is named.
        expelled: called, in the control thread, when we are no member any more; ends the process.
        pace: how we move along.
        writer: writes checkpoints; None if the job makes none.
        leaving: whether the worker was told to go.
    """

    protocol: WorkerProtocol
    stage: Engine
    transport: Transport
    exchange: RelayExchange
    attach: Callable[[], None]
    send: Callable[[Message], None]
    log: EventLog
    spec_of: Callable[[Receive], TensorSpec]
    injector: WorkerInjector
    copier: StateCopier
    rebuild: Callable[[Plan, StateAt | None], StageParts]
    expelled: Callable[[str], None]
    pace: Pace = field(default_factory=Pace)
    writer: CheckpointWriter | None = None
    leaving: bool = False
    _script: Script = field(init=False)
    _prepared: Install | None = None
    _commands: queue.SimpleQueue[Command] = field(default_factory=queue.SimpleQueue)
    _signals: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _thread: int = 0
    _waits_in: int | None = None
    _newest: int = 0
    _upcoming: deque[tuple[Receive, int]] = field(default_factory=deque)
    _posted: dict[tuple[Receive, int], Handle] = field(default_factory=dict)
    _reducing: dict[Reduction, SumHandle] = field(default_factory=dict)
    _spans: list[tuple[str, int, int, float, float]] = field(default_factory=list)
    _besides: Besides = field(default_factory=Besides)
    _order: tuple[Op, ...] = ()
    _omitted: set[int] = field(default_factory=set)
    _sent: Sent = field(default_factory=Sent)

    def hello(self) -> Hello:
        """Where the worker stands, in any thread."""
        return self.protocol.hello(self._newest, self._prepared, leaving=self.leaving, strikes=self.injector.asked)

    def on_command(self, command: Command) -> None:
        """Takes a command, in the control thread; a newer generation interrupts the older one at once."""
        if isinstance(command, Blob):
            self.exchange.deliver(command.generation, command.key, command.value)
            return
        if isinstance(command, Meet):
            self.transport.meet(command.peers)
            return
        if isinstance(command, Expel):
            self.expelled(command.reason)
        if isinstance(command, Install) and command.at_boundary:
            self._prepared = command  # one reference, read by the driver thread at its next boundary: no lock is needed
            return
        if isinstance(command, Install):
            self._prepared = None
            self._interrupt(command.generation)
        if isinstance(command, Shutdown):
            self._interrupt(FOREVER)
        self._commands.put(command)

    def beat(self) -> None:
        """Tells of our progress, in any thread; a spare only says that it lives."""
        if self.protocol.generation > 0 or not self.protocol.stage.layers:
            self.send(heartbeat(self.protocol, self.pace))

    def _interrupt(self, newest: int) -> None:
        with self._turn:
            self._newest = max(self._newest, newest)
        # Not under the lock: both wake the driver thread, and that takes the lock at once.
        self.exchange.end(newest - 1)
        self.transport.abort(newest - 1)
        self._signals.put(_INTERRUPTED)

    def run(self) -> None:
        """Follows the protocol to its end, in a thread that can be replaced; raises what ends it."""
        self._script = self.protocol.run()
        self._start_thread(self._script, None)
        while (signal_ := self._signals.get()) is _INTERRUPTED:
            self._rescue(self._script)
        if signal_ is not None:
            raise signal_

    def _rescue(self, script: Script) -> None:
        """Replaces the thread if it still waits in a generation that is over.

        Gloo forgets to wake a receive whose payload had arrived in part when its connection went. Nothing can wake that
        thread; but the protocol is suspended while its effect is performed, so another thread can go on with it.
        """
        with self._turn:
            if self._turn.wait_for(lambda: self._waits_in is None or self._waits_in >= self._newest, STUCK_S):
                return
            # From here on the old thread, should it ever wake, finds that it is not the one any more, and ends.
            self._waits_in = None
            self._thread += 1
            self.transport.abandon()
            text = "a receive was not woken when its connection went; another thread goes on"
            self.log.write(time.monotonic(), Notice(worker=str(self.protocol.worker), text=text))
            self._start_thread(script, StaleGeneration(self.protocol.generation))

    def _start_thread(self, script: Script, error: StaleGeneration | None) -> None:
        arguments = (script, self._thread, error)
        threading.Thread(target=self._drive, args=arguments, name=f"driver-{self._thread}", daemon=True).start()

    def _drive(self, script: Script, thread: int, error: BaseException | None) -> None:
        """Does what the protocol yields until it ends or another thread has taken over."""
        torch.set_num_threads(1)  # the limit is each thread's own
        result: Any = None
        while True:
            try:
                effect = script.send(result) if error is None else script.throw(error)
            except StopIteration:
                return self._signals.put(None)
            except BaseException as problem:  # noqa: BLE001 - handed to the thread that waits in run()
                if ends_job(problem) or self.protocol.raised is not None:
                    return self._signals.put(problem)
                self._script = script = self.protocol.stopped(problem)
                result, error = None, None
                continue
            result, error = None, None
            self.pace.move(waiting=isinstance(effect, WAITS))
            self._besides.yielded(effect)
            try:
                result = self._perform(effect)
                self._besides.performed(effect)
            except BaseException as problem:  # noqa: BLE001 - thrown into the protocol, which handles what it can
                error = problem
            if thread != self._thread:  # another thread has gone on with the protocol: it must not be touched
                return None
            self.pace.move(waiting=False)

    def _wait(self, handle: Handle) -> torch.Tensor:
        """Waits for a handle, in a way that :meth:`_rescue` can see.

        Raises:
            StaleGeneration: superseded, whether before the wait began or by a thread that took over during it.
        """
        with self._turn:
            thread = self._thread
            if self._newest > self.protocol.generation:  # a rescue that came before this would not come again
                raise StaleGeneration(self.protocol.generation)
            self._waits_in = self.protocol.generation
        try:
            return handle.wait()
        finally:
            with self._turn:
                if thread != self._thread:
                    raise StaleGeneration(self.protocol.generation)
                self._waits_in = None
                self._turn.notify_all()

    def _perform(self, effect: WorkerEffect) -> Any:
        match effect:
            case Attach():
                return self.attach()
            case Report(message=message, when_written=True) if self.writer is not None:
                return self.writer.then(lambda: self.send(message))
            case Report(message=message):
                self._note_omitted(message)
                return self.send(message)
            case Listen():
                return self._listen()
            case Disconnect():
                return self._forget()
            case Release(keep=keep):
                return self.copier.release(keep)
            case Load(plan=plan, state=state):
                return self._load(plan, state)
        if self._newest > self.protocol.generation:
            raise StaleGeneration(self.protocol.generation, self._newest if self._newest < FOREVER else None)
        match effect:
            case Build(generation=generation, groups=groups, neighbours=neighbours, step=step):
                return self.transport.build(generation, groups, neighbours, step=step, expected=self._expected())
            case Run():
                return self._run(effect)
            case Take(receive=receive, step=step):
                return self._take(receive, step)
            case Give(send=send, step=step, value=value):
                return self.transport.send(self._key(send, step), send.peer, value)
            case Expect(receives=receives):
                return self._expect(receives)
            case StartReduce(reduction=reduction, step=step, value=value):
                key = SumKey(self.protocol.generation, step, reduction)
                self._reducing[reduction] = self.transport.all_reduce(key, value)
                return None
            case PollReduce(reduction=reduction):
                return self._wait(self._reducing.pop(reduction)) if self._reducing[reduction].ready else None
            case FinishReduce(reduction=reduction):
                return self._wait(self._reducing.pop(reduction))
            case Reach(point=point, step=step):
                return self.injector.reach(point, step)
            case Ready():
                return None if self._prepared is None else self._prepared.plan
            case Boundary():
                return self._go_over()
            case Drain():
                return self.transport.drain()
            case Serve(generation=generation, step=step, target=target, snapshots=snapshots):
                return self.copier.serve(generation, step, target, snapshots)
            case Fetch(generation=generation, holders=holders):
                return self.copier.fetch(generation, holders)
            case Fetched(wait=wait):
                return self.copier.fetched(self.protocol.generation, WRITING_S if wait else 0.0)
            case Pin(generation=generation, step=step, layers=layers):
                return self._pin(generation, step, layers)
            case Written():
                return self._await_writer()
            case Committed():
                return self._committed(effect)
        raise InternalError(f"unknown effect {effect!r}")

    def _expected(self) -> Expected:
        assert self.protocol.program is not None, "who connects has a program"
        return Expected.of(self.protocol.program, self.spec_of, self.protocol.stage.message_bytes)

    def _note_omitted(self, message: Message) -> None:
        """Logs that a step, which was logged as updated ahead of its verdict, was omitted after all."""
        if isinstance(message, StepDone) and message.omitted and message.step not in self._omitted:
            event = StepOmitted(worker=str(message.worker), generation=message.generation, step=message.step)
            self.log.write(time.monotonic(), event)

    def _listen(self) -> Command:
        """The next command that is not of an older generation."""
        while True:
            command = self._commands.get()
            if getattr(command, "generation", FOREVER) >= min(self._newest, FOREVER):
                if isinstance(command, Install):
                    self._set_order(command)
                return command

    def _forget(self) -> None:
        self._upcoming.clear()
        self._posted.clear()
        self._reducing.clear()
        self._spans.clear()
        self._besides.clear()

    def _expect(self, receives: tuple[tuple[Receive, int], ...]) -> None:
        self._upcoming.extend(receives)
        self._post()

    def _post(self) -> None:
        while self._upcoming and len(self._posted) < LOOKAHEAD:
            receive, step = self._upcoming.popleft()
            key, spec = self._key(receive, step), self.spec_of(receive)
            self._posted[receive, step] = self.transport.receive(key, receive.peer, spec)

    def _take(self, receive: Receive, step: int) -> torch.Tensor:
        handle = self._posted.pop((receive, step))
        self._post()  # before the wait: whatever comes after it holds up what the value is for
        return self._wait(handle)

    def _key(self, message: Send | Receive, step: int) -> MessageKey:
        return MessageKey.of(message, self.protocol.generation, step)

    def _run(self, run: Run) -> Any:
        op, step, number = run.op, run.step, run.op.microbatch.number
        self.pace.compute()
        start = time.monotonic()
        if op.kind is OpKind.F:
            result = self.stage.forward(step, number, run.value, run.layers)
        else:
            result = self.stage.backward(op.kind, step, number, run.value, run.layers)
        self.injector.slow_down(step, time.monotonic() - start)
        add_span(self._spans, op, start, time.monotonic())
        return result

    def _go_over(self) -> Install:
        """The order that all were found to be ready for."""
        install, self._prepared = self._prepared, None
        if install is None:  # a newer generation came in between
            raise StaleGeneration(self.protocol.generation)
        self._set_order(install)
        return install

    def _load(self, plan: Plan, state: StateAt | None) -> Engine:
        self.pace.cool_down()
        parts = self.rebuild(plan, state)
        if state is None:
            parts.stage.inherit(self.stage)
        self.stage, self.spec_of = parts.stage, parts.spec_of
        return parts.stage

    def _set_order(self, install: Install) -> None:
        plan = install.plan
        if plan is not None and self.protocol.worker in plan.workers:
            self._order = plan.orders.of(self.protocol.worker)

    def _pin(self, generation: int, step: int, layers: tuple[int, ...]) -> None:
        assert self.writer is not None, "no checkpoint is pinned in a job that makes none"
        waited_s = self.writer.pin(generation, step, layers, self.stage.snapshot)
        self.log.write(time.monotonic(), Pinned(worker=str(self.protocol.worker), step=step, seconds=waited_s))

    def _await_writer(self) -> None:
        """Waits for the writer; that it is still at work counts as moving along.

        Raises:
            StaleGeneration: superseded; what was pinned is written all the same.
        """
        assert self.writer is not None, "nothing is pinned in a job that makes no checkpoints"
        written = threading.Event()
        self.writer.then(written.set)
        while not written.wait(WRITING_S):
            if self._newest > self.protocol.generation:
                raise StaleGeneration(self.protocol.generation)
            self.pace.move(waiting=True)

    def _committed(self, committed: Committed) -> None:
        """Logs the step; what was run must be what the plan ordered."""
        if not self.pace.warm:
            self.pace.warm_up()
            self.beat()  # so that whoever stops right now is judged by what it needs when warm
        if committed.ops != self._order:
            raise InternalError(
                f"worker {self.protocol.worker} ran {' '.join(map(str, committed.ops))} in step {committed.step}, "
                f"its order is {' '.join(map(str, self._order))}"
            )
        loss, omitted = mean_loss(self.stage), self.stage.omitted
        before, self._sent = self._sent, self.transport.sent or Sent()
        sent = self._sent.since(before)
        self._omitted = {committed.step} if omitted else set()
        event = StepOps(
            worker=str(self.protocol.worker),
            generation=self.protocol.generation,
            step=committed.step,
            loss=loss,
            omitted=omitted,
            ops=tuple(self._spans),
            besides=tuple(self._besides.spans),
            memory=resident_bytes(),
            sent_messages=sent.messages,
            sent_sums=sent.sums,
            knows_loss=loss is not None,
        )
        self.log.write(time.monotonic(), event)
        self._spans.clear()
        self._besides.clear()
