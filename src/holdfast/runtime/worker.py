"""The process of one worker, and of the coordinator: what the agent starts."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from holdfast.config.job import Job
from holdfast.control.advice import Adviser
from holdfast.control.awake import AwakeClock
from holdfast.control.client import ControlClient
from holdfast.control.coordinator import Committer, Coordinator, Remarks, serve
from holdfast.control.detection import PATIENCE, Watch
from holdfast.control.etcd import Etcd, EtcdStore, Leadership, parse_store_url
from holdfast.control.membership import Membership, Phase, Starting, restore
from holdfast.control.membership.cadence import Cadence
from holdfast.control.membership.forgotten import gone_before
from holdfast.control.messages import Failure, Hello, Leaving, Remark, Shutdown, StateAt
from holdfast.control.sabotage import Sabotage
from holdfast.control.store import DecisionStore, StoredDecision
from holdfast.control.tls import channel_credentials, server_credentials
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.lower import Payload
from holdfast.core.plan import Plan
from holdfast.errors import (
    ConfigError,
    CoordinatorUnavailable,
    CorruptBlob,
    HoldfastError,
    StorageError,
    StoreAway,
    WorkFailed,
)
from holdfast.optim.digest import digest_run
from holdfast.runtime.build import StageParts, build_stage, probe
from holdfast.runtime.checkpointing import CheckpointWriter, load_states
from holdfast.runtime.copying import StateCopier
from holdfast.runtime.delayed import DelayedTransport
from holdfast.runtime.exchange import RelayExchange
from holdfast.runtime.gloo import GlooTransport
from holdfast.runtime.injection import Injector
from holdfast.runtime.isolation import Namespace
from holdfast.runtime.library import fill_library
from holdfast.runtime.life import LifeStage, WorkerLife
from holdfast.runtime.pace import Pace
from holdfast.runtime.processes import CoordinatorSpec, LibrarySpec, ResumeFrom, WorkerSpec
from holdfast.runtime.resume import find, with_found
from holdfast.runtime.shell import Shell
from holdfast.runtime.snapshots import Snapshots
from holdfast.runtime.stopping import LONGEST_TEXT
from holdfast.runtime.transfer import StateServer
from holdfast.runtime.transport import Transport
from holdfast.storage.blobs import open_store
from holdfast.storage.checkpoints import Checkpoints, Facts
from holdfast.telemetry.events import (
    Event,
    EventLog,
    FaultInjected,
    LibraryFilled,
    Notice,
    WorkerReady,
    read_events,
)

__all__ = [
    "answering",
    "run_coordinator",
    "run_digest",
    "run_find",
    "run_library",
    "run_probe",
    "run_worker",
]

_TELL_S = 10.0
_SUPERSEDED = 3
_LEAST = 19
_ASK_AGAIN_S = (0.5, 2.0, 5.0)
"""The pauses before a checkpoint that could not be read at the start is read again."""
_SWITCH_S = 0.0005
"""A thread that prepares plans gives way this soon to messages that have come."""


def _move(namespace: Namespace | None) -> None:
    """Goes to the network that the agent made for this process, if it made one, before there is any socket."""
    if namespace is not None:
        namespace.enter()


def run_worker(spec: WorkerSpec) -> None:
    """Runs one worker to its end; exits with 0 after an orderly shutdown."""
    _move(spec.namespace)
    torch.set_num_threads(1)
    _Worker(spec).run()


class _Worker:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._log = EventLog(spec.events, complain=self._complain)
        self._shell: Shell | None = None
        self._emulated_bytes: Mapping[Payload, int] = {}
        self._awake = AwakeClock()
        self._client = ControlClient(
            spec.address,
            spec.token,
            hello=self._hello,
            on_command=self._on_command,
            on_closed=self._on_closed,
            reattach_s=spec.job.control.reattach_s,
            clock=self._awake,
            tls=spec.job.control.tls,
        )

    def run(self) -> None:
        try:
            self._live()
        except ConfigError as error:
            self._fail(str(error), user_fault=True)
        except HoldfastError as error:
            self._fail(f"{type(error).__name__}: {error}", user_fault=False)
        except BaseException as error:  # noqa: BLE001 - a process main: whatever it is, it is reported
            self._fail(f"{type(error).__name__}: {error}", user_fault=False, trace=traceback.format_exc())
        # Threads of aborted groups may still be going; there is nothing left that they could spoil.
        os._exit(0)

    def _fail(self, error: str, *, user_fault: bool, trace: str = "") -> None:
        worker, pid = self._spec.worker, os.getpid()
        text, trace = error[:LONGEST_TEXT], trace[-LONGEST_TEXT:]
        failure = Failure(worker=worker, pid=pid, error=text, user_fault=user_fault, traceback=trace)
        self._client.close(drain_s=_TELL_S, last_words=failure)  # unheard, it would pass for a death, and strike again
        os._exit(1)

    def _live(self) -> None:
        spec = self._spec
        parts = self._build(spec.plan)
        if spec.resume is not None:
            _restore(parts.stage, spec.resume)
        self._shell = shell = self._make_shell(parts)
        gc.collect()
        gc.freeze()  # a collection in the middle of a recovery would cost more than the recovery
        self._log.write(time.monotonic(), WorkerReady(worker=str(spec.worker), pid=os.getpid()))
        threading.Thread(target=self._beat, args=(shell,), name="heartbeat", daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: self._leave(shell))
        shell.run()
        self._log.close()
        self._client.close()

    def _make_shell(self, parts: StageParts) -> Shell:
        spec, tls = self._spec, self._spec.job.control.tls
        exchange = RelayExchange(spec.worker, self._client.send)
        life = WorkerLife(
            worker=spec.worker,
            stage=parts.stage,
            steps=spec.job.train.steps,
            microbatches=spec.job.grid.microbatches,
            ties=parts.ties,
            pid=os.getpid(),
            checkpoint_every=spec.job.checkpoint_every,
            synchronous=spec.job.checkpoint.synchronous,
            snapshots=Snapshots(every=spec.job.resilience.snapshot_every),
        )
        shell = Shell(
            life=life,
            stage=parts.stage,
            transport=self._transport(exchange),
            exchange=exchange,
            attach=self._client.start,
            send=self._client.send,
            log=self._log,
            spec_of=parts.spec_of,
            injector=Injector(worker=spec.worker, faults=spec.faults, log=self._log, send=self._client.send),
            copier=StateCopier(
                worker=spec.worker,
                exchange=exchange,
                server=StateServer(spec.host, spec.state_token, server_credentials(tls) if tls else None),
                token=spec.state_token,
                credentials=channel_credentials(tls) if tls else None,
            ),
            rebuild=self._rebuild,
            expelled=self._expelled,
            pace=Pace(awake=self._awake, excused_s=PATIENCE * spec.job.control.hang_s),
        )
        if spec.job.checkpoint_every:
            checkpoints = Checkpoints(open_store(spec.checkpoints), spec.job.checkpoint.keep)
            shell.writer = CheckpointWriter(spec.worker, checkpoints, self._client.send, shell.injector.reach)
        return shell

    def _transport(self, exchange: RelayExchange) -> Transport:
        """Gloo's; if compute is emulated, messages take as long as the profile says, if they take any time."""
        spec = self._spec
        gloo = GlooTransport(spec.worker, exchange, host=spec.host)
        if spec.emulate is None or spec.emulate.link.takes_no_time:
            return gloo
        return DelayedTransport(gloo, spec.emulate.link, lambda payload: self._emulated_bytes.get(payload, 0))

    def _build(self, plan: Plan) -> StageParts:
        spec = self._spec
        parts = build_stage(spec.job, plan, spec.worker, spec.boundaries, spec.emulate, self._note, spec.item)
        self._emulated_bytes = parts.emulated_bytes
        return parts

    def _rebuild(self, plan: Plan, state: StateAt) -> StageParts:
        """A new compute engine, for the place that we have in ``plan``.

        Raises:
            StorageError: a layer of the state is missing, damaged or cannot be read.
        """
        parts = self._build(plan)
        if state.url is not None:
            _load(parts.stage, state.url, state.step)
        return parts

    def _note(self, text: str) -> None:
        self._log.write(time.monotonic(), Notice(worker=str(self._spec.worker), text=text))

    def _complain(self, kind: str, text: str) -> None:
        self._client.send(Remark(worker=self._spec.worker, kind=kind, text=text))

    def _leave(self, shell: Shell) -> None:
        """SIGTERM: a notice to go. Before the first generation nobody would miss us."""
        if shell.life.generation == 0:
            os._exit(0)
        shell.leaving = True
        self._client.send(Leaving(worker=shell.life.worker))

    def _expelled(self, reason: str) -> None:
        """We were held for lost: whatever we do can only disturb. Says where every thread was, and ends."""
        try:
            path = Path(self._spec.events).with_name(f"stacks-{self._spec.worker}.txt")
            self._note(f"ends itself: {reason}; {_write_stacks(path)}")
        finally:
            os._exit(1)

    def _hello(self) -> Hello:
        assert self._shell is not None
        return self._shell.hello()

    def _on_command(self, command: object) -> None:
        assert self._shell is not None
        self._shell.on_command(command)  # type: ignore[arg-type]

    def _on_closed(self, error: ConfigError | CoordinatorUnavailable | None) -> None:
        """The job is over, or there was no coordinator for so long that nothing can be recovered: end.

        Leaves a word in the log, which needs nobody.
        """
        reason = str(error or "the coordinator closed the connection")
        if error is not None:
            self._note(f"ends itself: {reason}")
        if self._shell is None:
            os._exit(1)
        self._shell.on_command(Shutdown(reason=reason))

    def _beat(self, shell: Shell) -> None:
        """Tells of progress, as long as the process lives."""
        while True:
            shell.beat()
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


