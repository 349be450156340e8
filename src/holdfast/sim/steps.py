"""The steps of a simulated job: how far they are, and what the seconds that they took were good for."""

from __future__ import annotations

from holdfast.errors import InternalError
from holdfast.sim.ledger import Ledger, Part

__all__ = ["Steps"]


class Steps:
    """Steps that are run one after another, by plans that change.

    Of each step at most one period of the plan that it began by is useful, once; all else that it takes is redone work.

    Args:
        ledger: where that is booked.

    Attributes:
        number: the step that runs; it is how many are committed.
        into_s: for how long it has been run by the plan that is.
        lasts_s: for how long it is to be run by that.
        is_rest: whether that is what was left of it after an interruption.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.number = 0
        self.into_s = self.lasts_s = 0.0
        self.is_rest = False
        self._ledger = ledger
        self._spent_s = 0.0  # by other plans
        self._period_s = 0.0  # of the plan that it began by
        self._most = 0

    @property
    def is_first_time(self) -> bool:
        """Whether the step that runs was never committed."""
        return self.number >= self._most

    def begin(self, number: int, period_s: float) -> None:
        """A step begins."""
        self.number, self.into_s, self.lasts_s, self.is_rest = number, 0.0, period_s, False
        self._spent_s, self._period_s = 0.0, period_s

    def commit(self, period_s: float) -> None:
        """The step is over; ``period_s``: of the next one."""
        self.into_s = self.lasts_s
        self._book()
        self._most = max(self._most, self.number + 1)
        self.begin(self.number + 1, period_s)

    def commit_whole(self, count: int) -> None:
        """So many steps of the same plan are over that were never run before."""
        self._ledger.book(Part.USEFUL, count * self.lasts_s)
        self.number += count
        self._most = self.number

    def interrupt(self) -> None:
        """The step does not go on by the plan that is."""
        self._spent_s, self.into_s = self._spent_s + self.into_s, 0.0

    def go_on(self, number: int, period_s: float, left_s: float | None = None) -> None:
        """Go on after an interruption, from some step; of the one that was interrupted only ``left_s`` may be left.

        Raises:
            InternalError: the steps before it were never committed.
        """
        if number > self._most:
            raise InternalError(f"{self._most} steps were ever committed, and all go on from step {number}")
        if number == self.number and self._period_s:
            self.into_s, self.lasts_s = 0.0, period_s
        else:  # a checkpoint is loaded: what was run of the step led nowhere
            self._ledger.book(Part.REDO, self._spent_s)
            self.begin(number, period_s)
        self.is_rest = left_s is not None
        if left_s is not None:
            self.lasts_s = left_s

    def end(self, number: int) -> None:
        """Nothing runs any more; what is saved is of before this step."""
        self._ledger.book(Part.REDO, self._spent_s + self.into_s)
        self.begin(number, 0.0)

    def close(self) -> None:
        """Time is over: a step that was cut short was useful so far."""
        self._book()

    def _book(self) -> None:
        spent = self._spent_s + self.into_s
        useful = min(spent, self._period_s) if self.is_first_time else 0.0
        self._ledger.book(Part.USEFUL, useful)
        self._ledger.book(Part.REDO, spent - useful)
