"""The agent of a further machine: finds the coordinator, learns what the job is, and supervises workers for it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from holdfast.config.job import Tls
from holdfast.control.client import ask_brief
from holdfast.control.messages import Ended
from holdfast.errors import ConfigError, CoordinatorUnavailable, HoldfastError
from holdfast.parsing import parsing
from holdfast.runtime.hardening import make_private
from holdfast.runtime.launch.agents import Supervising, prepare_process, this_node
from holdfast.runtime.launch.briefing import Brief, Briefing, boot_id
from holdfast.runtime.launch.directory import JOB_ID
from holdfast.runtime.launch.ending import await_scripts
from holdfast.runtime.launch.ports import around_group
from holdfast.runtime.node.entries import ARITHMETIC
from holdfast.runtime.node.inbox import EventQueue
from holdfast.runtime.node.local import LOOK_S, Asking, LocalProcesses
from holdfast.runtime.node.signals import Signals
from holdfast.runtime.node.telling import Teller
from holdfast.telemetry.events import Event, EventLog
from holdfast.version import __version__

__all__ = ["Joiner", "JoinRequest"]

_AGAIN_S = 0.5
"""Between two times that nobody listens yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What was asked for: an agent that takes part in a job which was begun on another machine.

    Attributes:
        coordinator: ``host:port``; several joined by commas.
        token: the job's.
        slots: how many workers may run here, at least 1.
        node: the name of this machine, for people; empty: see :func:`holdfast.runtime.launch.agents.this_node`.
        host: the address that workers listen on; empty: that of the interface by which the coordinator is reached.
        tls: certificates; None: connections are in the clear.
    """

    coordinator: str
    token: str = field(repr=False)
    slots: int = 1
    node: str = ""
    host: str = ""
    tls: Tls | None = None


@dataclass(slots=True, kw_only=True)
class Joiner:
    """Is the agent of this machine until the job has ended.

    Attributes:
        request: what was asked for.
        on_event: called with what is worth a line.
    """

    request: JoinRequest
    on_event: Callable[[Event], None] = lambda event: None
    _signals: Signals = field(default_factory=Signals)
    _teller: Teller = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is started yet."""
        self._teller = Teller(on_event=self.on_event)

    def run(self) -> Ended:
        """Takes part in the job to its end; no process of it is left on this machine when this returns or raises.

        Waits for the coordinator, however long it takes to come.

        Raises:
            ConfigError: the token is refused, or this machine does not have what the job needs.
            CoordinatorUnavailable: there was none for as long as the job waits for one (``control.reattach_s``).
            Interrupted: a signal came.
        """
        prepare_process()
        node = this_node(self.request.node)
        with self._signals.answered():
            brief = self._ask()
            _enter(brief)
            briefing = self._own(brief, node.name)
            with contextlib.ExitStack() as stack:
                local = LocalProcesses(start_s=briefing.job.control.start_s, signals=self._signals, teller=self._teller)
                stack.enter_context(contextlib.closing(local.awake))
                stack.enter_context(local.running())
                local.start_server()
                _check_arithmetic(briefing, local)
                keeps = briefing.events != briefing.request.events
                log = EventLog(briefing.events, complain=self._teller.say_once, keeps=keeps)
                stack.enter_context(contextlib.closing(log))
                agent = Supervising(
                    briefing=briefing,
                    node=node,
                    slots=self.request.slots,
                    node_of=lambda worker: node,
                    workers=local.children,
                    around=around_group(briefing, log),
                    local=local,
                    log=log,
                    inbox=EventQueue(),
                    gone=lambda error: error,
                ).agent()
                room = f"room for {self.request.slots} workers" if self.request.slots > 1 else "room for one worker"
                self._teller.say(f"node {node} takes part in job {briefing.job.name}, with {room}")
                with agent.attached():
                    ended = agent.follow()
                if ended.outcome == "done" and briefing.job.loops:
                    await_scripts(ended.members, agent.group.newest, local)
                return ended

    def _ask(self) -> Brief:
        """What the coordinator says of the job, once there is one."""
        request = self.request
        self._teller.prepare(f"waiting for the coordinator at {request.coordinator}")
        while True:
            with contextlib.suppress(CoordinatorUnavailable):
                told = ask_brief(request.coordinator, request.token, request.tls)
                self._teller.prepared()
                return _read(told)
            until = time.monotonic() + _AGAIN_S
            while time.monotonic() < until:
                self._signals.check()
                self._teller.remind()
                time.sleep(LOOK_S)

    def _own(self, brief: Brief, name: str) -> Briefing:
        """The briefing, with what is this machine's own.

        Its processes write into the job's log if they have the clock by which that is written.
        """
        request, briefing = self.request, brief.briefing
        run_dir = briefing.request.run_dir
        events = briefing.request.events
        if brief.boot != boot_id():
            folder = run_dir / f"node-{re.sub(r'[^A-Za-z0-9._-]', '-', name)}"
            make_private(folder)
            events = folder / events.name
        control = msgspec.structs.replace(briefing.job.control, tls=request.tls)
        return replace(
            briefing,
            job=msgspec.structs.replace(briefing.job, control=control),
            token=request.token,
            address=request.coordinator,
            host=request.host or _address_towards(request.coordinator),
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


def _enter(brief: Brief) -> None:
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
    path = brief.briefing.request.run_dir / JOB_ID
    try:
        known = path.read_text()
    except OSError as error:
        known = error.strerror or ""
    if known != brief.briefing.job_id:
        raise ConfigError(
            f"--run-dir {path.parent}: is not that of the job on this machine; expected a directory that all machines "
            "share, since trained layers are written there"
        )


def _check_arithmetic(briefing: Briefing, local: LocalProcesses) -> None:
    """Checks that workers here compute the bits that all others do.

    Raises:
        ConfigError: they would not.
    """
    job, theirs = briefing.job, briefing.probed.arithmetic
    if job.train.numerics != "exact" or not theirs:
        return
    ours = local.ask(ARITHMETIC, job, asking=Asking(limit_s=job.control.start_s))
    if ours != theirs:
        raise ConfigError(
            f"this machine computes by {ours}; that where the job was begun by {theirs}: with train.numerics exact all "
            "have to compute the same bits. Expected the same (ATEN_CPU_CAPABILITY, set everywhere, lowers the last "
            "word to what all processors have)"
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
