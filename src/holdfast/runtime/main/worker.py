"""The process of one worker."""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast.control.awake import AwakeClock
from holdfast.control.client import ControlClient
from holdfast.control.detection import PATIENCE
from holdfast.control.messages import Dormant, Failure, Hello, Here, Leaving, Remark, Shutdown, StateAt
from holdfast.core.nodes import Process
from holdfast.core.plan import Plan
from holdfast.devices.device import HOST, Device
from holdfast.errors import (
    ConfigError,
    CoordinatorUnavailable,
    HoldfastError,
    StorageError,
)
from holdfast.planning.replays import Logging
from holdfast.protocol.progress_monitor import ProgressMonitor
from holdfast.protocol.stopping import LONGEST_TEXT
from holdfast.protocol.worker import Engine, WorkerProtocol
from holdfast.runtime.checkpointing import CheckpointWriter, load_states
from holdfast.runtime.compiling import watch_compiling
from holdfast.runtime.driver import Driver, SpecOf
from holdfast.runtime.engine.build import StageParts, build_stage, stage_options
from holdfast.runtime.engine.datasets import build_dataset, build_evaluated
from holdfast.runtime.engine.device_of import device_of
from holdfast.runtime.engine.model import Model
from holdfast.runtime.engine.modules import build_model
from holdfast.runtime.engine.probing import sources_of
from holdfast.runtime.engine.sharded.ranks import Ranks
from holdfast.runtime.engine.sharded.stage import Companion, ShardedStage
from holdfast.runtime.main.answering import AnsweringThread
from holdfast.runtime.main.companions import Companions, fork_companions
from holdfast.runtime.main.driving import drive
from holdfast.runtime.specs import ResumeFrom, WorkerSpec, check_sources
from holdfast.runtime.tensor_logs import TensorLogs
from holdfast.runtime.transport.copying import StateCopier
from holdfast.runtime.transport.delayed import DelayedTransport
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.runtime.transport.links.transport import LinkTransport
from holdfast.runtime.transport.port import MessageKey, Transport
from holdfast.runtime.transport.staged import StagedTransport
from holdfast.storage.blobs import open_store
from holdfast.storage.checkpoints import Checkpoints
from holdfast.storage.tensorlog.records import LogOf
from holdfast.telemetry.events import (
    EventLog,
    Notice,
    WorkerReady,
)

if TYPE_CHECKING:
    from holdfast.runtime.transport.links.carrier import Carrying

__all__ = ["WorkerProcess", "load_layers", "run_worker"]

_TELL_S = 10.0
_RESTS = {signal.SIGUSR1: True, signal.SIGUSR2: False}
_SAME_S = 2.0
"""Within so many seconds of a companion's exception, one of the worker itself is the same one."""
_ASK_AGAIN_S = (0.5, 2.0, 5.0)
"""The pauses before a checkpoint that could not be read at the start is read again."""


def run_worker(spec: WorkerSpec) -> None:
    """Runs one worker to its end; exits with 0 after an orderly shutdown."""
    torch.set_num_threads(1)
    gpus = 1 if spec.emulate is not None else spec.job.gpus_of(spec.worker)
    companions = fork_companions(gpus, partial(_accompany, spec)) if gpus > 1 else None  # before there is any thread
    WorkerProcess(spec, companions).run()


def _accompany(spec: WorkerSpec, ranks: Ranks) -> None:
    """Runs the companion of a worker; ends with the process, or with an exception."""
    data = cache(lambda: build_dataset(spec.job))

    def make(number: int, owned: tuple[int, ...]) -> ShardedStage:
        options = stage_options(spec.job, build_model(spec.job, data), owned, spec.boundaries, spec.item, data)
        return _sharded(ranks, number, spec.job.grid.microbatch_size, **options)

    Companion(ranks, make).follow()


def _sharded(ranks: Ranks, number: int, samples: int, **options: Any) -> ShardedStage:
    return ShardedStage(ranks=ranks, number=number, samples=samples, **options)


