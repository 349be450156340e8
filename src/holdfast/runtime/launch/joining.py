"""The agent of a further machine: finds the coordinator, learns what the job is, and supervises workers for it."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from holdfast.control.client import NOBODY, ask
from holdfast.control.coordinator import BRIEF
from holdfast.control.messages import Ended
from holdfast.control.reach import Reach
from holdfast.control.tls import check_node, check_tls
from holdfast.control.token import REFUSAL, of_attempt
from holdfast.core.nodes import NodeId
from holdfast.errors import ConfigError, CoordinatorUnavailable, HoldfastError, InternalError
from holdfast.parsing import parsing
from holdfast.runtime.hardening import make_private
from holdfast.runtime.launch.agents import agent_of, heard_of_leader, prepare_process, this_node
from holdfast.runtime.launch.briefing import Brief, Briefing
from holdfast.runtime.launch.directory import INTERRUPTED, JOB_ID, SUPERSEDED
from holdfast.runtime.launch.ending import JobOutcome, outcome_of
from holdfast.runtime.launch.ports import joined_ports
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.node.agent import LEFT, LEFT_JOB, NodeAgent
from holdfast.runtime.node.coordinators import Coordinators
from holdfast.runtime.node.entries import FIT
from holdfast.runtime.node.inbox import EventQueue
from holdfast.runtime.node.local import LOOK_S, Asking, LocalProcesses
from holdfast.runtime.node.signals import Signals
from holdfast.runtime.node.telling import Teller
from holdfast.runtime.specs import CoordinatorSpec, Fit
from holdfast.telemetry.clocks import this_clock
from holdfast.telemetry.events import Event, EventLog, JobEnded
from holdfast.telemetry.story import node_log
from holdfast.version import __version__

__all__ = ["Joiner", "JoinRequest"]

_STALE = 9
_ENDS_NO_RUN = ("preempted", INTERRUPTED)
"""Behind them another attempt is to go on, and the command that began the job sums nothing up either."""
_NEXT_S = 600.0
"""How long the next attempt may take to begin behind one that has ended, before that is held to be the last."""
_AGAIN_S = 0.5
"""Between two times that nobody listens yet."""


class _NextAttempt(Exception):
    """Another attempt at the job has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What was asked for: an agent that takes part in a job which was begun on another machine.

    Attributes:
        where: what ``find`` goes by, for people.
        find: returns how its coordinators are reached, or how the job has ended. Raises CoordinatorUnavailable while
            neither is known.
        slots: how many workers may run here, at least 1.
        node: the name of this machine, for people; empty: see :func:`holdfast.runtime.launch.agents.this_node`.
        host: the address that workers listen on; empty: that of the interface by which the coordinator is reached.
        patience_s: how long a coordinator may take to come.
    """

    where: str
    find: Callable[[], Reach | Ended]
    slots: int = 1
    node: str = ""
    host: str = ""
    patience_s: float = math.inf


@dataclass(slots=True, kw_only=True)
class Joiner:
    """Is the agent of this machine until the job has ended.

    Attributes:
        request: what was asked for.
        on_event: called with what is worth a line.
        on_led: called with how a job has ended that a coordinator on this machine has led to its end, and what was
            asked for where it was begun, with paths of this machine.
        shared_s: how long what was written on another machine may take to be seen here.
    """

    request: JoinRequest
    on_event: Callable[[Event], None] = lambda event: None
    on_led: Callable[[JobOutcome, RunRequest], None] = lambda outcome, request: None
    shared_s: float = 10.0
    _signals: Signals = field(default_factory=Signals)
    _reach: Reach | None = None
    """As it was found last."""
    _known: tuple[str, ...] = ()
    """Where there are coordinators, as far as any of them told us."""
    _teller: Teller = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is started yet."""
        self._teller = Teller(on_event=self.on_event)

    def run(self) -> Ended:
        """Takes part in the job to its end; no process of it is left on this machine when this returns or raises.

        Waits for the coordinator, as long as it may take to come. Where the run directory says that the job has ended
        the next attempt is waited for, but not for long.

        Raises:
            ConfigError: the token is refused, or this machine does not have what the job needs.
            CoordinatorUnavailable: there was none for as long as the job waits for one (``control.reattach_s``).
            Interrupted: a signal came.
        """
        prepare_process()
        with self._signals.answered():
            limit_s = self.request.patience_s
            while True:
                found = self._ask(limit_s)
                if isinstance(found, Ended):
                    return found
                reach, told = found
                brief = _read(told)
                limit_s = brief.briefing.job.control.reattach_s
                try:
                    return self._take_part(reach, brief, told, this_node(self.request.node))
                except _NextAttempt:
                    self._teller.say("the job was begun anew: its processes are ended, and it takes part in that")

    def _take_part(self, reach: Reach, brief: Brief, told: bytes, node: NodeId) -> Ended:
        """Does so once; whatever it has started is gone when this returns or raises.

        Raises:
            _NextAttempt: this one is over, and another one has begun.
        """
        self._enter(brief)
        briefing = self._own(reach, brief, node)
        start_s, slots = briefing.job.control.start_s, self.request.slots
        with contextlib.ExitStack() as stack:
            briefing = replace(briefing, heard=stack.enter_context(heard_of_leader()))
            local = LocalProcesses(start_s=start_s, signals=self._signals, teller=self._teller)
            stack.enter_context(contextlib.closing(local.awake))
            stack.enter_context(local.running())
            local.start_server()
            _check_fit(briefing, slots, local)
            keeps = briefing.events != briefing.request.events
            log = EventLog(briefing.events, complain=self._teller.say_once, keeps=keeps)
            stack.enter_context(contextlib.closing(log))
            ports, inbox = joined_ports(briefing, node, local.children, log, told), EventQueue()
            coordinators = Coordinators(local=local, inbox=inbox, control=briefing.job.control, log=log)
            agent = agent_of(
                briefing,
                ports,
                local,
                log,
                inbox,
                slots=slots,
                leaves=True,
                stand_by=partial(_stand_by, coordinators, ports.coordinator, self._teller),
            )
            coordinators.hopeless = agent.stand_down
            room = f"room for {slots} workers" if slots > 1 else "room for one worker"
            self._teller.say(f"node {node} takes part in job {briefing.job.name}, with {room}")
            try:
                with agent.attached():
                    ended = _followed(agent)
            except CoordinatorUnavailable:
                if (known := self._known_end()) is None:
                    raise
                return known
            finally:
                self._known = tuple(agent.addresses.split(","))
            if ended.outcome == LEFT:
                return ended
            if _is_current(briefing):
                log.write(time.monotonic(), JobEnded(outcome=ended.outcome, step=ended.step))
            led = ended.leader is not None and ended.leader.shares_agent(node) and ended.outcome not in _ENDS_NO_RUN
            outcome = outcome_of(briefing, ended, agent, coordinators.supervisor.deaths, hashes=led)
            if led and _is_current(briefing):
                self.on_led(outcome, briefing.request)
            return ended

    def _ask(self, limit_s: float) -> tuple[Reach, bytes] | Ended:
        """How a coordinator is reached, once there is one, and what it says of the job, unread.

        Or how the job has ended, if nobody begins it again for long.

        Raises:
            CoordinatorUnavailable: there was none for so long.
        """
        until, over = time.monotonic() + limit_s, math.inf
        self._teller.prepare(f"waiting for the coordinator at {self.request.where}")
        while True:
            try:
                found = self._found()
                told = b"" if isinstance(found, Ended) else ask(BRIEF, found)
            except CoordinatorUnavailable as error:
                over = math.inf
                if error.args and NOBODY not in str(error):
                    self._teller.say_once(str(error), str(error))
                if time.monotonic() > until:
                    raise
            else:
                if not isinstance(found, Ended):
                    self._teller.prepared()
                    return found, told
                self._teller.say_once("ended", f"the job has ended: {found.outcome}; the next attempt is waited for")
                over = min(over, time.monotonic() + _NEXT_S)
                if time.monotonic() > min(over, until):
                    return found
            self._pause(_AGAIN_S)

    def _found(self) -> Reach | Ended:
        """How coordinators are reached, those of which we were told before among them; or how the job has ended."""
        try:
            reach = self.request.find()
        except CoordinatorUnavailable:
            if self._reach is None:
                raise
            reach = self._reach
        if isinstance(reach, Ended):
            return reach
        self._reach = reach
        return replace(reach, addresses=",".join(dict.fromkeys((*self._known, *reach.addresses.split(",")))))

    def _known_end(self) -> Ended | None:
        """How the job has ended, if it has without us: we were on our way, or cut off.

        Raises:
            _NextAttempt: another one has begun.
        """
        with contextlib.suppress(CoordinatorUnavailable):
            found = self.request.find()
            if isinstance(found, Ended) and found.outcome == SUPERSEDED:
                raise _NextAttempt
            return found if isinstance(found, Ended) else None
        return None

    def _pause(self, seconds: float) -> None:
        """Waits a little; a signal ends that."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._signals.check()
            self._teller.remind()
            time.sleep(LOOK_S)

    def _enter(self, brief: Brief) -> None:
        """Goes to where the job was begun; what it writes must be seen by all machines.

        Raises:
            ConfigError: that is not to be had here.
        """
        if brief.holdfast != __version__:
            raise ConfigError(f"the job is run by Holdfast {brief.holdfast}, this is {__version__}; expected the same")
        try:
            os.chdir(brief.folder)
        except OSError as error:
            raise ConfigError(
                f"{brief.folder}, where the job was begun: {error.strerror}; expected the same folder on every machine"
            ) from None
        path, began = brief.briefing.request.run_dir / JOB_ID, time.monotonic()
        while (known := _text_of(path)) != brief.briefing.job_id:
            stale = _STALE if known else 1  # one of an attempt before may be remembered for longer than that none is
            if time.monotonic() > began + self.shared_s * stale:
                raise ConfigError(
                    f"--run-dir {path.parent}: is not that of the job on this machine; expected a directory that all "
                    "machines share, since trained layers are written there"
                )
            self._pause(_AGAIN_S)

    def _own(self, reach: Reach, brief: Brief, node: NodeId) -> Briefing:
        """The briefing, with what is this machine's own.

        Its processes write into the job's log if they have the clock by which that is written.
        """
        briefing = brief.briefing
        run_dir = briefing.request.run_dir
        events = briefing.request.events
        if brief.clock != (clock := this_clock()):
            events = node_log(run_dir, node, clock)
            make_private(events.parent)
        control = msgspec.structs.replace(briefing.job.control, tls=reach.tls)
        host = self.request.host or _address_towards(reach.addresses)
        if reach.tls is not None:
            check_tls(reach.tls, host)
            check_node(reach.tls, node.name)
        return replace(
            briefing,
            job=msgspec.structs.replace(briefing.job, control=control),
            token=of_attempt(reach.token, briefing.job_id),
            invitation=reach.token,
            address=reach.addresses,
            host=host,
            events=events,
        )


def _read(told: bytes) -> Brief:
    try:
        with parsing(ConfigError):
            return msgspec.msgpack.decode(told, type=Brief, dec_hook=lambda kind, value: kind(value))
    except HoldfastError as error:
        raise ConfigError(
            f"what the coordinator says of the job cannot be read by Holdfast {__version__}: {error}; expected the "
            "same version of it on every machine"
        ) from None


def _stand_by(coordinators: Coordinators, spec: CoordinatorSpec, teller: Teller) -> str:
    """Starts a coordinator on this machine; returns its address, "" if it cannot be started.

    It listens on the port on which the first one does, so that people know where, if that is free here.
    """
    for port in dict.fromkeys((spec.port, 0)):
        try:
            found = coordinators.start_soon(replace(spec, port=port))
        except (ConfigError, InternalError) as error:
            why = str(error)
        else:
            teller.say(f"a coordinator stands by at {spec.host}:{found}")
            return f"{spec.host}:{found}"
    teller.say(f"no coordinator stands by here: {why}")
    return ""


def _is_current(briefing: Briefing) -> bool:
    """Whether nobody has begun another attempt in the run directory: what lies there is that one's then."""
    return _text_of(briefing.request.run_dir / JOB_ID) == briefing.job_id


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _followed(agent: NodeAgent) -> Ended:
    """Does what the coordinator says to the end of the job.

    Raises:
        _NextAttempt: another one has begun: the coordinator knows us no more, or says so.
    """
    try:
        ended = agent.follow()
    except ConfigError as error:
        if REFUSAL not in str(error):
            raise
    else:
        if ended.outcome != SUPERSEDED:
            return ended
    if agent.group.leaves:
        return LEFT_JOB
    raise _NextAttempt


