"""How a worker moves along: what its heartbeats say of that, and by which it is judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from holdfast.control.messages import Heartbeat
from holdfast.protocol.effects import (
    Asked,
    Build,
    Consulted,
    Drain,
    Fetched,
    Flush,
    Listen,
    Written,
)
from holdfast.protocol.executor import FinishReduce, Take
from holdfast.protocol.worker import WorkerProtocol

__all__ = ["WAITS", "Pace", "heartbeat"]

WAITS = (Asked, Listen, Build, Take, FinishReduce, Drain, Fetched, Written, Flush, Consulted)
"""Effects for which a worker waits for others, or for a script to come back to its loop."""


class _Present(NamedTuple):
    """What goes on: waiting for others, or work; and since when, by both clocks. Made twice for each effect."""

    waiting: bool
    since: float
    awake_since: float


class Pace:
    """How the worker moves along, for its heartbeats: written by the thread that works, read by another.

    Args:
        awake: seconds that this process has run: a pause makes nothing slow.
        excused_s: for how long one thing may take longer by ``clock``: held locks of Python look like pauses.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        awake: Callable[[], float] = time.monotonic,
        excused_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._awake, self._excused_s, self._clock = awake, excused_s, clock
        self.moves = 0
        self.warm = False
        self.computed = False
        self.slowest_s = 0.0
        self._present = _Present(True, clock(), awake())

    def move(self, *, waiting: bool) -> None:
        """Something was done; what comes next is waiting for others, or work."""
        present, now, awake = self._present, self._clock(), self._awake()
        if not present.waiting:
            self.slowest_s = max(self.slowest_s, self._spent_s(present, now, awake))
        self.moves += 1
        self._present = _Present(waiting, now, awake)  # at once: the reader never sees work that began with a wait

    def compute(self) -> None:
        """An operation begins; the first one of a worker that only took part so far is as slow as any first."""
        if not self.computed:
            self.computed, self.warm = True, False

    def cool_down(self) -> None:
        """What comes is as slow as at the start: an engine is built; and so is its first operation."""
        self.warm = self.computed = False

    def warm_up(self) -> None:
        """The first step is done: what things took in it says nothing of those that follow."""
        self.warm, self.slowest_s = True, 0.0

    def busy_s(self) -> float:
        """For how long the present work goes on; 0 while waiting."""
        present = self._present
        return 0.0 if present.waiting else max(self._spent_s(present, self._clock(), self._awake()), 1e-6)

    def _spent_s(self, present: _Present, now: float, awake: float) -> float:
        """How long it goes on, without the pauses in it; those of more than ``excused_s`` count all the same."""
        return max(awake - present.awake_since, now - present.since - self._excused_s)


def heartbeat(protocol: WorkerProtocol, pace: Pace) -> Heartbeat:
    """Returns what a worker tells of its progress, in any thread."""
    execution = protocol.execution
    return Heartbeat(
        worker=protocol.worker,
        generation=protocol.generation,
        step=execution.step if execution else 0,
        op=len(execution.ops) if execution else 0,
        moves=pace.moves,
        busy_s=pace.busy_s(),
        slowest_s=max(pace.slowest_s, 1e-6) if pace.warm else 0.0,
    )