class WorkerProcess:
    """One worker's process, from its beginning to its end."""

    def __init__(self, spec: WorkerSpec, companions: Companions | None) -> None:
        self._spec = spec
        self._process = Process(spec.node, os.getpid(), spec.nonce)
        self.device: Device = HOST
        self._companions = companions
        self._ranks: Ranks | None = None
        self._log = EventLog(spec.events, complain=self._complain)
        self._driver: Driver | None = None
        self._signals = AnsweringThread()
        self._dormant = False
        self._emulated_bytes: tuple[int, ...] = ()
        self._unused: Model | None = None
        self._data = cache(lambda: build_dataset(spec.job))
        self._evaluated = cache(lambda: build_evaluated(spec.job))
        self._here: Here | None = None
        self._awake = AwakeClock()
        self._monitor = ProgressMonitor(awake=self._awake, excused_s=PATIENCE * spec.job.control.hang_s)
        self._client = ControlClient(
            spec.address,
            spec.token,
            hello=self._hello,
            on_command=self._on_command,
            on_closed=self._on_closed,
            reattach_s=spec.job.control.reattach_s,
            clock=self._awake,
            tls=spec.job.control.tls,
            impatient=spec.job.control.coordinators > 1,
        )

    def run(self) -> None:
        """Lives, and ends the process."""
        for number, dormant in _RESTS.items():
            self._signals.answer(number, partial(self._rest, dormant))
        try:
            self._live()
        except ConfigError as error:
            self._fail(str(error), user_fault=True)
        except HoldfastError as error:
            self._fail(f"{type(error).__name__}: {error}", user_fault=False)
        except BaseException as error:  # noqa: BLE001 - a process main: whatever it is, it is reported
            self._fail(f"{type(error).__name__}: {error}", user_fault=False, trace=traceback.format_exc())
        os._exit(0)  # whatever thread still waits has nothing left to do

    def _fail(self, error: str, *, user_fault: bool, trace: str = "") -> None:
        text, trace = error[:LONGEST_TEXT], trace[-LONGEST_TEXT:]
        failure = Failure(
            worker=self._spec.worker, process=self._process, error=text, user_fault=user_fault, traceback=trace
        )
        self._client.close(drain_s=_TELL_S, last_words=failure)  # unheard, it would pass for a death, and strike again
        os._exit(1)

    def _live(self) -> None:
        if self._companions is not None:
            self._companions.watch(self._on_raised, self._on_ended)
            self._ranks = self._companions.meet()
        self._open_device()
        driver = self._begin()
        drive(driver)
        self._end(driver)

    def _open_device(self) -> None:
        """From now on this process computes on its device."""
        self.device = device_of(self._spec.device, exact=self._spec.job.train.numerics == "exact", alone=True)

    def _begin(self) -> Driver:
        """Makes all that takes part in steps; nothing of it runs yet."""
        spec = self._spec
        parts = self._build(spec.plan)
        self._check_code()
        if parts.unused is not None:
            self._data()  # a spare has the time, and will have none when it computes
        ends = {0, len(spec.boundaries) - 1}.intersection(parts.stage.layers)
        if spec.job.evaluate is not None and spec.emulate is None and (ends or parts.unused is not None):
            self._evaluated()
        if spec.resume is not None:
            _restore(parts.stage, spec.resume, load=self._load)
        self._driver = driver = self._make_driver(parts)
        driver.dormant = self._dormant
        self._monitor.compiles_unseen = not watch_compiling(self._monitor) and self._compiles
        gc.collect()
        gc.freeze()  # a collection in the middle of a recovery would cost more than the recovery
        ready = WorkerReady(worker=str(spec.worker), pid=os.getpid(), nonce=spec.nonce, node=spec.node.name)
        self._log.write(time.monotonic(), ready)
        threading.Thread(target=self._beat, args=(driver,), name="heartbeat", daemon=True).start()
        self._signals.answer(signal.SIGTERM, partial(self._leave, driver))
        return driver

    def _check_code(self) -> None:
        """The user's own code must be what was tried; raises ConfigError."""
        check_sources(self._spec.sources, sources_of(self._spec.job))

    def _tell_beside(self, step: int) -> bytes:
        """What a joiner is told beside the state of a step."""
        return b""

    def _learn_beside(self, told: bytes) -> None:
        """Takes what another worker's ``_tell_beside`` has told."""

    @property
    def _compiles(self) -> bool:
        """Whether the model is known to be compiled; asked only where nobody tells when."""
        return False

    def _end(self, driver: Driver) -> None:
        """What is told has left when this returns."""
        if driver.logs is not None and driver.leaving:
            driver.logs.flush(_TELL_S)  # whoever is lost next may need it
        self._log.close()
        self._client.close()

    def _make_driver(self, parts: StageParts) -> Driver:
        spec, control = self._spec, self._spec.job.control
        exchange = RelayExchange(spec.worker, self._client.send)
        links = LinkTransport(
            spec.worker,
            host=spec.host,
            silent_s=control.silent_s,
            sealed=control.tls is not None,
            carrying=self._carrying(),
            memory=self.device.memory,
        )
        self._here = links.here
        protocol = WorkerProtocol(
            worker=spec.worker,
            stage=parts.stage,
            rules=spec.rules,
            process=self._process,
        )
        driver = Driver(
            protocol=protocol,
            transport=self._transport(links),
            meet=links.meet,
            exchange=exchange,
            commands=queue.SimpleQueue(),
            attach=self._client.start,
            send=self._client.send,
            log=self._log,
            clock=time.monotonic,
            spec_of=parts.spec_of,
            copier=StateCopier(
                worker=spec.worker,
                exchange=exchange,
                slices=links.slices,
                tell=self._tell_beside,
                learn=self._learn_beside,
            ),
            rebuild=self._rebuild,
            expelled=self._expelled,
            monitor=self._monitor,
            stamps=self.device,
        )
        if spec.logs is not None:
            driver.logs = self._make_logs(Path(spec.logs))
        if spec.rules.checkpoint_every:
            checkpoints = Checkpoints(open_store(spec.checkpoints), spec.job.checkpoint.keep)
            reach = lambda point, step: driver.on_point(point, step)  # noqa: E731 - whatever is there by then
            driver.writer = CheckpointWriter(spec.worker, checkpoints, self._client.send, reach)
        for put_around in spec.around:
            put_around(driver)
        return driver

    def _carrying(self) -> Carrying | None:
        """What carries bodies besides links."""
        control = self._spec.job.control
        if control.carrier == "links":
            return None
        from holdfast.runtime.transport.links.carrier import Carrying

        device = self.device if control.carrier == "device" else HOST
        return Carrying(make=device.pair(self._spec.host), device=device, least_bytes=control.carry_from)

    def _make_logs(self, directory: Path) -> TensorLogs:
        spec = self._spec
        log = LogOf(job=spec.job.name, job_id=spec.rules.job, worker=str(spec.worker))
        exact = spec.job.train.numerics == "exact"
        node = Logging(nodes=spec.nodes).node_of.get(spec.worker, f"of-{spec.worker}")
        return TensorLogs(spec.job.logging, directory, node, log, self._note, spec.logs_url, compares=exact)

    def _transport(self, links: LinkTransport) -> Transport:
        """Links, or what is put around them: for a device, or so that messages take as long as in a profile."""
        if self.device.apart:
            return StagedTransport(links, self.device)
        emulated = self._spec.emulate
        if emulated is None or emulated.link.takes_no_time:
            return links
        return DelayedTransport(links, emulated.link, self._bytes_of)

    def _bytes_of(self, key: MessageKey) -> int:
        return self._emulated_bytes[key.boundary - 1] if key.boundary else 0

    def _build(self, plan: Plan) -> StageParts:
        spec = self._spec
        parts = build_stage(
            spec.job,
            plan,
            spec.worker,
            spec.boundaries,
            spec.emulate,
            self._note,
            spec.item,
            model=self._unused,
            data=self._data,
            evaluated=self._evaluated,
            sharded=None if self._ranks is None else self._make_sharded,
            loading=self._monitor.loading,
            device=self.device,
        )
        self._emulated_bytes, self._unused = parts.emulated_bytes, parts.unused
        return parts

    def _make_sharded(self, **options: Any) -> ShardedStage:
        assert self._ranks is not None, "only of several GPUs"
        return _sharded(self._ranks, self._ranks.next_stage(), self._spec.job.grid.microbatch_size, **options)

    def _on_raised(self, text: str) -> None:
        """A companion has stopped because of an exception. If so have we, our protocol tells of it; else we do."""
        if self._ranks is not None and self._ranks.stopped.wait(_SAME_S):
            return
        first, _, trace = text.partition("\n")
        self._fail(first, user_fault=False, trace=trace)

    def _on_ended(self, text: str) -> None:
        """A companion is gone: it and we are one."""
        try:
            self._note(f"ends itself: {text}")
        finally:
            os._exit(1)

    def _rebuild(self, plan: Plan, state: StateAt | None) -> tuple[Engine, SpecOf]:
        """A new compute engine, for the place that we have in ``plan``, and what it is sent.

        Raises:
            StorageError: a layer of the state is missing, damaged or cannot be read.
        """
        parts = self._build(plan)
        if state is not None and state.url is not None:
            self._load(parts.stage, state.url, state.step)
        return parts.stage, parts.spec_of

    def _load(self, stage: Engine, url: str, step: int) -> None:
        load_layers(stage, url, step)

    def _note(self, text: str) -> None:
        self._log.write(time.monotonic(), Notice(worker=str(self._spec.worker), text=text))

    def _complain(self, kind: str, text: str) -> None:
        self._client.send(Remark(worker=self._spec.worker, kind=kind, text=text))

    def _leave(self, driver: Driver) -> None:
        """SIGTERM: a notice to go. Before the first generation nobody would miss us; a spare is counted on."""
        if driver.protocol.generation == 0 and driver.protocol.stage.layers:
            os._exit(128 + signal.SIGTERM)
        driver.leaving = True
        self._client.send(Leaving(worker=driver.protocol.worker))

    def _rest(self, dormant: bool) -> None:
        """SIGUSR1: compute nothing, until SIGUSR2. We go on to take part in sums, and hold what we hold."""
        self._dormant = dormant
        if self._driver is not None:
            self._driver.dormant = dormant
            self._client.send(Dormant(worker=self._spec.worker, dormant=dormant))

    def _expelled(self, reason: str) -> None:
        """We were held for lost: whatever we do can only disturb. Says where every thread was, and ends."""
        try:
            path = Path(self._spec.events).with_name(f"stacks-{self._spec.worker}.txt")
            self._note(f"ends itself: {reason}; {_write_stacks(path)}")
        finally:
            os._exit(1)

    def _hello(self) -> Hello:
        assert self._driver is not None
        return msgspec.structs.replace(self._driver.hello(), here=self._here)

    def _on_command(self, command: object) -> None:
        assert self._driver is not None
        self._driver.on_command(command)  # type: ignore[arg-type]

    def _on_closed(self, error: ConfigError | CoordinatorUnavailable | None) -> None:
        """The job is over, or there was no coordinator for so long that nothing can be recovered: end.

        Leaves a word in the log, which needs nobody.
        """
        reason = str(error or "the coordinator closed the connection")
        if error is not None:
            self._note(f"ends itself: {reason}")
        if self._driver is None:
            os._exit(1)
        self._driver.on_command(Shutdown(reason=reason))

    def _beat(self, driver: Driver) -> None:
        """Tells of progress, as long as the process lives."""
        while True:
            driver.beat()
            time.sleep(self._spec.job.control.heartbeat_s)