def _restore(stage: LifeStage, resume: ResumeFrom, pause: Callable[[float], None] = time.sleep) -> None:
    """Replaces the layers of a new stage by those of a checkpoint, which was found sound a moment ago.

    What a store does not give now it may give soon, so it is asked again a few times.

    Raises:
        ConfigError: it cannot be read all the same; says how to go on.
    """
    assert resume.step is not None
    for wait_s in (*_ASK_AGAIN_S, None):
        try:
            _load(stage, resume.url, resume.step)
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


def _load(stage: LifeStage, url: str, step: int) -> None:
    for layer, data in load_states(url, step, stage.layer_steps()).items():
        stage.restore(layer, data)


def run_coordinator(spec: CoordinatorSpec, answer: Connection) -> None:
    """Runs the coordinator to the end of the job; sends its port, or what went wrong, into ``answer`` first.

    After failure: started again with the same store and port, it goes on where the decisions in the store end. With
    several coordinators it stands by until it leads, and exits with 3 when another one leads instead.
    """
    sys.setswitchinterval(_SWITCH_S)
    _move(spec.namespace)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the whole group, it is for the agent to answer
    control, remarks = spec.job.control, Remarks()
    log = EventLog(spec.events, complain=lambda kind, text: remarks.put((kind, text)))
    try:
        coordinator = (
            (lambda: _win(spec, log, remarks))
            if spec.store.startswith("etcd:")
            else _coordinator(spec, log, remarks, None)
        )
    except StoreAway as error:  # such as a full disk: it is tried again for a while, if we were to go on
        answer.send_bytes(f"error control.store: {error}".encode())
        os._exit(2)
    gc.freeze()
    try:
        credentials = server_credentials(control.tls) if control.tls else None
        service = serve(
            coordinator,
            host=spec.host,
            port=spec.port,
            token=spec.token,
            ready=lambda port: answer.send_bytes(b"ok %d" % port),
            credentials=credentials,
            also=spec.socket,
        )
        os._exit(0 if asyncio.run(service) else _SUPERSEDED)
    except ConfigError as error:
        answer.send_bytes(b"error " + str(error).encode())
        os._exit(2)
    except StorageError as error:  # while it stood by: whoever supervises it has its answer already
        _note(log, f"ends itself: {error}")
        os._exit(1)