def _check_fit(briefing: Briefing, slots: int, local: LocalProcesses) -> None:
    """Checks that workers here do what all others do.

    Raises:
        ConfigError: they would compute other bits, or run another script, or have no GPU each.
    """
    job, probed = briefing.job, briefing.probed
    if not probed.arithmetic:
        return
    answer = local.ask(FIT, job, slots, probed.facts.sources, asking=Asking(limit_s=job.control.start_s))
    fit = msgspec.json.decode(answer, type=Fit)
    if job.train.device == "cuda" and slots > fit.gpus:
        raise ConfigError(f"--slots {slots}: {fit.gpus} GPUs are visible, and each worker is to have one of its own")
    if job.train.numerics == "exact" and fit.arithmetic != probed.arithmetic:
        raise ConfigError(
            f"this machine computes by {fit.arithmetic}; that where the job was begun by {probed.arithmetic}: with "
            "train.numerics exact all have to compute the same bits. Expected the same (ATEN_CPU_CAPABILITY, set "
            "everywhere, lowers the last word to what all processors have)"
        )


def _address_towards(coordinator: str) -> str:
    """The address of the interface by which the coordinator is reached.

    Raises:
        ConfigError: it is not reached.
    """
    for address in coordinator.split(","):
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0) as probe:
            return str(probe.getsockname()[0])
    raise ConfigError(f"--host: the coordinator at {coordinator} does not answer any more; expected an address of ours")
