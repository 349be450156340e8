"""Scheduled deaths of the coordinator, at named points of what it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from holdfast.control.membership import Membership, Phase
from holdfast.core.faults import Fault, Point
from holdfast.telemetry.events import EventLog, FaultInjected

__all__ = ["CoordinatorInjector"]


class CoordinatorInjector:
    """Kills this process where a fault says so.

    ``start`` strikes when the step begins, as far as the coordinator has heard. The points of a recovery strike in the
    first one that begins in that step, or in the one before, since the last commit may not have been told yet.

    Args:
        faults: of the coordinator.
        log: told before a fault takes effect.
        clock: seconds, monotonic.
    """

    def __init__(self, faults: tuple[Fault, ...], log: EventLog, clock: Callable[[], float]) -> None:
        self._faults = faults
        self._log = log
        self._clock = clock

    def due(self, point: Point, membership: Membership) -> Fault | None:
        """Returns the fault that strikes at ``point`` in this state; None if none does."""
        slack = 0 if point is Point.START else 1
        step = _step(membership)
        if point is Point.START and membership.phase is not Phase.RUNNING:
            return None
        if point is Point.COPY and not membership.catching_up:
            return None
        return next((f for f in self._faults if f.point is point and f.step <= step + slack), None)

    def reach(self, point: Point, membership: Membership) -> None:
        """Dies, if that is due."""
        fault = self.due(point, membership)
        if fault is None:
            return
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
