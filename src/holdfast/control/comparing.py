"""How the clocks of agents on other machines differ from ours, by the round trips of pulses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from holdfast.control.messages import Pulsed
from holdfast.telemetry.clocks import WINDOW_S, is_clock
from holdfast.telemetry.events import ClockCompared, Timed

__all__ = ["Comparing"]


@dataclass(slots=True)
class Comparing:
    """What is worth a line of all answers to pulses: the best of a minute, and sooner if one is twice as good.

    Attributes:
        mine: our clock, see :func:`holdfast.telemetry.clocks.this_clock`.
    """

    mine: str
    _told: dict[str, tuple[float, ClockCompared]] = field(default_factory=dict)
    """Of each clock, when we told of it last, and what."""
    _best: dict[str, tuple[float, ClockCompared]] = field(default_factory=dict)
    """Of each clock, the best comparison since then."""

    def heard(self, answer: Pulsed, now_s: float) -> Timed | None:
        """Returns what is to be told, if anything, when an answer has come: by our clock, as ``now_s`` is."""
        within_s = (now_s - answer.sent_s) / 2
        middle_s = answer.sent_s + within_s
        ahead_s = answer.now_s - middle_s
        if answer.clock == self.mine or not (within_s >= 0 and math.isfinite(ahead_s) and is_clock(answer.clock)):
            return None
        found = ClockCompared(mine=self.mine, other=answer.clock, ahead_s=ahead_s, within_s=within_s)
        told_s, told = self._told.get(answer.clock, (-math.inf, None))
        best_s, best = self._best.get(answer.clock, (middle_s, found))
        if within_s <= best.within_s:
            best_s, best = middle_s, found
        self._best[answer.clock] = (best_s, best)
        if now_s - told_s < WINDOW_S and told is not None and best.within_s > told.within_s / 2:
            return None
        self._told[answer.clock] = (now_s, best)
        del self._best[answer.clock]
        return best_s, best