def _win(spec: CoordinatorSpec, log: EventLog, remarks: Remarks) -> Coordinator:
    """Waits until we lead."""
    host, port, prefix = parse_store_url(spec.store)
    etcd = Etcd(host=host, port=port, note=lambda text: _note(log, text))
    leadership = Leadership(etcd, prefix, on_lost=lambda: os._exit(_SUPERSEDED))
    leadership.win()
    return _coordinator(spec, log, remarks, EtcdStore(etcd, prefix, leadership))


def _note(log: EventLog, text: str) -> None:
    log.write(time.monotonic(), Notice(worker="coordinator", text=text))


def _coordinator(spec: CoordinatorSpec, log: EventLog, remarks: Remarks, etcd: EtcdStore | None) -> Coordinator:
    """One that begins the job, or goes on with what its store remembers."""
    store, stored, unknown = _recall(spec, etcd)
    checkpoints = Checkpoints(open_store(spec.checkpoints), spec.job.checkpoint.keep)
    awake = AwakeClock()
    reattach_until = awake() + spec.job.control.reattach_s
    membership = _membership(spec, stored, checkpoints, log, reattach_until)
    if stored is None:  # this is the beginning, or what was decided is lost
        membership = replace(membership, told_gone=_told_gone(spec))
    if unknown:
        remarks.put(("store", f"{unknown}: what lives is saved, and the job ends"))
        membership = replace(membership, past_lost=unknown, phase=Phase.REATTACHING, agent_away=True)
    return Coordinator(
        membership=membership,
        store=store,
        log=log,
        remarks=remarks,
        clock=time.monotonic,
        awake=awake,
        committer=Committer(checkpoints=checkpoints, facts=spec.facts),
        sabotage=Sabotage(_still_due(spec, log), log, time.monotonic),
        adviser=None if spec.library is None else Adviser(Path(spec.library), lambda text: _note(log, text)),
    )


