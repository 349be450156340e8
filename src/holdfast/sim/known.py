"""Better plans than those that are made at once, as a job's library has them."""

from __future__ import annotations

from contextlib import suppress

from holdfast.control.membership import AnswerPlanned, Improved, Membership
from holdfast.control.plan_lookup import PlanLookup
from holdfast.core.slots import slots_of
from holdfast.errors import InfeasiblePlan
from holdfast.planning.library import PlanLibrary
from holdfast.planning.maker import PlanMaker
from holdfast.planning.training import grid_of_slots

__all__ = ["FullLibrary"]


class FullLibrary:
    """Tells what the library of a job has, as if it had been filled before anything failed; nobody searches in it.

    Args:
        library: filled by this; the same one may serve many runs.
        maker: of what is made of its plans.
    """

    def __init__(self, library: PlanLibrary, maker: PlanMaker) -> None:
        self._library, self._lookup = library, PlanLookup(library, maker)

    def news(self, state: Membership) -> tuple[AnswerPlanned | Improved, ...]:
        """Returns what a job's library would tell now: see :class:`holdfast.control.plan_lookup.PlanLookup`."""
        terms, slots, lost = state.rules.terms, slots_of(state.grid.baseline), len(state.absent)
        if terms is not None and slots is not None and lost:
            with suppress(InfeasiblePlan):  # so many leave no plan at all
                self._library.get(grid_of_slots(slots, terms), lost, terms.technique)
        return self._lookup.news(state)
