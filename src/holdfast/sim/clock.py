"""Virtual time: what it is, what is ordered for later, and what stands between now and whatever comes next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from holdfast.sim.ledger import Ledger, Part

__all__ = ["Clock"]


class Clock:
    """The time of one simulated job; every second that passes is booked.

    Attributes:
        now: seconds since the job began.
        ledger: where they went.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger = Ledger()
        self._due: deque[tuple[Part, float, Callable[[], None]]] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    # --- what stands still for it -------------------------------------------------------------------------------------

    @property
    def owes(self) -> bool:
        """Whether something is to be paid before anything else goes on."""
        return bool(self._due)

    def owe(self, part: Part, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        """Nothing else goes on for so long; behind all that is owed already."""
        self._due.append((part, seconds, then))

    def forgive(self) -> None:
        """Give up what is owed; what was paid of it stays booked."""
        self._due.clear()

    def pay(self, seconds: float) -> None:
        """Let time pass for what is owed first, at most so many seconds; once it is paid, what comes then is done."""
        part, owed, then = self._due[0]
        self.advance(part, min(owed, seconds))
        if seconds < owed:
            self._due[0] = (part, owed - seconds, then)
            return
        self._due.popleft()
        then()

    def advance(self, part: Part, seconds: float) -> None:
        """Let time pass for something."""
        self.ledger.book(part, seconds)
        self.now += seconds

    # --- what goes on beside it ---------------------------------------------------------------------------------------

    @property
    def next_moment(self) -> float:
        """When something that was ordered for later comes; infinity if nothing was."""
        return self._later[0][0] if self._later else math.inf

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Order something for so much later."""
        self.at(self.now + seconds, act)

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Order something for a moment; what is ordered for the same one is done in the order of being ordered."""
        heappush(self._later, (moment, next(self._numbers), act))

    def do_what_is_due(self) -> None:
        """Do all that was ordered for now, or before."""
        while self._later and self._later[0][0] <= self.now:
            heappop(self._later)[2]()
