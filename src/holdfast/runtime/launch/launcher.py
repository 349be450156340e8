"""The launcher: looks a job over, starts its processes on this machine, and sees that none is left at the end."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from holdfast.config.job import HuggingFaceModel, Job
from holdfast.config.load import is_loopback
from holdfast.control.chain.opening import DATABASE, chain_of_attempt, is_database, try_store
from holdfast.control.messages import Ended, Progress
from holdfast.control.tls import check_node, check_tls
from holdfast.control.token import of_attempt
from holdfast.errors import ConfigError, NodeLeft, StorageError
from holdfast.runtime.hardening import write_private
from holdfast.runtime.isolation import Networks
from holdfast.runtime.launch.agents import agent_of, heard_of_leader, prepare_process, this_node
from holdfast.runtime.launch.briefing import Briefing
from holdfast.runtime.launch.directory import INTERRUPTED, JOB_ID, TOKEN, end_attempt, take_directory, token_in
from holdfast.runtime.launch.ending import (
    JobOutcome,
    delete_logs,
    outcome_of,
    tell_preempted,
)
from holdfast.runtime.launch.ports import Ports, ports_of
from holdfast.runtime.launch.preflight import Machine, PreflightFindings, decide, going_on, preflight
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.launch.tracked import tracked
from holdfast.runtime.node.agent import LEFT, NodeAgent
from holdfast.runtime.node.coordinators import Coordinators
from holdfast.runtime.node.entries import FIND, LIBRARY, PROBE, SCRIPT_PROBE
from holdfast.runtime.node.inbox import EventQueue
from holdfast.runtime.node.local import Asking, LocalProcesses
from holdfast.runtime.node.signals import Interrupted, Signals
from holdfast.runtime.node.telling import Teller
from holdfast.runtime.rundir import RunDirLock, attempts
from holdfast.runtime.specs import Found, Probed, emulated_probe
from holdfast.settings.planning import profile_of
from holdfast.telemetry.clocks import this_clock
from holdfast.telemetry.events import (
    CheckpointRejected,
    Event,
    EventLog,
    JobEnded,
    JobStarted,
    Notice,
    Resumed,
    Scheduled,
)
from holdfast.trackers.named import check_names

__all__ = ["Launcher"]

_LATE_ITEM = "had not run its script's first item within {limit_s:g} s (control.start_s, load_s and compile_s together)"


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Runs one job on this machine.

    Attributes:
        request: what was asked for.
        claim: of the run directory; whoever gives it closes it. None: it is ours while this process lives.
        on_event: called with what is worth a line: what is done before the first step and after the last (Preparing,
            every second while it goes on), how a lost node's layers are to come back (Chosen), a worker that is lost or
            has come, a checkpoint that was rejected, something that cannot be written.
        on_progress: called after every step; both are called in the thread that runs the job, which waits.
    """

    request: RunRequest
    claim: RunDirLock | None = None
    on_event: Callable[[Event], None] = lambda event: None
    on_progress: Callable[[Progress], None] = lambda progress: None
    _signals: Signals = field(default_factory=Signals)
    _teller: Teller = field(init=False)
    _local: LocalProcesses = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is started yet."""
        self._teller = Teller(on_event=self.on_event)
        start_s = self.request.job.control.start_s
        self._local = LocalProcesses(start_s=start_s, signals=self._signals, teller=self._teller)

    def run(self) -> JobOutcome:
        """Trains to the end, whatever dies; no process of the job is left when this returns or raises.

        Raises:
            ConfigError: the user's input cannot be used.
            Interrupted: a signal came that ends a job.
            NodeLeft: the workers of this machine were told to go, and have; the job goes on on others.
            InternalError: the job cannot go on for a reason of ours.
        """
        prepare_process()
        preflight(self.request, Machine()).check()
        self._check_machine()
        with self._signals.answered():
            try:
                return self._run()
            except Exception:
                self._signals.check()  # whatever went wrong may have come of it
                raise

    def _check_machine(self) -> None:
        """Looks for trackers and certificates, and tries out where decisions are to be kept, before anything is made.

        Raises:
            ConfigError: there are none, or that cannot be used.
        """
        control = self.request.job.control
        check_names(self.request.job.track, "track:")
        if control.tls is not None:
            check_tls(control.tls, control.host)
            check_node(control.tls, this_node().name)
        if control.store not in ("auto", "sqlite"):
            _try_store(control.store)

    def _run(self) -> JobOutcome:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(self._local.awake))
            last = stack.enter_context(contextlib.ExitStack())  # once no process is left
            networks = stack.enter_context(self._networks())
            stack.enter_context(self._local.running())
            named = isinstance(self.request.job.model, HuggingFaceModel)
            self._local.start_server(("holdfast.runtime.preload_transformers",) if named else ())
            machine, findings = self._plan()
            request, found = self._find(machine)
            with self._signals.interruptible():
                decision = decide(request, machine, findings)
            briefing = _briefing(request, decision.job, machine, findings)
            self._teller.prepare("starting the coordinator")
            take_directory(request, self.claim or RunDirLock(request.run_dir))
            if request.job.control.store == "auto" and request.store != "sqlite":
                _try_store(request.store)
            stack.enter_context(self._tracked())
            log = stack.enter_context(contextlib.closing(self._open_log()))
            told = (*_warned(findings), *_scheduled(findings), *self._on_resume(found), decision.chosen)
            self._teller.tell(log, _started(request), *told)
            last.callback(delete_logs, briefing)
            _open_to_others(briefing)
            if request.slots is not None:
                briefing = replace(briefing, heard=stack.enter_context(heard_of_leader()))
            try:
                return self._train(briefing, ports_of(briefing, this_node(), self._local.children, log, networks), log)
            except NodeLeft:
                last.pop_all()  # what was made for the job is the others' now
                raise

    def _tracked(self) -> contextlib.AbstractContextManager[None]:
        """Has trackers told, from the beginning to the end of the log."""
        return tracked(
            self.request.run_dir,
            self.request.job.track,
            self._teller.say,
            waits=lambda: self._teller.prepare("waiting for trackers"),
            interrupted=lambda: self._signals.interrupted is not None,
        )

    @contextlib.contextmanager
    def _networks(self) -> Iterator[Networks | None]:
        if not self.request.isolated:
            yield None
            return
        with Networks(self.request.num_nodes) as networks:
            yield networks

    def _open_log(self) -> EventLog:
        return EventLog(self.request.events, complain=self._teller.say_once, keeps=True)

    # --- before it begins ---------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[Machine, PreflightFindings]:
        """Tries the job out and finds that it can begin; from now on its request says all that its script does."""
        self._teller.prepare("loading PyTorch and trying out the model")
        probed = self._probe()
        if probed.job is not None:  # only its script knew how many steps it has, and the probe which device
            self.request = replace(self.request, job=probed.job)
        self._teller.prepare("planning")
        with self._signals.interruptible():
            profile = self.request.emulate or profile_of(self.request.job, probed.facts.layers)
            machine = Machine(probed=probed, profile=profile, processors=self._shared_processors())
            findings = preflight(self.request, machine)
        findings.check()
        return machine, findings

    def _shared_processors(self) -> int | None:
        """How many there are of what workers compute on and share; None where each has its own, or sleeps.

        Of machines that are yet to come nothing is known.
        """
        device = self.request.job.train.device
        if self.request.emulate is not None or device == "cuda" or self.request.begin_elsewhere:
            return None
        return len(os.sched_getaffinity(0)) if device == "cpu" else 1

    def _probe(self) -> Probed:
        job, control = self.request.job, self.request.job.control
        if self.request.emulate is not None:
            return emulated_probe(job, self.request.emulate)
        here = max(1, min(self.request.begin_here, job.most_workers))
        if job.loops:  # its first item is loaded, compiled and run there
            limit_s = control.start_s + control.load_s + control.compile_s
            answer = self._local.ask(SCRIPT_PROBE, job, here, asking=Asking(limit_s=limit_s, overdue=_LATE_ITEM))
        else:
            answer = self._local.ask(PROBE, job, here, asking=Asking(limit_s=control.start_s))
        return msgspec.json.decode(answer, type=Probed)

    def _find(self, machine: Machine) -> tuple[RunRequest, Found | None]:
        """Finds the checkpoint to go on from, in a process of its own: that may take long, and Ctrl-C must work."""
        request = self.request
        assert machine.probed is not None, "it was tried out"
        if request.resume is None and not request.job.checkpoint_every:
            return request, None
        self._teller.prepare("looking for a checkpoint to go on from")
        answer = self._local.ask(
            FIND, request.job, request.resume, request.checkpoints, machine.probed.facts, request.accept
        )
        found = msgspec.json.decode(answer, type=Found | None)
        return going_on(request, found), found

    def _on_resume(self, found: Found | None) -> Iterator[Event]:
        """What a run that could go on from a checkpoint has found."""
        if self.request.again and found is None and attempts(self.request.run_dir):
            yield Notice(worker="agent", text="no attempt before this one left a checkpoint: begins anew")
        if found is None or self.request.resume is None:
            return
        for each in found.rejected:
            yield CheckpointRejected(step=each.step, reason=each.reason)
        yield Resumed(step=found.step, url=found.url, notes=found.notes)

    # --- while it trains ----------------------------------------------------------------------------------------------

    def _train(self, briefing: Briefing, ports: Ports, log: EventLog) -> JobOutcome:
        """Starts coordinators and workers and follows the job to its end."""
        inbox, control, spec = EventQueue(), briefing.job.control, ports.coordinator
        coordinators = Coordinators(local=self._local, inbox=inbox, control=control, log=log, entry=ports.entry)
        invites = briefing.request.slots is not None
        numbers = [coordinators.start(spec) for _ in range(1 if invites else control.coordinators)]
        address = ",".join(f"{spec.host}:{number}" for number in numbers)
        briefing = replace(briefing, address=address)
        self._invite(briefing)
        agent = self._agent(briefing, ports, coordinators, log)
        with self._ending_elsewhere(briefing), agent.attached():
            workers = briefing.planned.plan.workers
            if elsewhere := briefing.request.begin_elsewhere:
                self._teller.prepare(f"waiting for agents with room for {elsewhere} more workers")
            else:
                self._teller.prepare("starting workers", workers, len(workers))
            with self._library(briefing):
                ended = agent.follow()
                if ended.outcome != LEFT:
                    return self._end(briefing, agent, ended, coordinators.supervisor.deaths, log)
        raise NodeLeft(ended.detail)

    @contextlib.contextmanager
    def _ending_elsewhere(self, briefing: Briefing) -> Iterator[None]:
        """Whoever ends this process by a signal ends the job: no coordinator of another machine goes on with it.

        But for a notice, if at such a one this machine is to leave: the others go on, and have lost it.
        """
        try:
            try:
                yield
            except Exception:
                self._signals.check()  # whatever went wrong may have come of it
                raise
        except Interrupted as interrupted:
            request, meant = briefing.request, interrupted.signal_number == signal.SIGINT
            if request.slots is not None and not is_database(briefing.store) and (meant or not request.leaves):
                try:
                    end_attempt(briefing.store, INTERRUPTED, str(interrupted), briefing.begins)
                except StorageError as error:
                    self._teller.say(f"the job may go on on other machines, end its agents there: {error}")
            raise

    def _agent(self, briefing: Briefing, ports: Ports, coordinators: Coordinators, log: EventLog) -> NodeAgent:
        checkpoint = briefing.job.checkpoint
        return agent_of(
            briefing,
            ports,
            self._local,
            log,
            coordinators.inbox,
            slots=briefing.request.begin_here,
            coordinators=tuple(briefing.address.split(",")),
            gone=coordinators.supervisor.gone,
            notice_s=checkpoint.on_sigterm if briefing.job.checkpoint_every else 0.0,
            leaves=briefing.request.leaves,
            on_progress=self.on_progress,
        )

    def _invite(self, briefing: Briefing) -> None:
        """Says how agents of other machines come, if they may."""
        request = briefing.request
        if request.slots is None:
            return
        command = ["holdfast", "agent", "--coordinator", briefing.address]
        if not request.token:
            command += ["--token-file", str(request.run_dir.absolute() / TOKEN)]
        elsewhere = request.begin_elsewhere
        who = f"{elsewhere} of {request.job.num_workers} workers begin" if elsewhere else "workers can come"
        if address := _own_alone(request.job.control.host):
            self._teller.say(
                f"--listen {request.job.control.host}: is {address} on this machine, where no other one reaches it; "
                "expected an address of its network"
            )
        alone = is_loopback(request.job.control.host)
        where = "elsewhere on this machine (--listen lets others in)" if alone else "on other machines"
        self._teller.say(f"{who} {where}, by: {shlex.join(command)} --slots N")

    @contextlib.contextmanager
    def _library(self, briefing: Briefing) -> Iterator[None]:
        """Has plans made ahead meanwhile, in a process of its own that nobody waits for."""
        if (spec := briefing.library()) is None:
            yield
            return
        child = self._local.start(LIBRARY, spec)
        try:
            yield
        finally:
            self._local.children.kill(child)

    def _end(self, briefing: Briefing, agent: NodeAgent, ended: Ended, restarts: int, log: EventLog) -> JobOutcome:
        request = briefing.request
        log.write(time.monotonic(), JobEnded(outcome=ended.outcome, step=ended.step))
        if ended.outcome == "preempted":
            told = tell_preempted(ended.detail, agent.checkpoint, request.run_dir)
            raise Interrupted(self._signals.notice or signal.SIGTERM, told)
        return outcome_of(briefing, ended, agent, restarts)


def _own_alone(host: str) -> str:
    """The address of a host's name, if no other machine reaches that, as some systems have it of their own; or ""."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
        return address if is_loopback(address) and not is_loopback(host) else ""
    return ""


