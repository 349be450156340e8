"""A worker's process of a simulated job: the real protocol; its driver lets virtual time pass instead of waiting."""

from __future__ import annotations

import hashlib
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_struct

from holdfast.control.detection import PATIENCE
from holdfast.control.membership import Closed
from holdfast.control.messages import (
    Blob,
    Command,
    Expel,
    Failure,
    Install,
    Leaving,
    Message,
    ShardWritten,
    Shutdown,
    StateAt,
)
from holdfast.core.faults import Fault, Point
from holdfast.core.ids import WorkerId
from holdfast.core.lower import Payload
from holdfast.core.plan import Plan
from holdfast.core.schedule import Op, OpKind
from holdfast.errors import ClusterError, InternalError, PeerLost, StaleGeneration, WorkFailed
from holdfast.protocol.besides import add_span
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
    Serve,
    WorkerProtocol,
    Written,
)
from holdfast.runtime.engine.emulated import EmulatedStage
from holdfast.runtime.injection import WorkerInjector
from holdfast.runtime.transport.port import MessageKey
from holdfast.storage.checkpoints import Shard
from holdfast.telemetry.events import Event, StepOps
from holdfast.testing.mail import Mail
from holdfast.testing.raising import RaisingStage
from holdfast.testing.scenario import Scenario, VirtualPin
from holdfast.testing.virtual_links import ControlLinks
from holdfast.testing.virtual_log import VirtualLog
from holdfast.testing.virtual_time import Sleep, VirtualTime

__all__ = ["HANG_S", "VirtualWorker", "World"]

HANG_S = 2.0
BEAT_S = 0.25
_AGAIN_S = 0.1
"""How soon state is asked for again that nobody gives yet."""


@dataclass(slots=True, kw_only=True)
class World:
    """What the processes of a simulated job have in common.

    Attributes:
        scenario: the job.
        time: that passes.
        links: to the coordinator.
        log: what happened.
        order_of: what a worker is to run in a step of a generation; None if that is not known.
        running: the newest process of each worker.
        mail: what is on its way between workers.
        served: in a generation, to a worker, by another: each layer's state.
        stored: what was pinned of a layer for a step.
        pinned: all that was, in order.
        saved: the digest of each layer that was saved at the end.
        copies_broken: how often each worker was to get state and got none.
    """

    scenario: Scenario
    time: VirtualTime
    links: ControlLinks
    log: VirtualLog
    order_of: Callable[[WorkerId, int], tuple[Op, ...] | None]
    running: dict[WorkerId, VirtualWorker] = field(default_factory=dict)
    mail: Mail[Any] = field(default_factory=lambda: Mail(copy=_copied))
    served: dict[tuple[int, WorkerId], dict[WorkerId, dict[int, bytes]]] = field(default_factory=dict)
    stored: dict[tuple[int, int], bytes] = field(default_factory=dict)
    pinned: list[VirtualPin] = field(default_factory=list)
    saved: dict[int, str | None] = field(default_factory=dict)
    copies_broken: Counter[WorkerId] = field(default_factory=Counter)

    def after(self, limits: tuple[float, float], act: Callable[[], None], channel: object = None) -> None:
        """Lets something happen after a delay between these limits."""
        self.time.after(self.time.draw(limits), act, channel)

    def breaks_copy(self, worker: WorkerId) -> bool:
        """Whether a worker that was to get state gets none."""
        if self.copies_broken[worker] >= dict(self.scenario.broken_copies).get(worker, 0):
            return False
        self.copies_broken[worker] += 1
        self.log.fire_once(f"break-copy:{worker}")
        return True

    def living(self, worker: WorkerId) -> bool:
        """Whether a worker's process is there and does something."""
        return self.running[worker].goes

    def wake(self, workers: Iterable[WorkerId]) -> None:
        """Lets these look whether what they wait for is there."""
        for worker in sorted(workers):
            self.running[worker].look()


