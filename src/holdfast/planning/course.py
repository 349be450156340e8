"""How many steps a way to go on makes until the next failure: what ways are compared by."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Course", "handed_over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What becomes of the time from now on, in seconds, as long as nothing fails.

    Attributes:
        still_s: in which no step is made that was not made before.
        period_s: of a step from then on.
        change_s: for how long steps take that; infinite if for good.
        later_s: of a step after that.
    """

    still_s: float
    period_s: float
    change_s: float = math.inf
    later_s: float = math.inf

    def steps(self, mean_s: float) -> float:
        """Return how many steps are made on average until the next failure, which comes at random.

        A time without steps counts as the more, the sooner that is to be expected; but some failures are late, so that
        even of two ways that take longer than the mean the shorter one is better.

        Args:
            mean_s: until the next failure, on average.
        """

        def left_s(begin_s: float) -> float:
            """Seconds that come behind a moment, on average, those without a failure before it."""
            return mean_s * math.exp(-begin_s / mean_s)

        changed_s = self.still_s + self.change_s
        return (left_s(self.still_s) - left_s(changed_s)) / self.period_s + left_s(changed_s) / self.later_s

    def within(self, seconds: float) -> float:
        """Return how many steps are made in a time in which nothing fails."""
        first_s = min(self.change_s, max(0.0, seconds - self.still_s))
        return first_s / self.period_s + max(0.0, seconds - self.still_s - first_s) / self.later_s

    def gained(self, seconds: float, before_s: float) -> float:
        """Return how many steps more are made in a time in which nothing fails than at a period of ``before_s``."""
        return self.within(seconds) - seconds / before_s


def handed_over(during_s: float, after_s: float, copy_s: float, crossing_s: float) -> Course:
    """Return what becomes of the time if state is copied first, and steps take less from then on.

    Args:
        during_s: seconds of a step while state is copied.
        after_s: from then on.
        copy_s: how long state is on its way; two boundaries more are crossed, each after a step.
        crossing_s: how long all stand still at each.
    """
    return Course(still_s=2 * crossing_s, period_s=during_s, change_s=copy_s + 2 * during_s, later_s=after_s)
