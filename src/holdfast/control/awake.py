"""A clock of the time in which this process ran: that for which it was stopped or starved does not count.

A thread sleeps a tenth of a second, again and again. What it wakes too late is time in which nothing of this process
ran, whatever the reason: SIGSTOP, a frozen container, a paused virtual machine, a machine without a processor to spare.
(The clock of the processor would say as much of a process that waits, or is stuck; that of the boot knows suspends
only.) A thread that holds Python's lock looks the same; whoever must not excuse that for ever says for how long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["AwakeClock", "AwakeTime"]

SLEEP_S = 0.1
LATE_S = 0.1
"""A wake-up may be so late before it tells of a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwakeTime:
    """How long a process has run, as far as its sleeper knows.

    Attributes:
        awake_s: seconds that it had run when the sleeper woke last.
        woke_at: when that was, in seconds of a monotonic clock.
    """

    awake_s: float
    woke_at: float

    def at(self, now: float) -> float:
        """Returns how long it has run at ``now``: until the sleeper says more, no longer than it sleeps.

        Of two readings the later one is never less, whether the sleeper woke in between or not.
        """
        return self.awake_s + min(max(0.0, now - self.woke_at), SLEEP_S + LATE_S)

    def wake(self, now: float) -> AwakeTime:
        """Returns the value once the sleeper has woken at ``now``."""
        return AwakeTime(awake_s=self.at(now), woke_at=now)


class AwakeClock:
    """Seconds that this process has run since the clock was made; once read, costs ten short wake-ups a second.

    May be read in any thread. In a forked process it goes on from where it was, with a sleeper of that process's own.
    Once closed it stands still.

    Args:
        clock: seconds that pass while we are stopped, too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._time = AwakeTime(awake_s=0.0, woke_at=clock())
        self._sleepers: dict[int, threading.Thread] = {}
        self._closed = False

    def __call__(self) -> float:
        """Returns the seconds so far."""
        if os.getpid() not in self._sleepers:
            self._watch()
        return self._time.at(self._clock())  # the value is read before the clock, so it is never ahead of it

    def close(self) -> None:
        """Ends the sleeper, within a tenth of a second."""
        self._closed = True

    def _watch(self) -> None:
        """Starts the sleeper of this process, once, whoever else tries; no lock, which a fork could leave taken."""
        sleeper = threading.Thread(target=self._sleep, name="awake", daemon=True)
        if self._sleepers.setdefault(os.getpid(), sleeper) is sleeper:
            sleeper.start()

    def _sleep(self) -> None:
        while not self._closed:
            time.sleep(SLEEP_S)
            self._time = self._time.wake(self._clock())
