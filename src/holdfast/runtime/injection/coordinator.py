"""Scheduled deaths of the coordinator, put around its decider's ports: at named points of what it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.control.decider import Decider, Outside
from holdfast.control.membership import Membership, Output, Phase, StoredDecision, Tell
from holdfast.control.messages import Install
from holdfast.core.faults import Fault, Point
from holdfast.errors import StorageError
from holdfast.telemetry.events import EventLog, FaultInjected, read_events

__all__ = ["CoordinatorInjector", "still_due", "strike_coordinator"]


def _none() -> int:
    return -1


class CoordinatorInjector:
    """Kills this process where a fault says so.

    ``start`` strikes when the step begins, as far as the coordinator has heard. The points of a recovery strike in the
    first one that begins in that step, or in the one before, since the last commit may not have been told yet; what
    faults of workers have noted in the log was so, however late the coordinator hears of it.

    Args:
        faults: of the coordinator.
        log: told before a fault takes effect.
        clock: seconds, monotonic.
        noted: the newest step in which a fault of a worker was noted; -1 before the first.
    """

    def __init__(
        self, faults: tuple[Fault, ...], log: EventLog, clock: Callable[[], float], noted: Callable[[], int] = _none
    ) -> None:
        self._faults = faults
        self._log = log
        self._clock = clock
        self._noted = noted
        self._installing: Membership | None = None

    def put_around(self, decider: Decider) -> None:
        """From now on strikes the process in which this decides."""
        decider.on_point = self.reach
        decider.outside = _StruckOutside(decider.outside, self)

    def due(self, point: Point, membership: Membership) -> Fault | None:
        """Returns the fault that strikes at ``point`` in this state; None if none does."""
        waiting = [fault for fault in self._faults if fault.point is point]
        if not waiting or (point is Point.START and membership.phase is not Phase.RUNNING):
            return None
        if point is Point.COPY and not membership.catching_up:
            return None
        reached = _step(membership)
        if point is not Point.START:
            reached = max(reached, self._noted()) + 1
        return next((fault for fault in waiting if fault.step <= reached), None)

    def reach(self, point: Point, membership: Membership) -> None:
        """Dies, if that is due; in the middle of sending a plan a moment later, if one is sent."""
        if point is Point.INSTALL:
            self._installing = membership
        elif fault := self.due(point, membership):
            self.strike(fault)

    def in_installing(self) -> Fault | None:
        """Returns the fault that strikes once half of the workers are told the plan that is about to be sent."""
        return None if self._installing is None else self.due(Point.INSTALL, self._installing)

    def strike(self, fault: Fault) -> None:
        """Dies."""
        injected = FaultInjected(
            worker="coordinator", kind=fault.kind, step=fault.step, point=fault.point, spec=str(fault)
        )
        if self._log.write(self._clock(), injected):  # else our successor would not know of it, and strike again
            os.kill(os.getpid(), signal.SIGKILL)


def _step(membership: Membership) -> int:
    """The step that runs, as far as we heard; -1 before the first generation."""
    if membership.generation == 0:
        return -1
    return max(membership.forming.resume_step, membership.last_step + 1)


@dataclass(frozen=True, slots=True)
class _StruckOutside:
    """See Outside; if our death is due in the middle of sending a plan, half of it goes out before."""

    inner: Outside
    injector: CoordinatorInjector

    def send(self, outputs: Sequence[Output]) -> None:
        told = [output for output in outputs if isinstance(output, Tell) and isinstance(output.command, Install)]
        fault = self.injector.in_installing() if told else None
        if fault is None:
            return self.inner.send(outputs)
        return self.inner.send_last(told[: len(told) // 2], partial(self.injector.strike, fault))

    def send_last(self, outputs: Sequence[Output], die: Callable[[], None]) -> None:
        self.inner.send_last(outputs, die)

    def store(self, decision: StoredDecision) -> None:
        self.inner.store(decision)

    def look_at(self, awake_s: float | None) -> None:
        self.inner.look_at(awake_s)


def strike_coordinator(faults: tuple[Fault, ...], decider: Decider) -> None:
    """Puts a coordinator's faults around its decider, in this process; not those that have struck one before it."""
    log = decider.log
    assert isinstance(log, EventLog), "a process writes into the job's log"
    if due := still_due(faults, log.path, decider.note):
        CoordinatorInjector(due, log, decider.clock, partial(_noted, log.path)).put_around(decider)


def _noted(events: Path) -> int:
    """The newest step in which a worker was struck: it was there, though no commit before may have been told yet."""
    try:
        told = [event for _, event in read_events(events) if isinstance(event, FaultInjected)]
    except StorageError:
        return -1  # as far as we heard, then
    return max((event.step for event in told if event.worker != "coordinator"), default=-1)


def still_due(faults: tuple[Fault, ...], events: Path, note: Callable[[str], None]) -> tuple[Fault, ...]:
    """Returns the faults that have not struck a coordinator before this one.

    None, if the log cannot be read: what has struck already must not strike each coordinator anew.

    Args:
        faults: all that are scheduled.
        events: the job's log.
        note: writes a line down.
    """
    try:
        told = read_events(events)
    except StorageError as error:
        note(f"faults of the coordinator are left out: {error}")
        return ()
    fired = {event.spec for _, event in told if isinstance(event, FaultInjected)}
    return tuple(fault for fault in faults if str(fault) not in fired)