def _open_to_others(briefing: Briefing) -> None:
    """Leaves in the run directory what agents of other machines need, if they may come: before they can ask."""
    request = briefing.request
    if request.slots is None:
        return
    try:
        write_private(request.run_dir / JOB_ID, briefing.job_id.encode())
        if request.token:
            (request.run_dir / TOKEN).unlink(missing_ok=True)  # of an attempt before
        else:
            write_private(request.run_dir / TOKEN, briefing.invitation.encode())
    except OSError as error:
        raise ConfigError(f"--run-dir {request.run_dir}: cannot be written: {error.strerror}") from None


def _try_store(url: str) -> None:
    """Raises ConfigError if decisions cannot be kept there."""
    try:
        try_store(url)
    except StorageError as error:
        raise ConfigError(f"control.store: {error}; sqlite does, without coordinators on other machines") from None


def _started(request: RunRequest) -> JobStarted:
    return JobStarted(
        name=request.job.name,
        workers=request.job.num_workers,
        steps=request.job.train.steps,
        samples_per_step=request.job.samples_per_step,
        wall_time=time.time(),
        clock=this_clock(),
    )


def _warned(findings: PreflightFindings) -> Iterator[Event]:
    for text in findings.warnings:
        yield Notice(worker="probe", text=text)


def _scheduled(findings: PreflightFindings) -> Iterator[Event]:
    planned = findings.planned
    if planned is not None and planned.why:
        train = planned.job.train
        yield Scheduled(technique=train.technique, in_flight=train.in_flight, why=planned.why)


