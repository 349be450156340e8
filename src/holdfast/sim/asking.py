"""When whoever may know of something better is asked."""

from __future__ import annotations

from holdfast.control.membership import Membership, Phase, Situation
from holdfast.sim.clock import Clock

__all__ = ["Asking"]

_TICK_S = 0.1
"""After so long, on average, a coordinator asks; it would do so every 0.2 s (control/coordinator.py)."""


class Asking:
    """Soon after something has changed, then after twice as long, each time.

    What does not pay yet may pay later: the longer nothing fails, the longer nothing is expected to fail.

    Args:
        clock: on which the next time is noted.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked: tuple[int, Situation] | None = None
        self._next_at = self._wait_s = 0.0

    def is_due(self, state: Membership) -> bool:
        """Return whether it is time to ask; the next time is another one then."""
        if state.phase is not Phase.RUNNING or self._clock.owes:
            return False
        about = state.generation, state.situation
        if about != self._asked:
            self._asked, self._wait_s = about, _TICK_S
            self._wait()
        if self._clock.now < self._next_at:
            return False
        self._wait_s *= 2
        if state.situation.absent or state.situation.going or state.situation.spares:
            self._wait()
        return True

    def _wait(self) -> None:
        self._next_at = self._clock.now + self._wait_s
        self._clock.at(self._next_at, lambda: None)