def _write_stacks(path: Path) -> str:
    """Writes where every thread is, if that can be done; returns what to say of it."""
    try:
        with path.open("w") as file:
            faulthandler.dump_traceback(file)  # it raises nothing
            written = os.fstat(file.fileno()).st_size
    except OSError as error:
        return f"its stacks cannot be written: {error.strerror}"
    return f"its stacks are in {path.name}" if written else "its stacks cannot be written"


def _restore(
    stage: Engine,
    resume: ResumeFrom,
    pause: Callable[[float], None] = time.sleep,
    load: Callable[[Engine, str, int], None] = lambda stage, url, step: load_layers(stage, url, step),
) -> None:
    """Replaces the layers of a new stage by those of a checkpoint, which was found sound a moment ago.

    What a store does not give now it may give soon, so it is asked again a few times.

    Raises:
        ConfigError: it cannot be read all the same; says how to go on.
    """
    assert resume.step is not None
    for wait_s in (*_ASK_AGAIN_S, None):
        try:
            load(stage, resume.url, resume.step)
            break
        except StorageError as error:
            if wait_s is None:
                tried = f"tried {len(_ASK_AGAIN_S) + 1} times, after it was found sound"
                place = f"{resume.url}@{resume.step}"
                raise ConfigError(f"--resume {place}: {error} ({tried}); {_way_on(resume)}") from error
            pause(wait_s)


def _way_on(resume: ResumeFrom) -> str:
    """What goes on when a checkpoint cannot be read."""
    if resume.auto:
        return "the same command goes on, from the newest checkpoint that can be read then"
    assert resume.step is not None
    try:
        older = max((step for step in Checkpoints(open_store(resume.url)).steps() if step < resume.step), default=None)
    except StorageError as error:
        return f"whether there is an older one is not known: {error}"
    return "there is no older one" if older is None else f"go on from the one before: --resume {resume.url}@{older}"


def load_layers(stage: Engine, url: str, step: int) -> None:
    """Replaces the layers of a stage by those of a checkpoint.

    Raises:
        StorageError: one is missing, damaged or cannot be read.
    """
    for layer, data in load_states(url, step, stage.layer_steps()).items():
        stage.restore(layer, data)
