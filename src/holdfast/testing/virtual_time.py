"""Virtual time: what is to happen, in order, and processes that are stopped for a while."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.testing.scenario import Pause, Range

__all__ = ["Sleep", "VirtualTime"]


class VirtualTime:
    """Seconds that pass when nothing is left to do in them.

    Args:
        seed: of every delay that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._channels: dict[object, float] = defaultdict(float)

    def draw(self, limits: Range) -> float:
        """Returns a delay between these limits."""
        return self.random.uniform(*limits)

    def after(self, delay: float, act: Callable[[], None], channel: object = None) -> None:
        """Lets ``act`` happen later; on one channel, in order."""
        moment = self.now + delay
        if channel is not None:
            moment = self._channels[channel] = max(moment, self._channels[channel])
        self.at(moment, act)

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Lets ``act`` happen at a moment that is not over; what is to happen at one moment, in the order told."""
        heapq.heappush(self._queue, (moment, next(self._counter), act))

    def go_on(self) -> bool:
        """Lets the next thing happen; returns whether there was one."""
        if not self._queue:
            return False
        self.now, _, act = heapq.heappop(self._queue)
        act()
        return True


@dataclass(slots=True)
class Sleep:
    """For how long a process has been stopped so far, until when it is, and by which pause so long.

    Attributes:
        time: that passes meanwhile.
        fired: told of the pause that held something up.
    """

    time: VirtualTime
    fired: Callable[[str], None]
    _total_s: float = 0.0
    _until: float = 0.0
    _by: Pause | None = None

    def fall(self, pause: Pause) -> None:
        """It is stopped."""
        now = self.time.now
        until = now + pause.lasts_s
        if until > self._until:
            self._total_s += until - max(self._until, now)
            self._until, self._by = until, pause

    def awake_s(self) -> float:
        """For how long it has run."""
        return max(self.time.now, self._until) - self._total_s

    def puts_off(self, act: Callable[[], None]) -> bool:
        """Whether the process is stopped; then it acts as soon as it goes on."""
        if self.time.now >= self._until:
            return False
        self.fired(str(self._by))
        self.time.at(self._until, act)
        return True
