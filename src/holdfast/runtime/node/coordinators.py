"""The coordinators of a job that run on this machine: started, watched, and started again when they have died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from holdfast.config.job import Control
from holdfast.errors import ConfigError, InternalError
from holdfast.runtime.node.children import Child
from holdfast.runtime.node.entries import COORDINATOR, EntryPoint
from holdfast.runtime.node.inbox import EventQueue
from holdfast.runtime.node.local import Asking, LocalProcesses
from holdfast.runtime.node.supervision import RestartLimit, StartAgain, Supervisor
from holdfast.runtime.specs import CoordinatorSpec
from holdfast.telemetry.events import EventLog

__all__ = ["Coordinators"]


@dataclass(slots=True, kw_only=True)
class Coordinators:
    """Starts coordinators and, in the thread that empties the inbox, sees to those that have ended.

    Attributes:
        local: starts processes.
        inbox: is told what to do when one has ended.
        control: how long they may take, and how often they may die.
        log: the job's events.
        entry: what runs in their processes.
        hopeless: told if one cannot be kept alive; None: then the job ends here.
        supervisor: judges their deaths.
    """

    local: LocalProcesses
    inbox: EventQueue
    control: Control
    log: EventLog
    entry: EntryPoint = COORDINATOR
    hopeless: Callable[[str], None] | None = None
    supervisor: Supervisor[CoordinatorSpec] = field(init=False)

    def __post_init__(self) -> None:
        """None has died."""
        self.supervisor = Supervisor(
            start=self.start_soon,
            later=self._later,
            clock=time.monotonic,
            awake=self.local.awake,
            log=self.log,
            delay_s=self.control.restart_delay_s,
            patience_s=self.control.reattach_s,
            limit=RestartLimit(within_s=self.control.restart_window_s),
        )

    def start(self, spec: CoordinatorSpec) -> int:
        """Starts one; returns the port that it listens on.

        Raises:
            ConfigError: it cannot listen.
            InternalError: it ends first, or does not start in time.
            Interrupted: a signal came.
        """
        return self._start(spec, self.control.start_s)

    def start_soon(self, spec: CoordinatorSpec) -> int:
        """As :meth:`start`, in less time than workers wait for one: one that hangs is found, and replaced, before."""
        return self._start(spec, min(self.control.start_s, self.control.reattach_s / 2))

    def _start(self, spec: CoordinatorSpec, limit_s: float) -> int:
        child, port = self.local.ask_and_keep(self.entry, spec, asking=Asking(limit_s=limit_s))
        again = replace(spec, port=int(port), again=True)
        threading.Thread(target=self._tell_end, args=(child, again), name="supervisor", daemon=True).start()
        return int(port)

    def _tell_end(self, child: Child, again: CoordinatorSpec) -> None:
        child.ended.wait()
        self.inbox.put(partial(self._see_to, partial(self.supervisor.on_ended, again, child.status)))

    def _later(self, delay_s: float, again: StartAgain[CoordinatorSpec]) -> None:
        self.inbox.put_later(delay_s, partial(self._see_to, partial(self.supervisor.again, again)))

    def _see_to(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (ConfigError, InternalError) as error:
            if self.hopeless is None:
                raise
            self.hopeless(str(error))
