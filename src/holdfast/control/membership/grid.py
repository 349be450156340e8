"""The plan of the whole grid, from which every other is derived: as it is, as it is to become, as it was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.slots import exchanged

__all__ = ["GridState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridState:
    """The whole grid. All of it is stored.

    Attributes:
        baseline: the plan of the whole grid; strategies may replace it.
        target: the plan that the whole grid is to have once layers were handed over; None if it stays as it is.
        former: the plan of the whole grid that ``baseline`` was taken to have replaced, until all have said what they
            hold; None otherwise.
    """

    baseline: Plan
    target: Plan | None = None
    former: Plan | None = None

    def gone_over(self, baseline: Plan | None) -> GridState:
        """Returns the grid behind a boundary; ``baseline``: what it becomes there, None if it stays as it is."""
        target = None if baseline == self.target else self.target
        return GridState(baseline=baseline or self.baseline, target=target, former=self.former)

    def exchanged(self, pairs: Iterable[tuple[WorkerId, WorkerId]]) -> GridState:
        """Returns the grid in which the second worker of each pair has the place of the first."""
        both = tuple(pairs)
        target, former = (plan and exchanged(plan, both) for plan in (self.target, self.former))
        return GridState(baseline=exchanged(self.baseline, both), target=target, former=former)

    def taken_for_over(self, target: Plan) -> GridState:
        """Returns the grid if layers were handed over, of which nobody has told yet."""
        return GridState(baseline=target, former=self.baseline)