class VirtualWorker:
    """One process of a worker.

    Args:
        worker: which.
        pid: of the process.
        faults: that are to strike this process.
        dies_at: when it yields this effect; None: never.
        world: what it lives in.
    """

    def __init__(
        self, worker: WorkerId, pid: int, faults: tuple[Fault, ...], dies_at: int | None, world: World
    ) -> None:
        scenario = world.scenario
        self.worker = worker
        self.alive = True
        self.stopped = self.stalled = False
        self.effects = 0
        self.ready: Callable[[], Any] | None = None
        self.waiting: Any = None
        self.asleep = Sleep(world.time, world.log.fire_once)
        self._world = world
        self._dies_at = dies_at
        self._raises_at = dict(scenario.raise_at_effect).get(worker)
        self._owed_s = 0.0
        self._newest = 0
        self._prepared: Install | None = None
        self._fetched: dict[int, bytes] | PeerLost | None = None
        self._attaches = self._leaving = False
        self._writing = self._writer_stalled = False
        self._commands: deque[Command] = deque()
        self._spans: list[tuple[str, int, int, float, float]] = []
        self._on_end: Callable[[int], None] = lambda status: None
        self._pace = Pace(self.asleep.awake_s, PATIENCE * HANG_S, lambda: world.time.now)
        self._injector = WorkerInjector(worker=worker, faults=faults, means=self, send=self._say)
        self.protocol = WorkerProtocol(
            worker=worker,
            stage=self._raising(self._stage_for(scenario.plan)),
            steps=scenario.steps,
            ties=scenario.ties,
            pid=pid,
            checkpoint_every=scenario.checkpoint_every,
            synchronous=scenario.synchronous,
            snapshots=Snapshots(every=scenario.snapshot_every),
        )
        self._script = self.protocol.run()

    @property
    def goes(self) -> bool:
        """Whether it is there and does something."""
        return self.alive and not self.stopped

    def _stage_for(self, plan: Plan) -> Engine:
        """A stage for the worker's place in a plan."""
        placement, scenario = plan.placement, self._world.scenario
        if scenario.stage is not None:
            return scenario.stage(self.worker, plan)
        return EmulatedStage(
            layers=placement.layers_of(self.worker),
            num_layers=placement.num_layers,
            num_microbatches=len(scenario.plan.routes.microbatches),
            profile=None if scenario.rates is None else scenario.rates.profile,
            clock=lambda: self._world.time.now + self._owed_s,
            sleep=self.sleep,
            scaled=scenario.scaled,
        )

    def _raising(self, stage: Engine) -> Engine:
        """A stage that raises as scheduled and writes no files."""
        world, raises, rates = self._world, self._world.scenario.raises, self._world.scenario.rates

        def saved(layer: int, digest: str | None) -> None:
            if rates is not None:
                self.sleep(rates.saving_s((layer,)))
            world.saved[layer] = digest

        return RaisingStage(  # type: ignore[return-value]
            stage,
            self.worker,
            [each for each in raises if not (each.once and str(each) in world.log.fired)],
            fired=lambda each: world.log.fire(str(each)),
            saved=saved,
        )

    # What the process as a whole does.

    def attend(self, on_end: Callable[[int], None]) -> None:
        """From now on, whenever it has ended, ``on_end`` is told how, once that is found."""
        self._on_end = on_end

    def begin(self) -> None:
        """Its first instruction."""
        if self.alive and not self.asleep.puts_off(self.begin):
            self._resume()
            self._beat()

    def _beat(self) -> None:
        """Tells of progress, as long as the process lives."""
        if not self.goes or self.asleep.puts_off(self._beat):
            return
        if self.protocol.generation > 0 or not self.protocol.stage.layers:
            self._say(heartbeat(self.protocol, self._pace))
        self._world.time.after(BEAT_S, self._beat)

    def _say(self, message: Message) -> None:
        self._world.links.say(self.protocol.pid, message)

    def reattach(self) -> None:
        """Connects to the coordinator again, after a while, if it was connected."""
        if self._attaches:
            self._world.after(self._world.scenario.delays.reattach, self._attach)

    def _attach(self) -> None:
        if self.goes:
            hello = self.protocol.hello(
                self._newest, self._prepared, leaving=self._leaving, strikes=self._injector.asked
            )
            self._world.links.open(self.protocol.pid, hello)

    def deliver(self, command: Command) -> None:
        """A command arrives. What comes to a stopped process waits for ever, as it never wakes here."""
        if not self.goes or isinstance(command, Blob) or self.asleep.puts_off(lambda: self.deliver(command)):
            return None
        if isinstance(command, Expel):
            return self.kill()
        if isinstance(command, Install) and command.at_boundary:
            self._prepared = command
            return None
        if isinstance(command, Install):
            self._newest, self._prepared = command.generation, None
        if isinstance(command, Shutdown):
            self._newest = 2**62
        self._commands.append(command)
        if isinstance(self.waiting, Listen):
            return self._resume(self._next_command)
        if self._newest > self.protocol.generation and isinstance(self.waiting, Take | FinishReduce | Build | Written):
            self._throw(StaleGeneration(self.protocol.generation))
        return None

    def kill(self) -> None:
        """Its last instruction is over; its peers see their connections close, sooner or later than the coordinator."""
        if not self.alive:
            return
        generation, detect = self.protocol.generation, self._world.scenario.delays.detect
        self._end(-signal.SIGKILL)
        self._world.after(detect, lambda: self._be_missed(generation))

    def _be_missed(self, generation: int) -> None:
        for peer in self._world.running.values():
            peer.see_gone(self.worker, generation)

    def _end(self, status: int) -> None:
        self.alive, self.ready, self.waiting = False, None, None
        self._world.links.hang_up(self.protocol.pid, Closed(worker=self.worker, pid=self.protocol.pid))
        self._world.after(self._world.scenario.delays.detect, lambda: self._on_end(status))

    def see_gone(self, dead: WorkerId, generation: int) -> None:
        """Whoever waits for a process that is gone sees its connection close."""
        if self.asleep.puts_off(lambda: self.see_gone(dead, generation)):
            return
        waits = self.ready is not None and dead in _peers(self.waiting)
        if self.alive and self.protocol.generation == generation and waits:
            self._throw(PeerLost(str(dead), generation))

    # How faults are carried out: see holdfast.runtime.injection.Means.

    def signal(self, number: int) -> None:
        """See Means."""
        if number == signal.SIGKILL:
            self.kill()
        elif number == signal.SIGSTOP:
            self.stopped = True
        else:
            self._leaving = True
            self._say(Leaving(worker=self.worker))

    def stand_still(self) -> None:
        """See Means: it beats on, unless it is cut off."""
        if self._writing:
            self._writer_stalled = True
        else:
            self.stalled = True

    def wait_until_cut(self) -> None:
        """See Means: the whole process is out of reach then."""
        self.stalled = True

    def sleep(self, seconds: float) -> None:
        """See Means; what is slept is owed, and passes before the next effect."""
        self._owed_s += seconds

    def note(self, event: Event) -> None:
        """See Means."""
        self._world.log.write(self._world.time.now, event)

    # What the protocol waits for.

    def _throw(self, error: Exception) -> None:
        if not self.stopped and not self.stalled:
            self.waiting, self.ready = None, None
            self._advance(lambda: self._script.throw(error))

    def look(self) -> None:
        """Looks whether what it waits for is there."""
        if not self.asleep.puts_off(self.look) and self.ready is not None:
            self._resume(self.ready)

    def _resume(self, value: Callable[[], Any] | None = None) -> None:
        """Goes on with what it was waiting for, if that is there."""
        if not self.goes:
            return
        given = value() if value else None
        if value is None or given is not None:
            self.waiting, self.ready = None, None
            self._advance(lambda: self._script.send(given))

    def _ask_again(self, effect: Fetched) -> None:
        """What it waits for is waited for a moment at a time."""
        if self.waiting is effect and not self.asleep.puts_off(lambda: self._ask_again(effect)):
            self._resume()

    def _next_command(self) -> Command | None:
        while self._commands:
            command = self._commands.popleft()
            if getattr(command, "generation", 2**62) >= self._newest:
                return command
        return None

    def _advance(self, step: Callable[[], Any]) -> None:
        """Lets the protocol go on until it waits for something."""
        while True:
            self._pace.move(waiting=False)
            try:
                effect = step()
            except StopIteration:
                self._end(0)
                return
            except Exception as problem:  # noqa: BLE001 - as the driver of a real worker does
                if not self._stop(problem):
                    return
                step = lambda: next(self._script)  # noqa: E731
                continue
            self._pace.move(waiting=isinstance(effect, WAITS))
            self.effects += 1
            if self._raises_at == self.effects:
                self._world.log.fire(f"raise:{self.worker}#{self.effects}")
                step = lambda: self._script.throw(RuntimeError("it cannot go on"))  # noqa: E731
                continue
            if self._dies_at == self.effects:
                self._world.log.fire(f"kill:{self.worker}#{self.effects}")
                self.kill()
                return
            if self._owed_s and not isinstance(effect, Run):  # an update took its time
                self._pay(lambda effect=effect: self._do(effect))  # type: ignore[misc]
                return
            following = self._try(effect)
            if following is None:
                return
            step = following

    def _do(self, effect: Any) -> None:
        """Performs an effect that had to wait, and goes on."""
        if self.goes and (step := self._try(effect)) is not None:
            self._advance(step)

    def _pay(self, act: Callable[[], None]) -> None:
        owed_s, self._owed_s = self._owed_s, 0.0
        self._world.time.after(owed_s, act)

    def _try(self, effect: Any) -> Callable[[], Any] | None:
        """Performs an effect; returns how the protocol goes on, None if it has to wait."""
        try:
            done, result = self._perform(effect)
        except (ClusterError, WorkFailed) as error:
            return lambda e=error: self._script.throw(e)  # type: ignore[misc]
        return (lambda: self._script.send(result)) if done and self.goes else None

    def _stop(self, problem: Exception) -> bool:
        """An exception has come out of a protocol; returns whether that of a worker that has stopped follows."""
        if ends_job(problem):
            raise problem
        protocol = self.protocol
        if protocol.raised is None:
            self._script = protocol.stopped(problem)
            return True
        self._say(Failure(worker=self.worker, pid=protocol.pid, error=str(problem), user_fault=False))
        self._end(1)
        return False

    def _perform(self, effect: Any) -> tuple[bool, Any]:
        """Does what can be done at once; otherwise notes what is waited for."""
        protocol, world = self.protocol, self._world
        match effect:
            case Attach():
                self._attaches = True
                self._attach()
                return True, None
            case Report(message=message, when_written=when_written):
                if when_written:
                    self._later_written(lambda: self._say(message))
                else:
                    self._say(message)
                return True, None
            case Listen():
                command = self._next_command()
                self.waiting = None if command else effect
                return command is not None, command
            case Disconnect():
                self._spans.clear()
                return True, None
            case Release():
                return True, None
            case Load(plan=plan, state=state):
                self._pace.cool_down()
                return True, self._load(plan, state)
        if self._newest > protocol.generation:
            raise StaleGeneration(protocol.generation)
        match effect:
            case Run():
                self._pace.compute()
                self._compute(effect)
                return False, None
            case Give(send=send, value=value, step=step):
                self._send(MessageKey.of(send, protocol.generation, step), send.peer, _copied(value))
                return True, None
            case StartReduce(reduction=reduction, value=value, step=step):
                self._contribute((protocol.generation, step, reduction), _copied(value))
                return True, None
            case PollReduce(reduction=reduction, step=step):
                return True, self._world.mail.total((protocol.generation, step, reduction), reduction.workers)
            case Pin(generation=generation, step=step, layers=layers):
                self._pin(generation, step, layers)
                return True, None
            case Written():
                self.waiting = effect
                self._later_written(lambda: self._resume() if self.waiting is effect else None)
                return False, None
            case Reach(point=point, step=step):
                self._injector.reach(point, step)
                return not self.stalled, None
            case Committed(step=step, ops=ops):
                self._commit(step, ops)
                return True, None
            case Expect() | Drain():
                return True, None
            case Ready():
                return True, None if self._prepared is None else self._prepared.plan
            case Boundary():
                return True, self._go_over()
            case Serve(generation=generation, target=target, snapshots=snapshots):
                made = {layer: encode() for layer, encode in snapshots.items()}
                world.served.setdefault((generation, target), {})[self.worker] = made
                return True, None
            case Fetch(holders=holders):
                self._fetched = None
                self._fetch(protocol.generation, dict(holders))
                return True, None
            case Fetched(wait=wait):
                if isinstance(self._fetched, PeerLost):
                    raise self._fetched
                if not wait or self._fetched is not None:
                    return True, self._fetched
                self.waiting = effect
                world.time.after(_AGAIN_S, lambda: self._ask_again(effect))
                return False, None
        return self._wait(effect)

    def _go_over(self) -> Install:
        install, self._prepared = self._prepared, None
        if install is None:
            raise StaleGeneration(self.protocol.generation)
        return install

    def _fetch(self, generation: int, holders: dict[int, tuple[WorkerId, ...]]) -> None:
        """Copies when every layer has a living holder that serves it; all its holders must serve the same bits."""
        world = self._world

        def attempt() -> None:
            if not self.alive or self.protocol.generation != generation:
                return
            if world.breaks_copy(self.worker):
                self._fetched = PeerLost("", generation, "nobody gives it the state of its layers")
                return
            served = world.served.get((generation, self.worker), {})
            states = {}
            for layer, sources in holders.items():
                found = {served[source][layer] for source in sources if source in served and world.living(source)}
                if len(found) > 1:
                    raise InternalError(f"holders of layer {layer} serve different bits")
                if not found:
                    world.time.after(_AGAIN_S, attempt)
                    return
                (states[layer],) = found
            self._fetched = states

        rates = world.scenario.rates
        copying_s = rates.copying_s(holders) if rates is not None and holders else 0.0
        world.time.after(world.time.draw(world.scenario.delays.copy) + copying_s, attempt)

    def _later_written(self, act: Callable[[], None]) -> None:
        """Lets the writer do something, after all that it has to do before; not if the worker dies first."""

        def write() -> None:
            if self.alive and not self._writer_stalled and not self.asleep.puts_off(write):
                act()

        self._world.after(self._world.scenario.delays.store, write, channel=("writer", self.protocol.pid))

    def _pin(self, generation: int, step: int, layers: tuple[int, ...]) -> None:
        world, at = self._world, self._world.time.now
        for index, layer in enumerate(layers):
            world.pinned.append(VirtualPin(worker=self.worker, generation=generation, step=step, layer=layer))
            data = self.protocol.stage.snapshot(layer)()
            world.stored[step, layer] = data
            digest = hashlib.sha256(data).hexdigest()
            name = f"layer-{layer:04d}-{digest[:16]}.safetensors"
            shard = Shard(layer=layer, name=name, sha256=digest, size=len(data))
            written = ShardWritten(worker=self.worker, generation=generation, step=step, shard=shard)
            self._later_written(lambda i=index, w=written: self._write_shard(i, w, at))  # type: ignore[misc]

    def _write_shard(self, index: int, written: ShardWritten, pinned_at: float) -> None:
        if index == 0:
            self._writing = True
            self._injector.reach(Point.CHECKPOINT, written.step)
            self._writing = False
        if self.alive and not self._writer_stalled:
            self._say(replace_struct(written, write_s=self._world.time.now - pinned_at))

    def _load(self, plan: Plan, state: StateAt | None) -> Engine:
        """A new stage for the worker's place in a plan, with what was pinned for a checkpoint."""
        stage = self._stage_for(plan)
        layers, rates = plan.placement.layers_of(self.worker), self._world.scenario.rates
        if state is None:
            stage.inherit(self.protocol.stage)
            return self._raising(stage)
        if rates is not None:
            self.sleep(rates.loading_s(layers))
        if state.url is not None:
            for layer in layers:
                stage.restore(layer, self._world.stored[state.step, layer])
        return self._raising(stage)

    def _wait(self, effect: Take | FinishReduce | Build) -> tuple[bool, Any]:
        generation, world = self.protocol.generation, self._world
        ready: Callable[[], Any]
        match effect:
            case Take(receive=receive, step=step):
                key = MessageKey.of(receive, generation, step)
                ready = lambda: world.mail.collect(key, receive.peer, self.worker)  # noqa: E731
            case FinishReduce(reduction=reduction, step=step):
                name = (generation, step, reduction)
                ready = lambda: world.mail.total(name, reduction.workers)  # noqa: E731
            case Build(generation=generation, groups=groups):
                ready = lambda: world.mail.complete(generation, groups, self.worker) or None  # noqa: E731
                world.after(world.scenario.delays.connect, lambda: self._arrive(generation, groups))
                self.waiting, self.ready = effect, ready
                return False, None
        found = ready()
        if found is None:
            self.waiting, self.ready = effect, ready
        return found is not None, found

    def _arrive(self, generation: int, groups: tuple[tuple[WorkerId, ...], ...]) -> None:
        if not self.goes or self.asleep.puts_off(lambda: self._arrive(generation, groups)):
            return
        self._world.mail.join(generation, groups, self.worker)
        self._world.wake({peer for group in groups if self.worker in group for peer in group} | {self.worker})

    def _compute(self, run: Run) -> None:
        stage, microbatch = self.protocol.stage, run.op.microbatch
        start = self._world.time.now + self._owed_s  # an update before it takes its own time
        owed_s = self._owed_s
        if run.op.kind is OpKind.F:
            result = stage.forward(run.step, microbatch.number, run.value, run.layers)
        else:
            result = stage.backward(run.op.kind, run.step, microbatch.number, run.value, run.layers)
        if self._world.scenario.rates is None and run.last:
            self.sleep(self._world.time.draw(self._world.scenario.delays.compute))
        self._injector.slow_down(run.step, self._owed_s - owed_s)
        self.waiting = run
        end = self._world.time.now + self._owed_s

        def finish() -> None:
            if not self.goes or self.asleep.puts_off(finish):
                return
            self.waiting = None
            if self._newest > self.protocol.generation:
                self._throw(StaleGeneration(self.protocol.generation))
                return
            add_span(self._spans, run.op, start, end)
            self._advance(lambda: self._script.send(result))

        self._pay(finish)

    def _send(self, key: MessageKey, peer: WorkerId, value: Any) -> None:
        world = self._world

        def arrive() -> None:
            world.mail.post(key, self.worker, peer, value)
            world.wake([peer])

        rates, tensor = world.scenario.rates, key.payload in (Payload.ACTIVATION, Payload.GRADIENT)
        if rates is None or not tensor:
            return world.after(world.scenario.delays.message, arrive)
        size = rates.profile.layers[key.boundary - 1].boundary_bytes
        return world.time.after(rates.profile.link.seconds_of(size), arrive)

    def _contribute(self, name: tuple[int, int, Any], value: Any) -> None:
        world = self._world

        def arrive() -> None:
            world.mail.contribute(name, self.worker, value)
            world.wake(name[2].workers)

        world.after(world.scenario.delays.message, arrive)

    def _commit(self, step: int, ops: tuple[Op, ...]) -> None:
        stepped = StepOps(
            worker=str(self.worker),
            generation=self.protocol.generation,
            step=step,
            loss=None,
            omitted=self.protocol.stage.omitted,
            ops=tuple(self._spans),
        )
        if not self._pace.warm:
            self._pace.warm_up()
        self.note(stepped)
        self._spans.clear()
        if self._world.order_of(self.worker, self.protocol.generation) not in (None, ops):
            raise InternalError(f"worker {self.worker} left its order in step {step}")


def _copied(value: Any) -> Any:
    """Of an array, or of a tensor where an engine computes with these."""
    return value.copy() if isinstance(value, np.ndarray) else value.clone()


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
