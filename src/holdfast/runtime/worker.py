"""The process of one worker, and of the coordinator: what the agent starts."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from holdfast.config.job import Job
from holdfast.control.client import ControlClient
from holdfast.control.coordinator import Coordinator, serve
from holdfast.control.etcd import Etcd, EtcdStore, Leadership, parse_store_url
from holdfast.control.membership import Membership, restore
from holdfast.control.messages import Failure, Heartbeat, Hello, Shutdown
from holdfast.control.sabotage import Sabotage
from holdfast.control.store import DecisionStore, StoredDecision
from holdfast.control.tls import server_credentials
from holdfast.core.faults import Fault
from holdfast.errors import ConfigError, CoordinatorUnavailable, HoldfastError
from holdfast.optim.digest import digest_run
from holdfast.runtime.build import StageParts, build_stage, probe
from holdfast.runtime.gloo import GlooTransport
from holdfast.runtime.isolation import Namespace
from holdfast.runtime.life import WorkerLife
from holdfast.runtime.processes import CoordinatorSpec, WorkerSpec
from holdfast.runtime.shell import RelayExchange, Shell
from holdfast.telemetry.events import CoordinatorReady, EventLog, FaultInjected, Notice, WorkerReady, read_events

__all__ = ["run_coordinator", "run_digest", "run_probe", "run_worker"]

_PR_SET_PDEATHSIG = 1
_TELL_S = 10.0
_SUPERSEDED = 3


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, even if it is stopped. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _start_process() -> None:
    """Ctrl-C reaches every process of the terminal; the agent alone decides what it means."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _move(namespace: Namespace | None) -> None:
    """Goes to the network that the agent made for this process, if it made one, before there is any socket."""
    if namespace is not None:
        namespace.enter()


def run_worker(spec: WorkerSpec) -> None:
    """Runs one worker to its end; exits with 0 after an orderly shutdown."""
    _start_process()
    _move(spec.namespace)
    torch.set_num_threads(1)
    _Worker(spec).run()