def _briefing(request: RunRequest, job: Job, machine: Machine, findings: PreflightFindings) -> Briefing:
    assert machine.probed is not None, "it was tried out"
    assert findings.planned is not None, "else there are errors"
    invitation, job_id = request.token or _invitation(request.run_dir), secrets.token_hex(16)
    return Briefing(
        request=request,
        job=_settled(request, job),
        probed=machine.probed,
        planned=findings.planned,
        token=of_attempt(invitation, job_id),
        invitation=invitation,
        job_id=job_id,
        store=_store(request, job_id),
        deadline=_deadline(request),
        host=job.control.host,
        events=request.events,
    )


def _invitation(run_dir: Path) -> str:
    """The token of attempts before this one, which agents may know, or one that nobody knows."""
    with contextlib.suppress(ConfigError):
        return token_in(run_dir)
    return secrets.token_hex(32)


def _settled(request: RunRequest, job: Job) -> Job:
    """The job, in which it is said where decisions are kept and how many coordinators there are."""
    control = msgspec.structs.replace(job.control, store=request.store, coordinators=request.coordinators)
    return msgspec.structs.replace(job, control=control)


def _store(request: RunRequest, job_id: str) -> str:
    """The database in the run directory, or a chain of this attempt's own in what all machines share."""
    if request.store == "sqlite":
        return str(request.run_dir / DATABASE)
    return chain_of_attempt(request.store, request.job.name, job_id)


def _deadline(request: RunRequest) -> float:
    limit = request.job.train.time_limit
    return math.inf if limit is None else time.time() + limit
