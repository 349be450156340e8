"""Who makes the plans that a job goes over to: a port, as a simulation of many jobs need make none of them twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.progress import StepProgress
from holdfast.core.remainder import Remainder
from holdfast.core.validate import validate
from holdfast.planning.library import PlanLibrary
from holdfast.planning.remainder import plan_remainder
from holdfast.planning.training import Rerouted, Terms, looked_up, replanned, rerouted, within_limit

__all__ = ["PROVING", "PlanMaker"]

T = TypeVar("T")


class PlanMaker:
    """Makes each plan as it is asked for, and proves it."""

    def without(self, baseline: Plan, lost: Iterable[WorkerId], terms: Terms | None) -> Rerouted:
        """Returns the plan for what is left of a grid, proved right.

        See :func:`holdfast.planning.training.rerouted`.
        """
        found = rerouted(baseline, lost, terms)
        if found.plan is not baseline:
            self.prove(found.plan, terms)
        return found

    def offered(self, library: PlanLibrary, baseline: Plan, lost: Iterable[WorkerId], terms: Terms) -> Rerouted | None:
        """Returns the plan that a library has for what is left of a grid, proved right; None if it has none.

        See :func:`holdfast.planning.training.looked_up`.
        """
        found = looked_up(library, baseline, lost, terms)
        if found is not None:
            self.prove(found.plan, terms)
        return found

    def scheduled(self, plan: Plan, terms: Terms | None) -> Plan:
        """Returns a plan of 1F1B's orders with the planner's, if there is one; proved right.

        Raises:
            InfeasiblePlan: a worker's memory cannot hold one micro-batch.
        """
        found = plan if terms is None else replanned(plan, terms)
        self.prove(found, terms)
        return found

    def remainder(self, plan: Plan, progress: Mapping[WorkerId, StepProgress], **more: Any) -> Remainder:
        """Returns what is left of a step, proved right: see :func:`holdfast.planning.remainder.plan_remainder`."""
        return plan_remainder(plan, progress, **more)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what is made; what was made for the same key before may be returned again."""
        return make()

    def prove(self, plan: Plan, terms: Terms | None = None, ties: tuple[tuple[int, ...], ...] = ()) -> None:
        """Returns if a plan is right: see :func:`holdfast.core.validate.validate`.

        Args:
            plan: the plan.
            terms: by which the planner made it, with ties and the memory of workers; None: it did not.
            ties: tuples of layers that share weights, where that is not in the terms.

        Raises:
            InvalidSchedule: it is not.
        """
        if terms is None:
            validate(plan, ties=ties)
        else:
            validate(plan, ties=terms.ties, costs=within_limit(terms))


PROVING = PlanMaker()
"""That of a job that trains."""
