"""The agent: starts a job's processes on this machine, watches them, and sees that none is left at the end."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import math
import os
import queue
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import msgspec
from msgspec.structs import replace as replace_struct

from holdfast.config.job import Job
from holdfast.config.load import dump_job
from holdfast.config.profiles import dump_profile
from holdfast.control.awake import AwakeClock
from holdfast.control.client import ControlClient
from holdfast.control.etcd import Etcd, parse_store_url
from holdfast.control.messages import (
    Command,
    Ended,
    Fence,
    Gathered,
    Hello,
    Message,
    Preempted,
    Progress,
    Remark,
    StartWorker,
    Strike,
    Told,
)
from holdfast.control.tls import check_tls
from holdfast.control.token import share
from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.core.placement import group_into_nodes
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile
from holdfast.core.slots import slots_of
from holdfast.errors import (
    ConfigError,
    CoordinatorUnavailable,
    HoldfastError,
    InternalError,
    StorageError,
    describe_exit,
)
from holdfast.plain import one_line
from holdfast.planning.jobs import healthy_plan, keeping_of, profile_of, shapes_of, terms_of, tolerated
from holdfast.planning.remainder import Keeping
from holdfast.planning.replays import Logging, grouped
from holdfast.planning.reshaping import Shapes
from holdfast.planning.training import Terms
from holdfast.recovery.ways import Decided, decided
from holdfast.runtime.hardening import forbid_core_dumps, make_private, raise_file_limit, write_private
from holdfast.runtime.isolation import Networks
from holdfast.runtime.node.children import Child, Children
from holdfast.runtime.node.entries import (
    COORDINATOR,
    DIGEST,
    FIND,
    LIBRARY,
    PROBE,
    SCRIPT,
    SCRIPT_PROBE,
    WORKER,
    Entry,
)
from holdfast.runtime.node.forks import FORKS, SERVER, ForkedProcess, Patience
from holdfast.runtime.node.news import Reporter
from holdfast.runtime.node.supervision import RestartLimit, StartAgain, Supervisor
from holdfast.runtime.node.worker_group import WorkerGroup
from holdfast.runtime.resume import check_accepted, checkpoints_url
from holdfast.runtime.rundir import Claim, attempts
from holdfast.runtime.specs import (
    CoordinatorSpec,
    Found,
    LibrarySpec,
    Probed,
    ResumeFrom,
    WorkerSpec,
    emulated_probe,
)
from holdfast.storage.blobs import open_store
from holdfast.telemetry.events import (
    CheckpointRejected,
    Event,
    EventLog,
    JobEnded,
    JobStarted,
    Notice,
    Preparing,
    Resumed,
)

__all__ = ["Agent", "Interrupted", "Outcome"]

_GRACE_S = 1.5
_LOOK_S = 0.05
_TELL_S = 1.0
_WHY = 200
_HASHED_PER_S = 10e6
"""Bytes; any disk and processor does better."""
_LATE_START = "did not start within {limit_s:g} s (control.start_s)"


class Interrupted(Exception):
    """The user or the system asked the job to end.

    Attributes:
        signal_number: SIGINT or SIGTERM.
        told: what a person should know of it besides; empty if nothing.
    """

    def __init__(self, signal_number: int, told: str = "") -> None:
        self.signal_number = signal_number
        self.told = told
        super().__init__(signal.Signals(signal_number).name)


class _Preempt(enum.Enum):
    """What a first SIGTERM leads to."""

    BEGIN = enum.auto()
    GIVE_UP = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _CoordinatorEnded:
    """A coordinator's process is gone; ``spec`` is what to start it again with."""

    child: Child
    spec: CoordinatorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What is planned before training, by which profile; see :class:`CoordinatorSpec`."""

    profile: Profile | None
    plan: Plan
    terms: Terms | None
    shapes: Shapes | None
    keeping: Keeping | None


_Item = Command | Exception | _CoordinatorEnded | StartAgain[CoordinatorSpec] | _Preempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended: see :class:`holdfast.control.messages.Ended`; the hashes are of a job that was done.

    ``no_hashes``: why such a job has none; else empty. ``last``: the newest step that we heard of. ``restarts``: how
    often a coordinator died. ``resumed_from``: the step of the checkpoint that it went on from.
    """

    outcome: str
    detail: str
    step: int
    directory: str
    generations: int
    lost_layers: tuple[int, ...] = ()
    members: tuple[WorkerId, ...] = ()
    weights_sha256: str | None = None
    state_sha256: str | None = None
    no_hashes: str = ""
    last: Progress | None = None
    restarts: int = 0
    resumed_from: int | None = None