def _recall(
    spec: CoordinatorSpec, etcd: EtcdStore | None
) -> tuple[DecisionStore | EtcdStore | None, StoredDecision | None, str]:
    """The store and its newest decision; or why neither is to be used: it was damaged, or exchanged for another."""
    try:
        store = etcd or DecisionStore(Path(spec.store))
        stored = store.latest()
    except CorruptBlob as error:
        return None, None, str(error)
    if stored is not None and stored.job != spec.job_id:
        return None, None, f"{spec.store} holds the decisions of another job"
    return store, stored, ""


def _told_gone(spec: CoordinatorSpec) -> frozenset[tuple[WorkerId, int]]:
    """Who was told to be gone before; if the log cannot be read, that is told twice."""
    with contextlib.suppress(StorageError):
        return gone_before(event for _, event in read_events(spec.events))
    return frozenset()


def _still_due(spec: CoordinatorSpec, log: EventLog) -> tuple[Fault, ...]:
    """The faults that have not struck a coordinator before this one. The log may be long: it is read only for them.

    None, if the log cannot be read: what has struck already must not strike each coordinator anew.
    """
    if not spec.faults:
        return ()
    try:
        told = read_events(spec.events)
    except StorageError as error:
        _note(log, f"faults of the coordinator are left out: {error}")
        return ()
    fired = {event.spec for _, event in told if isinstance(event, FaultInjected)}
    return tuple(fault for fault in spec.faults if str(fault) not in fired)