class _Worker:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._log = EventLog(spec.events)
        self._shell: Shell | None = None
        self._client = ControlClient(
            spec.address,
            spec.token,
            hello=self._hello,
            on_command=self._on_command,
            on_closed=self._on_closed,
            reattach_s=spec.job.control.reattach_s,
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
        failure = Failure(worker=self._spec.worker, error=error, user_fault=user_fault, traceback=trace)
        self._client.close(drain_s=_TELL_S, last_words=failure)  # unheard, it would pass for a death, and strike again
        os._exit(1)

    def _live(self) -> None:
        spec = self._spec
        parts = build_stage(spec.job, spec.plan, spec.worker, spec.boundaries, spec.emulate)
        self._shell = shell = self._make_shell(parts)
        gc.collect()
        gc.freeze()  # a collection in the middle of a recovery would cost more than the recovery
        self._log.write(time.monotonic(), WorkerReady(worker=str(spec.worker), pid=os.getpid()))
        threading.Thread(target=self._beat, args=(shell.life,), name="heartbeat", daemon=True).start()
        shell.run()
        self._client.close()

    def _make_shell(self, parts: StageParts) -> Shell:
        spec = self._spec
        exchange = RelayExchange(spec.worker, self._client.send)
        life = WorkerLife(
            worker=spec.worker,
            stage=parts.stage,
            steps=spec.job.train.steps,
            microbatches=spec.job.grid.microbatches,
            ties=parts.ties,
            pid=os.getpid(),
        )
        return Shell(
            life=life,
            stage=parts.stage,
            transport=GlooTransport(spec.worker, exchange, host=spec.host),
            exchange=exchange,
            attach=self._client.start,
            send=self._client.send,
            log=self._log,
            spec_of=parts.spec_of,
            faults=spec.faults,
        )

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
            self._log.write(time.monotonic(), Notice(worker=str(self._spec.worker), text=f"ends itself: {reason}"))
        if self._shell is None:
            os._exit(1)
        self._shell.on_command(Shutdown(reason=reason))

    def _beat(self, life: WorkerLife) -> None:
        """Tells of progress, as long as the process lives."""
        while True:
            execution = life.execution
            if execution is not None:
                beat = Heartbeat(
                    worker=life.worker, generation=life.generation, step=execution.step, op=len(execution.ops)
                )
                self._client.send(beat)
            time.sleep(self._spec.job.control.heartbeat_s)


def run_coordinator(spec: CoordinatorSpec, answer: Connection) -> None:
    """Runs the coordinator to the end of the job; sends its port, or what went wrong, into ``answer`` first.

    After failure: started again with the same store and port, it goes on where the decisions in the store end. With
    several coordinators it stands by until it leads, and exits with 3 when another one leads instead.
    """
    _start_process()
    _move(spec.namespace)
    control, log = spec.job.control, EventLog(spec.events)
    coordinator = (lambda: _win(spec, log)) if spec.store.startswith("etcd:") else _coordinator(spec, log, None)
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


def _win(spec: CoordinatorSpec, log: EventLog) -> Coordinator:
    """Waits until we lead."""
    host, port, prefix = parse_store_url(spec.store)
    etcd = Etcd(host=host, port=port)
    leadership = Leadership(etcd, prefix, on_lost=lambda: os._exit(_SUPERSEDED))
    leadership.win()
    return _coordinator(spec, log, EtcdStore(etcd, prefix, leadership))


def _coordinator(spec: CoordinatorSpec, log: EventLog, etcd: EtcdStore | None) -> Coordinator:
    """One that begins the job, or goes on with what its store remembers."""
    store = etcd or DecisionStore(Path(spec.store))
    membership = _membership(spec, store.latest())
    log.write(time.monotonic(), CoordinatorReady(pid=os.getpid(), generation=membership.generation))
    sabotage = Sabotage(_still_due(spec), log, time.monotonic)
    return Coordinator(membership=membership, store=store, log=log, clock=time.monotonic, sabotage=sabotage)


def _still_due(spec: CoordinatorSpec) -> tuple[Fault, ...]:
    """The faults that have not struck a coordinator before this one. The log may be long: it is read only for them."""
    if not spec.faults:
        return ()
    fired = {event.spec for _, event in read_events(spec.events) if isinstance(event, FaultInjected)}
    return tuple(fault for fault in spec.faults if str(fault) not in fired)


def _membership(spec: CoordinatorSpec, stored: StoredDecision | None) -> Membership:
    begins = Membership(
        healthy=spec.plan,
        steps=spec.job.train.steps,
        strategy=spec.job.resilience.strategy,
        directory=spec.directory,
    )
    if stored is None:
        return begins
    return restore(begins, stored, reattach_until=time.monotonic() + spec.job.control.reattach_s)


def run_probe(job: Job, answer: Connection) -> None:
    """Builds the model and opens the data once, so that bad input is found before any worker starts.

    Sends ``ok`` and what was found, or ``error`` and what the user should change.
    """
    _start_process()
    torch.set_num_threads(1)
    _answering(answer, lambda: msgspec.json.encode(probe(job)).decode())


def run_digest(directory: str, answer: Connection) -> None:
    """Sends ``ok`` and the two hashes of the layers saved in ``directory``."""
    _start_process()
    torch.set_num_threads(1)
    _answering(answer, lambda: _hashes(Path(directory)))


def _hashes(directory: Path) -> str:
    digest = digest_run(directory)
    return f"{digest.weights_sha256} {digest.state_sha256}"


def _answering(answer: Connection, work: Callable[[], str]) -> None:
    try:
        text = "ok " + work()
    except ConfigError as error:
        text = f"error {error}"
    except Exception as error:  # noqa: BLE001 - a process main: whatever it is, it is reported
        text = f"bug {type(error).__name__}: {error}\n{traceback.format_exc()}"
    answer.send_bytes(text.encode())
    os._exit(0)
