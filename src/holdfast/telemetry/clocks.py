"""The clocks of several machines: which one a process has, and what one of them showed when another showed a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path

from holdfast.telemetry.events import ClockCompared

__all__ = ["WINDOW_S", "Clocks", "is_clock", "this_clock"]

WINDOW_S = 60.0
"""Clocks are compared once in so many seconds at least, and the better comparisons of that time count."""

_Reading = tuple[float, float, float]
"""What one clock shows, in seconds; how far another is ahead of it then; how far off that may be."""


def this_clock() -> str:
    """Returns what tells the monotonic clock of this process from those of other machines: 12 hexadecimal digits.

    It is of one start of one kernel, and of one time namespace there.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = 0
    with contextlib.suppress(OSError):  # kernels before 5.6 have none
        namespace = os.stat("/proc/self/ns/time").st_ino
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:12]


def is_clock(text: str) -> bool:
    """Returns whether this can be the name of a clock."""
    return re.fullmatch(r"[0-9a-f]{12}", text, re.ASCII) is not None


class Clocks:
    """What is known of clocks by comparisons: of two that were never compared, by those with others between them."""

    def __init__(self) -> None:
        self._readings: dict[str, dict[str, list[_Reading]]] = defaultdict(dict)

    def learn(self, time: float, compared: ClockCompared) -> None:
        """Takes a comparison: ``time`` is what ``compared.mine`` showed."""
        mine, other, ahead = compared.mine, compared.other, compared.ahead_s
        self._add(mine, other, (time, ahead, compared.within_s))
        self._add(other, mine, (time + ahead, -ahead, compared.within_s))

    def _add(self, mine: str, other: str, reading: _Reading) -> None:
        known = self._readings[mine].setdefault(other, [])
        number = bisect(known, reading)
        if number and known[number - 1][0] > reading[0] - WINDOW_S and known[number - 1][2] >= 2 * reading[2]:
            number -= 1
            del known[number]  # its better is here
        known.insert(number, reading)

    def way(self, clock: str, to: str) -> tuple[str, ...] | None:
        """Returns the clocks over which the times of one are told by another, from one to the other; None: by none."""
        ways: dict[str, tuple[str, ...]] = {clock: (clock,)}
        ahead = deque([clock])
        while ahead and to not in ways:
            here = ahead.popleft()
            for each in self._readings.get(here, {}):
                if each not in ways:
                    ways[each] = (*ways[here], each)
                    ahead.append(each)
        return ways.get(to)

    def told(self, time: float, way: Iterable[str]) -> float:
        """Returns what the last of these clocks showed when the first one showed ``time``; see :meth:`way`."""
        here, *further = way
        for each in further:
            time += _ahead(self._readings[here][each], time)
            here = each
        return time


def _ahead(readings: list[_Reading], time: float) -> float:
    """How far the other clock is ahead at a time: between two readings by both, since clocks drift."""
    number = bisect(readings, (time,))
    if number in (0, len(readings)):
        return readings[min(number, len(readings) - 1)][1]
    (before, first, _), (after, then, _) = readings[number - 1 : number + 1]
    return first + (then - first) * (time - before) / (after - before)
