"""The processes of a job on this machine: started, asked, waited for with patience, and ended."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

from holdfast.control.awake import AwakeClock
from holdfast.errors import ConfigError, InternalError, describe_exit
from holdfast.runtime.node.children import Child, Children
from holdfast.runtime.node.entries import EntryPoint
from holdfast.runtime.node.forks import FORKS, SERVER, ForkedProcess, Patience
from holdfast.runtime.node.signals import Signals
from holdfast.runtime.node.telling import Teller
from holdfast.telemetry.events import Notice

__all__ = ["LOOK_S", "Asking", "LocalProcesses"]

LOOK_S = 0.05
"""How often whoever waits looks whether a signal came."""
_GRACE_S = 1.5
_LATE_START = "did not start within {limit_s:g} s (control.start_s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How long an answer may take.

    Attributes:
        limit_s: seconds.
        overdue: what is said of a process that has not answered then.
    """

    limit_s: float = math.inf
    overdue: str = _LATE_START


@dataclass(slots=True, kw_only=True)
class LocalProcesses:
    """All processes of a job on this machine.

    Attributes:
        start_s: how long a process may take to start.
        signals: what ends the job, whatever is waited for.
        teller: says what is waited for.
        awake: seconds that this process has run.
        children: the processes.
    """

    start_s: float
    signals: Signals
    teller: Teller
    awake: AwakeClock = field(default_factory=AwakeClock)
    children: Children = field(init=False)
    _server: int | None = None

    def __post_init__(self) -> None:
        """All are forked with one patience."""
        patience = Patience(limit_s=self.start_s, key="control.start_s", check=self.check)
        self.children = Children(process=partial(ForkedProcess, patience=patience))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Whatever happens, ends every process that was started."""
        try:
            yield
        except BaseException:
            self._end(grace_s=0.0)
            raise
        self._end(grace_s=_GRACE_S)

    def _end(self, grace_s: float) -> None:
        for child in self.children.end(grace_s):
            text = f"its process {child.pid} cannot be ended, not even killed"
            self.teller.on_event(Notice(worker=child.name, text=text))

    def start_server(self, loads: tuple[str, ...] = ()) -> None:
        """Starts what all others are forked from; whoever was forked from one before it, had that died, is not needed.

        Args:
            loads: modules that most of them need, besides what all do.

        Raises:
            InternalError: it does not start.
        """
        SERVER.loads = loads
        SERVER.start()
        self._server = SERVER.pid

    def start(self, entry: EntryPoint, *args: object) -> Child:
        """Starts a process that nobody waits for."""
        child = self.children.start(entry, *args, name=entry.name)
        self.children.attend(child)
        return child

    def ask(self, entry: EntryPoint, *args: object, asking: Asking = Asking()) -> str:
        """Starts a process and waits for its answer, as long as it lives and no signal comes.

        Raises:
            ConfigError: it says so.
            InternalError: it says so, ends without an answer, or gives none in time.
            Interrupted: a signal came.
        """
        return self.ask_and_keep(entry, *args, asking=asking)[1]

    def ask_and_keep(self, entry: EntryPoint, *args: object, asking: Asking) -> tuple[Child, str]:
        """As :meth:`ask`, of a process that goes on then; returns that, too."""
        until = self.awake() + asking.limit_s
        ours, theirs = FORKS.Pipe(duplex=False)
        with ours:
            with theirs:
                child = self.start(entry, *args, theirs)
            while not ours.poll(LOOK_S):
                self.check()
                if self.awake() > until:
                    self.children.kill(child)
                    raise InternalError(f"the {child.name} {asking.overdue.format(limit_s=asking.limit_s)}")
            return child, self._answer_of(child, ours)

    def _answer_of(self, child: Child, ours: Connection) -> str:
        try:
            kind, _, text = ours.recv_bytes().decode().partition(" ")
        except EOFError:
            child.ended.wait(_GRACE_S)
            self.check()
            raise InternalError(f"the {child.name} ended without an answer: {describe_exit(child.status)}") from None
        if kind == "error":
            raise ConfigError(text)
        if kind != "ok":
            raise InternalError(text)
        return text

    def check(self) -> None:
        """To be called while something is waited for.

        Raises:
            Interrupted: a signal came.
            InternalError: what all others were forked from is gone, and they with it.
        """
        self.signals.check()
        self.teller.remind()
        how = SERVER.died() or ("and was started again" if SERVER.pid != self._server else "")
        if how:
            raise InternalError(f"the fork server ended ({how}), and with it every process of the job")