def _membership(
    spec: CoordinatorSpec,
    stored: StoredDecision | None,
    checkpoints: Checkpoints,
    log: EventLog,
    reattach_until: float,
) -> Membership:
    every = spec.job.checkpoint_every
    begins = Membership(
        healthy=spec.plan,
        terms=spec.terms,
        steps=spec.job.train.steps,
        strategy=spec.job.resilience.strategy,
        staggered=spec.job.train.technique == "staggered",
        directory=spec.directory,
        watch=Watch(limit_s=spec.job.control.hang_s, beat_s=spec.job.control.heartbeat_s),
        starting=Starting(limit_s=spec.job.control.start_s),
        restorable=_restorable(spec),
        cadence=Cadence(every=every, wanted=every) if spec.job.sets_interval else None,
        wait_s=spec.job.resilience.wait_for_replacement,
        failure_every_s=spec.job.resilience.failure_every_s,
        tolerate=spec.job.resilience.tolerate,
        reattach_until=reattach_until,
        job=spec.job_id,
    )
    if stored is None:
        return begins
    state = restore(begins, stored, reattach_until=reattach_until)
    if not spec.job.checkpoint_every:
        return state
    try:
        return replace(state, restorable=with_found(state.restorable, checkpoints))
    except StorageError as error:  # it may be back when one is needed
        _note(log, f"the checkpoints that it had written before it died could not be listed: {error}")
        return state


def _restorable(spec: CoordinatorSpec) -> tuple[StateAt, ...]:
    """What can be loaded before the first checkpoint: what was resumed from, else the start if any will follow."""
    if spec.resume is not None and spec.resume.step is not None:
        return (StateAt(url=spec.resume.url, step=spec.resume.step),)
    return (StateAt(url=None, step=0),) if spec.job.checkpoint_every else ()


def run_library(spec: LibrarySpec) -> None:
    """Fills a job's plan library while training runs, whenever nothing else wants the processor, and ends.

    After failure: training goes on with the plans that are there, and with those made at once.
    """
    os.nice(_LEAST)
    log = EventLog(spec.events)

    def tell(event: Event) -> None:
        log.write(time.monotonic(), event)

    try:
        fill_library(spec, note=lambda text: tell(Notice(worker="library", text=text)))
        tell(LibraryFilled(failures=spec.failures))
    except HoldfastError as error:
        tell(Notice(worker="library", text=f"no further plan is made ahead: {error}"))
    os._exit(0)


def run_probe(job: Job, answer: Connection) -> None:
    """Builds the model and opens the data once, so that bad input is found before any worker starts.

    Sends ``ok`` and what was found, or ``error`` and what the user should change.
    """
    torch.set_num_threads(1)
    answering(answer, lambda: msgspec.json.encode(probe(job)).decode())


def run_find(
    job: Job, resume: ResumeFrom | None, checkpoints: str, facts: Facts, accept: tuple[str, ...], answer: Connection
) -> None:
    """Sends ``ok`` and the checkpoint to go on from, if any, as JSON; or ``error`` and what the user should change."""
    answering(answer, lambda: msgspec.json.encode(find(job, resume, checkpoints, facts, accept)).decode())


def run_digest(directory: str, answer: Connection) -> None:
    """Sends ``ok`` and the two hashes of the layers saved in ``directory``."""
    torch.set_num_threads(1)
    answering(answer, lambda: _hashes(Path(directory)))


def _hashes(directory: Path) -> str:
    digest = digest_run(directory)
    return f"{digest.weights_sha256} {digest.state_sha256}"


def answering(answer: Connection, work: Callable[[], str]) -> None:
    """Sends ``ok`` and what ``work`` returns, or ``error`` and what the user should change; ends the process."""
    try:
        text = "ok " + work()
    except (ConfigError, WorkFailed) as error:
        text = f"error {error}"
    except Exception as error:  # noqa: BLE001 - a process main: whatever it is, it is reported
        text = f"bug {type(error).__name__}: {error}\n{traceback.format_exc()}"
    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone, and wants to hear nothing any more
        answer.send_bytes(text.encode())
    os._exit(0)