@contextlib.contextmanager
def _closing(client: ControlClient) -> Iterator[None]:
    """Closes the connection; when something went wrong, nobody waits for what is still to be sent."""
    try:
        yield
    except BaseException:
        client.close(drain_s=0.0)
        raise
    client.close()


def _bytes_in(directory: Path) -> int:
    """How much there is to read; 0 if that cannot be told."""
    try:
        return sum(path.stat().st_size for path in directory.iterdir())
    except OSError:
        return 0


def _emulated_digest(directory: Path) -> str:
    """Emulated layers are saved as their digests: the digest of these, in order."""
    texts = [path.read_bytes() for path in sorted(directory.glob("layer-*.txt"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()


@dataclass(slots=True, kw_only=True)
class Agent:
    """Runs one job on this machine.

    Attributes:
        job: the job.
        run_dir: a directory of the job's own; must not hold an earlier run, unless this is another attempt at it.
        faults: what is to happen, to whom, when.
        emulate: sleep as long as it says instead of computing, on its number of layers; the job's model and data are
            not even built. None to compute.
        isolate: run every node in a network namespace of its own, so that its link can be cut. Linux, root.
        resume: the checkpoint to go on from; None to begin anew.
        accept: keys that may differ from the job that made the checkpoint.
        again: whether an earlier attempt may have been in the run directory.
        claim: of the run directory; whoever gives it closes it. None: it is ours while this process lives.
        on_event: called with what is worth a line: what is done before the first step and after the last (Preparing,
            every second while it goes on), how a lost node's layers are to come back (Chosen), a worker that is lost or
            has come, a checkpoint that was rejected, something that cannot be written.
        on_progress: called after every step, in the agent's thread.
    """

    job: Job
    run_dir: Path
    faults: tuple[Fault, ...] = ()
    emulate: Profile | None = None
    isolate: bool = False
    resume: ResumeFrom | None = None
    accept: tuple[str, ...] = ()
    again: bool = False
    claim: Claim | None = None
    on_event: Callable[[Event], None] = lambda event: None
    on_progress: Callable[[Progress], None] = lambda progress: None
    _inbox: queue.SimpleQueue[_Item] = field(default_factory=queue.SimpleQueue)
    _interrupted: Interrupted | None = None
    _awake: AwakeClock = field(default_factory=AwakeClock)
    _networks: Networks | None = None
    _spec: CoordinatorSpec | None = None
    _group: WorkerGroup | None = None
    _waits_for_sigterm: bool = False
    _preempted: bool = False
    _checkpoint: int = 0
    """The newest that there is; 0 for none."""
    _children: Children = field(init=False)
    _server: int | None = None
    _thinking: bool = False
    _told: set[str] = field(default_factory=set)
    _last: Progress | None = None
    _reporter: Reporter = field(init=False)
    _preparing: Preparing | None = None
    _prepared_since: float = 0.0
    _prepared_told: float = 0.0

    def __post_init__(self) -> None:
        self._reporter = Reporter(of=self.job.num_workers)
        patience = Patience(limit_s=self._start_s, key="control.start_s", check=self._check_patience)
        self._children = Children(process=partial(ForkedProcess, patience=patience))

    def run(self) -> Outcome:
        """Trains to the end, whatever dies; no process of the job is left when this returns or raises.

        Raises:
            ConfigError: the user's input cannot be used.
            Interrupted: SIGINT or SIGTERM came.
            InternalError: the job cannot go on for a reason of ours.
        """
        raise_file_limit()
        forbid_core_dumps()
        self._check_faults()
        check_accepted(self.job, self.accept)
        self._check_tls()
        self._check_store()
        # Gloo reports every lost peer on stderr as an error of its own; here it is an event, told once, by us.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        with self._signals():
            try:
                return self._run()
            except Exception:
                self._raise_if_interrupted()  # whatever went wrong may have come of it
                raise

    def _run(self) -> Outcome:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(self._awake))
            stack.callback(self._delete_logs)  # once no process is left that could write any
            if self._isolated:
                self._networks = stack.enter_context(Networks(self._num_nodes()))
            stack.enter_context(self._processes())
            SERVER.start()
            self._server = SERVER.pid
            self._prepare("loading PyTorch and trying out the model")
            probed = self._probe()
            self._prepare("planning")
            planned = self._plan(probed)
            found = self._find(probed)
            decision = self._decide(planned, probed)
            self._prepare("starting the coordinator")
            self._claim_directory()
            log = stack.enter_context(contextlib.closing(self._open_log()))
            self._tell(log, self._started())
            self._tell(log, *(Notice(worker="probe", text=text) for text in probed.warnings))
            self._tell_resumed(log, found)
            self._tell(log, decision.chosen)
            spec = self._spec = self._coordinator_spec(decision.job, planned, probed)
            ports = [self._start_coordinator(spec, self._start_s) for _ in range(self.job.control.coordinators)]
            stack.enter_context(_closing(self._start(spec, ports, probed, log)))
            stack.enter_context(self._library(spec))
            outcome = self._watch(self._supervisor(log), log)
            log.write(time.monotonic(), JobEnded(outcome=outcome.outcome, step=outcome.step))
            if outcome.outcome == "preempted":
                raise Interrupted(signal.SIGTERM, self._tell_preempted(outcome.detail))
            outcome = self._with_hashes(outcome)
            self._await_scripts(outcome.members)
            return outcome

    def _await_scripts(self, members: tuple[WorkerId, ...]) -> None:
        """What scripts do behind their loop is theirs: it takes as long as it takes; who came too late has no such."""
        if not self.job.loops:
            return
        assert self._group is not None
        behind = {str(worker) for worker in members}
        for child in (child for child in self._group.living if child.name in behind):
            while not child.ended.wait(_LOOK_S):
                self._check_patience()
            if child.status:
                self._say(f"worker {child.name}: its script ended behind its loop: {describe_exit(child.status)}")

    def _delete_logs(self) -> None:
        """However the job has ended: nobody can replay from them any more."""
        spec = self._spec
        if spec is None or spec.logging is None:
            return
        shutil.rmtree(self._logs(spec.job_id), ignore_errors=True)
        if (url := self._logs_url(spec.job_id)) is not None:
            with contextlib.suppress(StorageError):  # it was told while the job ran, if the store is away
                store = open_store(url)
                for name in store.list():
                    store.delete(name)

    def _prepare(self, text: str, missing: tuple[WorkerId, ...] = (), of: int = 0) -> None:
        """Something begins, or has made progress, that has to be done before the first step."""
        now = time.monotonic()
        if self._preparing is None or self._preparing.text != text:
            self._prepared_since = now
        names = tuple(str(worker) for worker in missing)
        self._preparing = Preparing(text=text, done=of - len(names), of=of, missing=names)
        self._tell_preparing(now)

    def _tell_preparing(self, now: float) -> None:
        assert self._preparing is not None
        self._prepared_told = now
        self.on_event(replace_struct(self._preparing, waited_s=now - self._prepared_since))

    def _probe(self) -> Probed:
        if self.emulate is not None:
            return emulated_probe(self.job, self.emulate)
        entry = SCRIPT_PROBE if self.job.loops else PROBE
        probed = msgspec.json.decode(self._ask(entry, self.job, limit_s=self._start_s), type=Probed)
        if probed.job is not None:  # only its script knew how many steps and micro-batches it has
            self.job = probed.job
            self._check_faults()
        return probed

    def _plan(self, probed: Probed) -> _Planned:
        num_layers = probed.facts.layers
        profile = self.emulate or profile_of(self.job, num_layers)
        with self._interruptible():
            plan = healthy_plan(self.job, num_layers, profile, probed.ties)
            terms = terms_of(self.job, num_layers, profile, probed.ties)
            return _Planned(
                profile=profile,
                plan=plan,
                terms=terms,
                shapes=shapes_of(self.job, num_layers, profile, terms),
                keeping=keeping_of(self.job, num_layers, profile, probed.ties),
            )

    def _decide(self, planned: _Planned, probed: Probed) -> Decided:
        """Decides how the job recovers from the loss of a node: the processes are told what its file leaves open."""
        known = planned.profile or probed.sizes
        assert known is not None, "what is not emulated has sizes"
        with self._interruptible():
            return decided(self.job, planned.plan, known, restorable=self.resume is not None)

    @property
    def _start_s(self) -> float:
        return self.job.control.start_s

    @property
    def _checkpoints(self) -> str:
        return checkpoints_url(self.job, self.run_dir)

    def _find(self, probed: Probed) -> Found | None:
        """Finds the checkpoint to go on from, in a process of its own: that may take long, and Ctrl-C must work."""
        if self.resume is None and not self.job.checkpoint_every:
            return None
        self._prepare("looking for a checkpoint to go on from")
        answer = self._ask(FIND, self.job, self.resume, self._checkpoints, probed.facts, self.accept)
        found = msgspec.json.decode(answer, type=Found | None)
        if found is not None and self.resume is not None:
            self.resume, self._checkpoint = replace(self.resume, url=found.url, step=found.step), found.step
            self._check_faults_after(found.step)
        elif self.resume is not None:  # there was nothing to go on from
            self.resume = None
        return found

    def _check_faults_after(self, step: int) -> None:
        if self.resume is not None and self.resume.auto:  # the same command as before: what is over stays over
            self.faults = tuple(fault for fault in self.faults if fault.step >= step)
        for fault in self.faults:
            if fault.step < step:
                raise ConfigError(f"--fault {fault}: the run goes on from step {step}, earlier ones are not run again")

    def _open_log(self) -> EventLog:
        return EventLog(self.run_dir / "events.jsonl", complain=self._tell_once, keeps=True)

    def _say(self, line: str) -> None:
        self.on_event(Notice(worker="agent", text=line))

    def _tell_once(self, kind: str, text: str) -> None:
        """Says what is wrong, and that training goes on; once for each kind of trouble."""
        if kind not in self._told:
            self._told.add(kind)
            self.on_event(Notice(worker="agent", text=text))

    def _tell_resumed(self, log: EventLog, found: Found | None) -> None:
        if self.again and found is None and attempts(self.run_dir):
            text = "no attempt before this one left a checkpoint: begins anew"
            self._tell(log, Notice(worker="agent", text=text))
        if found is None or self.resume is None:
            return
        rejected = (CheckpointRejected(step=each.step, reason=each.reason) for each in found.rejected)
        self._tell(log, *rejected, Resumed(step=found.step, url=self.resume.url, notes=found.notes))

    def _tell(self, log: EventLog, *events: Event) -> None:
        for event in events:
            log.write(time.monotonic(), event)
            self.on_event(event)

    def _with_hashes(self, outcome: Outcome) -> Outcome:
        if outcome.outcome != "done":
            return outcome
        if self.emulate is not None:
            return replace(outcome, weights_sha256=_emulated_digest(Path(outcome.directory)))
        try:
            weights, state = self._digest_twice(outcome.directory).split()
        except HoldfastError as error:  # all is trained and saved: that must not be lost over them
            why = f"they could not be computed, in two tries: {one_line(str(error), _WHY)}"
            return replace(outcome, no_hashes=f"{why}; the layers are in {outcome.directory}")
        return replace(outcome, weights_sha256=weights, state_sha256=state)

    def _digest_twice(self, directory: str) -> str:
        """The hashes of what was trained; whatever goes wrong over them, it is tried once more."""
        try:
            return self._digest(directory)
        except HoldfastError as error:
            self._say(f"the hashes of what was trained: {one_line(str(error), _WHY)}; they are computed once more")
            return self._digest(directory)

    def _digest(self, directory: str) -> str:
        SERVER.start()
        self._server = SERVER.pid  # whoever was forked from the one before, had it died, is needed no more
        self._preparing = Preparing(text="computing the hashes of what was trained")
        self._prepared_since = self._prepared_told = time.monotonic()  # to be told of if it takes longer than a moment
        limit_s = self._start_s + _bytes_in(Path(directory)) / _HASHED_PER_S
        try:
            return self._ask(DIGEST, directory, limit_s=limit_s, overdue="gave no answer within {limit_s:.0f} s")
        finally:
            self._preparing = None

    def _check_faults(self) -> None:
        for fault in self.faults:
            self._check_target(fault)
            if fault.step >= self.job.train.steps and not self._to_be_told:
                raise ConfigError(f"--fault {fault}: the last step is {self.job.train.steps - 1}")

    @property
    def _to_be_told(self) -> bool:
        """Whether the job's script is yet to say how many steps it has."""
        return self.job.loops and self._server is None

    @property
    def _isolated(self) -> bool:
        return self.isolate or any(fault.kind is FaultKind.PARTITION for fault in self.faults)

    def _check_tls(self) -> None:
        tls = self.job.control.tls
        if tls is None:
            return
        if self._isolated:
            raise ConfigError(
                "control.tls: cannot be used with partition faults, whose networks have addresses of their own"
            )
        check_tls(tls, self.job.control.host)

    def _check_target(self, fault: Fault) -> None:
        sizes, spares = self.job.sizes, self.job.spares
        last_node = self._num_nodes() - 1
        if fault.node is not None and fault.node > last_node:
            raise ConfigError(f"--fault {fault}: there is no node {fault.node}; nodes are 0 to {last_node}")
        worker = fault.worker
        if worker is not None and not self.job.has(worker) and worker not in spares:
            last = (WorkerId(len(sizes) - 1, sizes[-1] - 1), *spares)[-1]
            raise ConfigError(f"--fault {fault}: there is no worker {worker}; workers are 0.0 to {last}")

    def _claim_directory(self) -> None:
        """Makes the run directory ours, for as long as we live; what an earlier attempt left there is set aside."""
        claim = self.claim or Claim(self.run_dir)
        try:
            claim.take()
            if self.again:
                claim.set_aside()
            else:
                claim.check_empty()
            make_private(self.run_dir)
            self._describe(self.run_dir / "job.yaml")
        except OSError as error:
            raise ConfigError(f"--run-dir {self.run_dir}: cannot be written: {error.strerror}") from None

    def _describe(self, path: Path) -> None:
        """Writes what is run, whole or not at all: with room on its disk, the same command finds nothing in its way."""
        write_private(path, dump_job(self.job).encode())
        try:
            if self.emulate is not None:
                write_private(self.run_dir / "profile.json", dump_profile(self.emulate))
        except OSError:
            path.unlink()
            raise

    def _started(self) -> JobStarted:
        return JobStarted(
            name=self.job.name,
            workers=self.job.num_workers,
            steps=self.job.train.steps,
            samples_per_step=self.job.samples_per_step,
            wall_time=time.time(),
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turns SIGINT and SIGTERM into Interrupted in the waiting thread; only where we are the main thread.

        One that is ignored, as SIGINT is in a job that a shell started in the background, stays so.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGTERM and self._waits_for_sigterm:  # a second one ends at once
                self._waits_for_sigterm = False
                self._inbox.put(_Preempt.BEGIN)
                return
            self._interrupted = Interrupted(number)
            self._inbox.put(self._interrupted)
            if self._thinking:
                raise self._interrupted

        numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Interrupts at once, wherever it may be, what takes long and holds nothing."""
        self._thinking = True
        try:
            self._raise_if_interrupted()
            yield
        finally:
            self._thinking = False

    @contextlib.contextmanager
    def _processes(self) -> Iterator[None]:
        """Whatever happens, ends every process that was started."""
        try:
            yield
        except BaseException:
            self._end_processes(grace_s=0.0)
            raise
        self._end_processes(grace_s=_GRACE_S)

    def _end_processes(self, grace_s: float) -> None:
        for child in self._children.end(grace_s):
            self.on_event(Notice(worker=child.name, text=f"its process {child.pid} cannot be ended, not even killed"))

    @contextlib.contextmanager
    def _library(self, coordinator: CoordinatorSpec) -> Iterator[None]:
        """Has plans made ahead meanwhile, in a process of its own that nobody waits for."""
        failures = tolerated(self.job)
        terms, folder = coordinator.terms, coordinator.library
        if terms is None or folder is None or not failures or slots_of(coordinator.plan) is None:  # it is not regular
            yield
            return
        spec = LibrarySpec(
            plan=coordinator.plan,
            terms=terms,
            failures=failures,
            folder=folder,
            events=coordinator.events,
        )
        child = self._fork(LIBRARY, spec)
        try:
            yield
        finally:
            self._children.kill(child)

    def _start(self, coordinator: CoordinatorSpec, ports: list[int], probed: Probed, log: EventLog) -> ControlClient:
        address = ",".join(f"{coordinator.host}:{port}" for port in ports)
        client = ControlClient(
            coordinator.socket or address,
            coordinator.token,
            hello=self._hello,
            on_command=self._on_command,
            on_closed=self._on_closed,
            reattach_s=self.job.control.reattach_s,
            clock=self._awake,
            tls=self.job.control.tls,
        )
        group = self._group = self._make_group(coordinator, address, probed, client.send, log)
        client.start()
        workers = coordinator.plan.workers
        self._prepare("starting workers", workers, len(workers))
        for worker in (*workers, *self.job.spares):
            group.start(worker)
        return client

    def _make_group(
        self,
        coordinator: CoordinatorSpec,
        address: str,
        probed: Probed,
        send: Callable[[Message], None],
        log: EventLog,
    ) -> WorkerGroup:
        plan, networks = coordinator.plan, self._networks
        nodes = self._nodes(plan)
        number = {worker: index for index, node in enumerate(nodes) for worker in node}
        return WorkerGroup(
            children=self._children,
            nodes=nodes,
            faults=self.faults,
            spec_of=lambda worker, faults, begins: WorkerSpec(
                worker=worker,
                job=coordinator.job,
                plan=plan,
                address=address,
                token=share(coordinator.token, str(worker)),
                events=str(self.run_dir / "events.jsonl"),
                boundaries=probed.boundaries,
                item=probed.item,
                faults=faults,
                emulate=self.emulate,
                namespace=None if networks is None else networks.node(number[worker]),
                checkpoints=self._checkpoints,
                resume=self.resume if begins else None,  # later its peers give it the state of the running job
                logs=None if coordinator.logging is None else str(self._logs(coordinator.job_id)),
                logs_url=self._logs_url(coordinator.job_id),
                nodes=nodes,
                job_id=coordinator.job_id,
                model=probed.facts.model,
                first_item=probed.first_item,
                witnesses=self._witnesses(plan),
                fellows=self._fellows(worker),
            ),
            entry=SCRIPT if self.job.loops else WORKER,
            send=send,
            cut=self._cut,
            log=log,
            grace_s=self.job.control.fence_grace_s,
        )

    def _witnesses(self, plan: Plan) -> tuple[WorkerId, ...]:
        struck = {fault.worker for fault in self.faults if fault.point is Point.GRADIENTS}
        return tuple(worker for worker in plan.workers if worker not in struck) if struck else ()

    def _fellows(self, worker: WorkerId) -> tuple[WorkerId, ...]:
        """Who is struck in the middle of the same sums as this one."""
        struck = [fault for fault in self.faults if fault.point is Point.GRADIENTS]
        steps = {fault.step for fault in struck if fault.worker == worker}
        return tuple(f.worker for f in struck if f.step in steps and f.worker is not None)

    def _nodes(self, plan: Plan) -> tuple[tuple[WorkerId, ...], ...]:
        return group_into_nodes((*plan.workers, *self.job.spares), self.job.grid.workers_per_node)

    def _logs(self, job_id: str) -> Path:
        """Where this job's logs are: nobody can read those of another one for its own."""
        folder = self.job.logging.directory
        return (self.run_dir / "logs" if folder is None else Path(folder)) / job_id

    def _logs_url(self, job_id: str) -> str | None:
        url = self.job.logging.url
        return None if url is None else f"{url.rstrip('/')}/{job_id}"

    def _coordinator_spec(self, job: Job, planned: _Planned, probed: Probed) -> CoordinatorSpec:
        return CoordinatorSpec(
            job=job,
            plan=planned.plan,
            terms=planned.terms,
            shapes=planned.shapes,
            keeping=planned.keeping,
            logging=self._logging(job, planned.plan),
            library=None if planned.terms is None else str(self.run_dir / "plans"),
            token=secrets.token_hex(32),
            job_id=secrets.token_hex(16),
            store=self._store(),
            events=str(self.run_dir / "events.jsonl"),
            directory=str(self.run_dir / "final"),
            port=self.job.control.port,
            faults=tuple(fault for fault in self.faults if fault.kind is FaultKind.KILL_COORDINATOR),
            namespace=None if self._networks is None else self._networks.hub,
            socket=None if self._networks is None else self._networks.open_door(self.run_dir),
            checkpoints=self._checkpoints,
            facts=probed.facts,
            resume=self.resume,
        )

    def _logging(self, job: Job, plan: Plan) -> Logging | None:
        """How what crosses nodes is logged; None if it is not. ``job``: as it was decided."""
        if job.logging.use != "on":
            return None
        return Logging(nodes=grouped(self._nodes(plan), job.logging.groups), helpers=job.logging.helpers)

    def _check_store(self) -> None:
        """Asks etcd, if decisions are to be there, before anything is made.

        Raises:
            ConfigError: there is no etcd.
        """
        if self.job.control.store == "sqlite":
            return
        host, port, _ = parse_store_url(self.job.control.store)
        try:
            Etcd(host=host, port=port).call("maintenance/status", {})
        except StorageError as error:
            raise ConfigError(f"control.store: {error}") from None

    def _store(self) -> str:
        """The database in the run directory, or a prefix of this run's own in etcd."""
        url = self.job.control.store
        if url == "sqlite":
            return str(self.run_dir / "control.db")
        host, port, prefix = parse_store_url(url)
        return f"etcd://{host}:{port}/{prefix}/{self.job.name}-{secrets.token_hex(8)}"

    def _start_coordinator_again(self, spec: CoordinatorSpec) -> int:
        """In less time than workers wait for it, so that one that hangs is found, and replaced, before they end."""
        return self._start_coordinator(spec, min(self._start_s, self.job.control.reattach_s / 2))

    def _start_coordinator(self, spec: CoordinatorSpec, limit_s: float) -> int:
        child, port = self._ask_and_keep(COORDINATOR, spec, limit_s=limit_s)
        ended = _CoordinatorEnded(child=child, spec=replace(spec, port=int(port)))

        def tell() -> None:
            child.ended.wait()
            self._inbox.put(ended)

        threading.Thread(target=tell, name="supervisor", daemon=True).start()
        return int(port)

    def _supervisor(self, log: EventLog) -> Supervisor[CoordinatorSpec]:
        control = self.job.control
        return Supervisor(
            start=self._start_coordinator_again,
            later=self._put_later,
            clock=time.monotonic,
            awake=self._awake,
            log=log,
            delay_s=control.restart_delay_s,
            patience_s=control.reattach_s,
            limit=RestartLimit(within_s=control.restart_window_s),
        )

    def _put_later(self, delay_s: float, item: StartAgain[CoordinatorSpec] | _Preempt) -> None:
        """Puts it into the inbox after a while; meanwhile whatever else comes is handled."""
        timer = threading.Timer(min(delay_s, threading.TIMEOUT_MAX), self._inbox.put, (item,))
        timer.daemon = True
        timer.start()

    def _num_nodes(self) -> int:
        """Those of the grid, which spares fill up, and as many as the other spares need."""
        workers = self.job.num_workers + self.job.resilience.spares
        return -(-workers // self.job.grid.workers_per_node)

    def _cut(self, node: int) -> None:
        """Takes a node's link down."""
        assert self._networks is not None
        self._networks.cut(node)

    def _heal(self, node: int) -> None:
        """Takes a node's link up again."""
        assert self._networks is not None
        self._networks.heal(node)

    def _ask(self, entry: Entry, *args: object, limit_s: float = math.inf, overdue: str = _LATE_START) -> str:
        """Starts a process and waits for its answer, as long as it lives and no signal comes."""
        return self._ask_and_keep(entry, *args, limit_s=limit_s, overdue=overdue)[1]

    def _ask_and_keep(
        self, entry: Entry, *args: object, limit_s: float, overdue: str = _LATE_START
    ) -> tuple[Child, str]:
        until = self._awake() + limit_s
        ours, theirs = FORKS.Pipe(duplex=False)
        with ours:
            with theirs:
                child = self._fork(entry, *args, theirs)
            while not ours.poll(_LOOK_S):
                self._check_patience()
                if self._awake() > until:
                    self._children.kill(child)
                    raise InternalError(f"the {child.name} {overdue.format(limit_s=limit_s)}")
            return child, self._answer_of(child, ours)

    def _fork(self, entry: Entry, *args: object) -> Child:
        child = self._children.start(entry, *args, name=entry.name)
        self._children.attend(child)
        return child

    def _check_patience(self) -> None:
        """To be called while something is waited for.

        Raises:
            Interrupted: a signal came.
            InternalError: what all others were forked from is gone, and they with it.
        """
        self._raise_if_interrupted()
        now = time.monotonic()
        if self._preparing is not None and now - self._prepared_told >= _TELL_S:
            self._tell_preparing(now)
        how = SERVER.died() or ("and was started again" if SERVER.pid != self._server else "")
        if how:
            raise InternalError(f"the fork server ended ({how}), and with it every process of the job")

    def _answer_of(self, child: Child, ours: Connection) -> str:
        try:
            kind, _, text = ours.recv_bytes().decode().partition(" ")
        except EOFError:
            child.ended.wait(_GRACE_S)
            self._check_patience()
            raise InternalError(f"the {child.name} ended without an answer: {describe_exit(child.status)}") from None
        if kind == "error":
            raise ConfigError(text)
        if kind != "ok":
            raise InternalError(text)
        return text

    def _raise_if_interrupted(self) -> None:
        if self._interrupted is not None:
            raise self._interrupted

    def _hello(self) -> Hello:
        assert self._group is not None
        return replace_struct(self._group.hello(), preempted=self._preempted)

    def _on_command(self, command: Command) -> None:
        """Takes a command, in the control thread; what a later hello must know of is noted at once."""
        if isinstance(command, StartWorker):
            assert self._group is not None
            self._group.expect(command.worker)
        self._inbox.put(command)

    def _on_closed(self, error: ConfigError | CoordinatorUnavailable | None) -> None:
        self._inbox.put(error or CoordinatorUnavailable("the coordinator closed the connection"))

    def _next(self) -> _Item:
        """What comes next; a signal, or the end of everybody, outranks whatever it may have caused."""
        while True:
            try:
                item = self._inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                item = None
            self._check_patience()
            if item is not None:
                return item

    def _preempt(self, log: EventLog) -> None:
        """SIGTERM: asks for one more checkpoint, and for the end of the job after it."""
        assert self._group is not None
        grace_s = self.job.checkpoint.on_sigterm
        text = f"SIGTERM: a checkpoint is made first, within {grace_s:g} s; another signal ends the job at once"
        self._tell(log, Notice(worker="agent", text=text))
        self._preempted = True
        self._group.send(Preempted())
        self._put_later(grace_s, _Preempt.GIVE_UP)

    def _given_up(self) -> Outcome:
        """The job ends without the checkpoint that was asked for."""
        detail = f"it was not written within {self.job.checkpoint.on_sigterm:g} s (checkpoint.on_sigterm)"
        return Outcome(outcome="preempted", detail=detail, step=self._checkpoint, directory="", generations=0)

    def _tell_preempted(self, detail: str) -> str:
        """What became of the checkpoint, and how to go on; ``detail`` says why there is none of the last steps."""
        last = f"the last is of step {self._checkpoint}" if self._checkpoint else "there is none"
        written = f"the checkpoint of step {self._checkpoint} is written"
        what = f"no checkpoint of the last steps, {detail}; {last}" if detail else written
        return f"{what}; go on with --run-dir {self.run_dir} --resume auto"

    def _watch(self, supervisor: Supervisor[CoordinatorSpec], log: EventLog) -> Outcome:
        """Follows the job until it ends."""
        assert self._group is not None
        self._waits_for_sigterm = bool(self.job.checkpoint_every and self.job.checkpoint.on_sigterm)
        try:
            return self._follow(self._group, supervisor, log)
        finally:
            self._waits_for_sigterm = False

    def _follow(self, group: WorkerGroup, supervisor: Supervisor[CoordinatorSpec], log: EventLog) -> Outcome:
        while True:
            match item := self._next():
                case _Preempt.BEGIN:
                    self._preempt(log)
                case _Preempt.GIVE_UP:
                    return self._given_up()
                case Gathered(missing=missing, of=of):
                    self._prepare("starting workers" if missing else "waiting for the first step", missing, of)
                case Told(news=news):
                    self._say(self._reporter.tell(news, time.monotonic()))
                case Progress():
                    self._preparing = None
                    if line := self._reporter.progressed(item, time.monotonic()):
                        self._say(line)
                    log.check()
                    self._last = item
                    self._checkpoint = max(self._checkpoint, item.checkpoint)
                    group.obey(item)
                    self.on_progress(item)
                case _CoordinatorEnded(child=child, spec=spec):
                    supervisor.on_ended(spec, child.status)
                case StartAgain():
                    supervisor.again(item)
                case Fence() | Strike():
                    group.obey(item)
                case StartWorker(worker=worker):
                    self._reporter.asked(str(worker), time.monotonic())
                    group.obey(item)
                case Remark(kind=kind, text=text):
                    self._tell_once(kind, text)
                case Ended():
                    if item.outcome == "preempted" and not item.detail:
                        self._checkpoint = item.step
                    return Outcome(
                        outcome=item.outcome,
                        detail=item.detail,
                        step=item.step,
                        directory=item.directory,
                        generations=item.generations,
                        lost_layers=item.lost_layers,
                        members=item.members,
                        last=self._last,
                        restarts=supervisor.deaths,
                        resumed_from=None if self.resume is None else self.resume.step,
                    )
                case CoordinatorUnavailable():
                    raise supervisor.gone(item)
                case Exception():
                    raise item
