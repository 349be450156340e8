"""A worker's process of a simulated job: the real driver, over ports that let virtual time pass instead of waiting."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable
from functools import partial

from holdfast.control.detection import PATIENCE
from holdfast.control.membership import Closed
from holdfast.control.messages import Command, Failure, Leaving, Message, StateAt
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Receive
from holdfast.core.nodes import Process
from holdfast.core.plan import Plan
from holdfast.core.tensorspec import TensorSpec
from holdfast.core.work import WorkPhase
from holdfast.errors import ClusterError, StorageError, WorkFailed
from holdfast.protocol.effects import Evaluate, WorkerEffect
from holdfast.protocol.executor import Run
from holdfast.protocol.progress_monitor import ProgressMonitor
from holdfast.protocol.stopping import ends_job
from holdfast.protocol.worker import Engine, WorkerProtocol
from holdfast.runtime.driver import Call, Driver, SpecOf
from holdfast.runtime.engine.emulated import EmulatedStage
from holdfast.runtime.injection.worker import WorkerInjector
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.testing.raising import RaisingStage
from holdfast.testing.virtual_logs import VirtualLogs
from holdfast.testing.virtual_means import VirtualMeans
from holdfast.testing.virtual_state import VirtualCopier, VirtualWriter
from holdfast.testing.virtual_time import Sleep
from holdfast.testing.virtual_transport import VirtualTransport
from holdfast.testing.world import World, WouldBlock

__all__ = ["HANG_S", "VirtualWorker"]

HANG_S = 2.0
BEAT_S = 0.25
_ANYTHING = TensorSpec(shape=(), dtype="int64")


class VirtualWorker:
    """One process of a worker.

    Args:
        worker: which.
        process: which one of it this is.
        faults: that are to strike this process.
        dies_at: when it yields this effect; None: never.
        world: what it lives in.

    Attributes:
        process: which one of the worker it is.
        alive: whether it has not ended.
        effects: how many its protocol has yielded.
        effect: the newest of them: what it does, or waits for.
    """

    def __init__(
        self, worker: WorkerId, process: Process, faults: tuple[Fault, ...], dies_at: int | None, world: World
    ) -> None:
        self.worker, self.process = worker, process
        self.alive = True
        self.effects = 0
        self.effect: WorkerEffect | None = None
        self.asleep = Sleep(world.time, world.log.fire_once)
        self._world = world
        self._dies_at = dies_at
        self._raises_at = dict(world.scenario.raise_at_effect).get(worker)
        self._stopped = self._attaches = False
        self._busy_until = self._called_at = 0.0
        self._on_end: Callable[[int], None] = lambda status: None
        self._transport = VirtualTransport(self, world)
        self._writer = VirtualWriter(self, world, lambda point, step: self.driver.on_point(point, step))
        self.driver = Driver(
            protocol=self._protocol(process),
            transport=self._transport,
            meet=lambda peers: None,
            exchange=RelayExchange(worker, self.say),
            commands=_Commands(),
            attach=self._attach,
            send=self.say,
            log=world.log,
            clock=self._clock,
            spec_of=_spec_of,
            copier=VirtualCopier(self, world),
            rebuild=self._rebuild,
            expelled=lambda reason: self.kill(),
            monitor=ProgressMonitor(self.asleep.awake_s, PATIENCE * HANG_S, lambda: world.time.now),
            writer=self._writer,
            logs=VirtualLogs(self, world) if world.scenario.logs else None,
            memory=lambda: 0,
            on_effect=self._on_effect,
        )
        if faults:
            means = VirtualMeans(self, world)
            WorkerInjector(worker=worker, faults=faults, means=means, send=self.say).put_around(self.driver)
        self._calls = self.driver.run()
        self._call: Call | None = None

    def _protocol(self, process: Process) -> WorkerProtocol:
        scenario = self._world.scenario
        return WorkerProtocol(
            worker=self.worker,
            stage=self._stage_for(scenario.plan),
            rules=self._world.rules,
            process=process,
        )

    @property
    def goes(self) -> bool:
        """Whether it is there and does something."""
        return self.alive and not self._stopped

    # Its compute engine, which raises as scheduled and writes no files.

    def _stage_for(self, plan: Plan) -> Engine:
        """A stage for the worker's place in a plan."""
        world, scenario = self._world, self._world.scenario
        return RaisingStage(  # type: ignore[return-value]
            self._emulated(plan) if scenario.stage is None else scenario.stage(self.worker, plan),
            self.worker,
            [each for each in scenario.raises if not (each.once and str(each) in world.log.fired)],
            fired=lambda each: world.log.fire(str(each)),
            took_time=self._compute,
            saved=self._saved,
        )

    def _emulated(self, plan: Plan) -> Engine:
        placement, rates = plan.placement, self._world.scenario.rates
        return EmulatedStage(
            layers=placement.layers_of(self.worker),
            num_layers=placement.num_layers,
            num_microbatches=len(self._world.scenario.plan.routes.microbatches),
            profile=None if rates is None else rates.profile,
            clock=self._clock,
            sleep=self.sleep,
            scaled=self._world.scenario.scaled,
        )

    def _compute(self) -> None:
        """An operation takes as long as its engine says, or as is drawn when its last part is run."""
        ends = isinstance(self.effect, Evaluate) or (isinstance(self.effect, Run) and self.effect.last)
        if self._world.scenario.rates is None and ends:
            self.sleep(self._world.time.draw(self._world.scenario.delays.compute))

    def _saved(self, layer: int, digest: str | None) -> None:
        rates = self._world.scenario.rates
        if rates is not None:
            self.sleep(rates.saving_s((layer,)))
        self._world.saved[layer] = digest

    def _rebuild(self, plan: Plan, state: StateAt | None) -> tuple[Engine, SpecOf]:
        """A new stage for the worker's place in a plan, with what was pinned for a checkpoint."""
        stage, rates = self._stage_for(plan), self._world.scenario.rates
        layers = plan.placement.layers_of(self.worker)
        if state is not None and rates is not None:
            self.sleep(rates.loading_s(layers))
        if state is not None and state.url is not None:
            for layer in layers:
                stage.restore(layer, self._world.stored[state.step, layer])
        return stage, _spec_of

    # What the process as a whole does.

    def attend(self, on_end: Callable[[int], None]) -> None:
        """From now on, whenever it has ended, ``on_end`` is told how, once that is found."""
        self._on_end = on_end

    def begin(self) -> None:
        """Its first instruction."""
        if self.alive and not self.asleep.puts_off(self.begin):
            self._call = lambda: None
            self.look()
            self._beat()

    def _beat(self) -> None:
        """Tells of progress, as long as the process lives."""
        if self.goes and not self.asleep.puts_off(self._beat):
            self.driver.beat()
            self._world.time.after(BEAT_S, self._beat)

    def say(self, message: Message) -> None:
        """Tells the coordinator."""
        self._world.links.say(self.process, message)

    def reattach(self) -> None:
        """Connects to the coordinator again, after a while, if it was connected."""
        if self._attaches:
            self._world.after(self._world.scenario.delays.reattach, self._attach)

    def _attach(self) -> None:
        self._attaches = True
        if self.goes:
            self._world.links.open(self.process, self.driver.hello())

    def deliver(self, command: Command) -> None:
        """A command arrives. What comes to a stopped process waits for ever, as it never wakes here."""
        if self.goes and not self.asleep.puts_off(lambda: self.deliver(command)):
            self.driver.on_command(command)
            self.look()

    def stop(self) -> None:
        """Nothing is heard of it any more, and it does nothing."""
        self._stopped, self._call = True, None

    def leave(self) -> None:
        """It is told to go: at once, if it was in no generation yet."""
        protocol = self.driver.protocol
        if self.alive and protocol.generation == 0 and protocol.stage.layers:
            self._end(128 + signal.SIGTERM)
        elif self.alive:
            self.driver.leaving = True
            self.say(Leaving(worker=self.worker))

    def kill(self) -> None:
        """Its last instruction is over; its peers see their connections close, sooner or later than the coordinator."""
        if self.alive:
            generation = self.driver.protocol.generation
            self._end(-signal.SIGKILL)
            self._world.after(self._world.scenario.delays.detect, lambda: self._be_missed(generation))

    def _be_missed(self, generation: int) -> None:
        for peer in self._world.running.values():
            peer.see_gone(self.worker, generation)

    def _end(self, status: int) -> None:
        self.alive, self._call = False, None
        self._world.links.hang_up(self.process, Closed(worker=self.worker, process=self.process))
        self._world.after(self._world.scenario.delays.detect, lambda: self._on_end(status))

    def see_gone(self, dead: WorkerId, generation: int) -> None:
        """Whoever waits for a process that is gone sees its connection close."""
        if not self.asleep.puts_off(lambda: self.see_gone(dead, generation)):
            self._transport.lose(dead, generation)
            self.look()

    def make_no_call(self) -> None:
        """Its driver does nothing any more."""
        self._call = None

    def stand_still(self) -> None:
        """The thread that is at work does nothing any more; the process beats on."""
        if self._writer.writing:
            self._writer.stalled = True
        else:
            self.make_no_call()

    def sleep(self, seconds: float) -> None:
        """Nothing else is done until then."""
        self._busy_until = self._clock() + seconds
        self._world.time.at(self._busy_until, self.look)

    # How the driver goes on.

    def _clock(self) -> float:
        """Where it is in time: what it does takes as long as it has slept meanwhile."""
        return max(self._world.time.now, self._busy_until)

    def look(self) -> None:
        """Makes the driver's calls, until one of them has to wait."""
        if self._call is None or self.asleep.puts_off(self.look):
            return
        while self._call is not None and self._world.time.now >= self._busy_until:
            try:
                result = self._call()
            except WouldBlock:
                return
            except (ClusterError, StorageError, WorkFailed) as error:
                self._go_on(partial(self._calls.throw, error))
            else:
                self._go_on(partial(self._calls.send, result))

    def _go_on(self, following: Callable[[], Call]) -> None:
        """Lets the driver go on to its next call, unless the last one has stopped it."""
        if self._call is None:
            return
        self._called_at = self._world.time.now
        try:
            self._call = following()
        except StopIteration:
            self._end(0)
        except Exception as problem:
            if ends_job(problem):
                raise
            self.say(Failure(worker=self.worker, process=self.process, error=str(problem), user_fault=False))
            self._end(1)

    def has_waited_less(self, limit_s: float) -> bool:
        """Whether the call that is made has been waited for less than that; if so, it is made again then."""
        until = self._called_at + limit_s
        if self._world.time.now >= until:
            return False
        self._world.time.at(until, self.look)
        return True

    def _on_effect(self, effect: WorkerEffect) -> None:
        """Strikes, if it is time."""
        self.effect = effect
        self.effects += 1
        if self._raises_at == self.effects:
            self._world.log.fire(f"raise:{self.worker}#{self.effects}")
            raise WorkFailed(WorkPhase.OTHER, RuntimeError("it cannot go on"))
        if self._dies_at == self.effects:
            self._world.log.fire(f"kill:{self.worker}#{self.effects}")
            self.kill()


class _Commands(queue.SimpleQueue[Command]):
    """The queue of what the coordinator commands, for whoever does not wait."""

    def get(self, block: bool = True, timeout: float | None = None) -> Command:
        try:
            return super().get(block=False)
        except queue.Empty:
            raise WouldBlock from None


def _spec_of(receive: Receive) -> TensorSpec:
    """Nobody asks here how large a message is."""
    return _ANYTHING
