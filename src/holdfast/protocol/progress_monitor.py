"""How a worker moves along: what its heartbeats say of that, and by which it is judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from holdfast.control.messages import Heartbeat
from holdfast.core.work import Busy
from holdfast.protocol.effects import (
    Asked,
    Build,
    Consulted,
    Drain,
    Fetched,
    Flush,
    Listen,
    ScoresAwaited,
    Written,
)
from holdfast.protocol.executor import FinishReduce, Take
from holdfast.protocol.worker import WorkerProtocol

__all__ = ["WAITS", "ProgressMonitor", "heartbeat"]

WAITS = (Asked, Listen, Build, ScoresAwaited, Take, FinishReduce, Drain, Fetched, Written, Flush, Consulted)
"""Effects for which a worker waits for others, or for a script to come back to its loop."""


class _Present(NamedTuple):
    """What goes on: waiting for others, or work; and since when, by both clocks. Made twice for each effect."""

    waiting: bool
    since: float
    awake_since: float
    doing: Busy = Busy.COMPUTING


class _Phase(AbstractContextManager[None]):
    """Within it the present work is of one kind; behind it, it is computing."""

    __slots__ = ("_doing", "_monitor")

    def __init__(self, monitor: ProgressMonitor, doing: Busy) -> None:
        self._monitor, self._doing = monitor, doing

    def __enter__(self) -> None:
        self._monitor.turn_to(self._doing)

    def __exit__(self, *raised: object) -> None:
        self._monitor.turn_to(Busy.COMPUTING)


class ProgressMonitor:
    """How the worker moves along, for its heartbeats: written by the thread that works, read by another.

    Where operations are handed to another thread, such as a script's, and that is waited for, it is that one.

    Args:
        awake: seconds that this process has run: a pause makes nothing slow.
        excused_s: for how long one thing may take longer by ``clock``: held locks of Python look like pauses.
        clock: seconds, monotonic.

    Attributes:
        loading: a context in which an item's data are loaded.
        compiles_unseen: whether a model is compiled, and nobody tells when.
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
        self.compiles_unseen = False
        self.loading = _Phase(self, Busy.LOADING)
        self._slowest_s = dict.fromkeys(Busy, 0.0)
        self._present = _Present(True, clock(), awake())
        self._part = (self._present, self._present)

    def move(self, *, waiting: bool) -> None:
        """Something was done; what comes next is waiting for others, or work."""
        part, now, awake = self._now(), self._clock(), self._awake()
        if not part.waiting:
            self._note(part, now, awake)
        self.moves += 1
        self._present = _Present(waiting, now, awake)  # at once: the reader never sees work that began with a wait

    def turn_to(self, doing: Busy) -> None:
        """The present work is of this kind from now on, until it is done; while we wait for others, it is none of ours.

        Cost: as :meth:`move`.
        """
        present = self._present
        if present.waiting:
            return
        now, awake = self._clock(), self._awake()
        self._note(self._now(), now, awake)
        self._part = (present, _Present(False, now, awake, doing))  # of no other work, should that have begun just now

    def _now(self) -> _Present:
        """What goes on: the present work, or the part of it that was turned to."""
        (of, part), present = self._part, self._present
        return part if of is present else present

    def _note(self, part: _Present, now: float, awake: float) -> None:
        self._slowest_s[part.doing] = max(self._slowest_s[part.doing], self._spent_s(part, now, awake))

    def compute(self) -> None:
        """An operation begins; the first one of a worker that only took part so far is as slow as any first."""
        if not self.computed:
            self.computed, self.warm = True, False

    def cool_down(self) -> None:
        """What comes is as slow as at the start: an engine is built; and so is its first operation."""
        self.warm = self.computed = False

    def warm_up(self) -> None:
        """The first step is done: what things took in it says nothing of those that follow."""
        self.warm, self._slowest_s = True, dict.fromkeys(Busy, 0.0)

    @property
    def slowest_s(self) -> float:
        """The longest that it ever computed without a break."""
        return self._slowest_s[Busy.COMPUTING]

    def busy_s(self) -> float:
        """For how long the present work goes on; 0 while waiting."""
        return self.busy()[1]

    def busy(self) -> tuple[Busy, float, float]:
        """Returns what keeps us busy, for how long (0 while waiting), and the longest of that kind that there was.

        Where it cannot be seen when a model is compiled, that is in the first operations.
        """
        part = self._now()
        slowest_s = self._slowest_s[part.doing]
        if part.waiting:
            return part.doing, 0.0, slowest_s
        unseen = self.compiles_unseen and not self.warm and part.doing is Busy.COMPUTING
        busy_s = max(self._spent_s(part, self._clock(), self._awake()), 1e-6)
        return Busy.COMPILING if unseen else part.doing, busy_s, slowest_s

    def _spent_s(self, part: _Present, now: float, awake: float) -> float:
        """How long it goes on, without the pauses in it; those of more than ``excused_s`` count all the same."""
        return max(awake - part.awake_since, now - part.since - self._excused_s)


def heartbeat(protocol: WorkerProtocol, monitor: ProgressMonitor) -> Heartbeat:
    """Returns what a worker tells of its progress, in any thread."""
    execution = protocol.execution
    doing, busy_s, slowest_s = monitor.busy()
    return Heartbeat(
        worker=protocol.worker,
        generation=protocol.generation,
        step=execution.step if execution else 0,
        op=len(execution.ops) if execution else 0,
        moves=monitor.moves,
        busy_s=busy_s,
        slowest_s=max(slowest_s, 1e-6) if monitor.warm else 0.0,
        doing=doing,
    )
