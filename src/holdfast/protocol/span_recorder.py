"""What a worker does in a step besides computing: waits for sums, updates, and audits; recorded for its log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.core.faults import Point
from holdfast.core.schedule import Op
from holdfast.protocol.executor import AuditSample, FinishReduce, Reach, StepCommitted

__all__ = ["SpanRecorder", "add_span", "resident_bytes"]


@dataclass(slots=True)
class SpanRecorder:
    """Watches the effects of a protocol: what lies between two of them is work of the stage.

    Attributes:
        clock: seconds, monotonic.
        spans: see :class:`holdfast.telemetry.events.StepOps`.
    """

    clock: Callable[[], float] = time.monotonic
    spans: list[tuple[str, tuple[int, ...], float, float]] = field(default_factory=list)
    _resumed: float = 0.0
    _began: float = 0.0
    _updating: float | None = None
    _updates: bool = False

    def yielded(self, effect: object) -> None:
        """The protocol wants this done; until now, since the one before was done, the stage was at work."""
        self._began = self.clock()
        if isinstance(effect, Reach) and effect.point is Point.UPDATE:
            self._updating, self._updates = self._resumed, True
        elif isinstance(effect, FinishReduce | StepCommitted) and self._updating is not None:
            self.spans.append(("update", (), self._updating, self._began))
            self._updating = None

    def performed(self, effect: object) -> None:
        """It is done."""
        self._resumed = self.clock()
        if isinstance(effect, AuditSample):
            self.spans.append(("audit", (effect.layer,), self._began, self._resumed))
        if isinstance(effect, FinishReduce):
            self.spans.append(("reduce", effect.reduction.layers, self._began, self._resumed))
            if self._updates:  # of a staggered step: the sum is applied at once
                self._updating = self._resumed

    def clear(self) -> None:
        """Forgets a step, at its end or as it is given up."""
        self.spans.clear()
        self._updating, self._updates = None, False


def add_span(spans: list[tuple[str, int, int, float, float]], op: Op, start: float, end: float) -> None:
    """Notes that an operation, or the next part of one, was run; see `StepOps.ops`."""
    name = (op.kind.value, op.microbatch.pipeline, op.microbatch.index)
    if spans and spans[-1][:3] == name:
        start = spans.pop()[3]
    spans.append((*name, start, end))


def resident_bytes() -> int:
    """Returns how much of this process is in memory; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
