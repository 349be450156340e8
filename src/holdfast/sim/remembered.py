"""Plans that are made once for all runs of a simulated job, as losses come again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar, cast

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.progress import StepProgress
from holdfast.core.remainder import Remainder
from holdfast.errors import HoldfastError
from holdfast.planning.library import PlanLibrary
from holdfast.planning.maker import PlanMaker
from holdfast.planning.remainder import plan_remainder
from holdfast.planning.reshaping import Reshaped, Shapes, reshaped
from holdfast.planning.training import Rerouted, Terms, looked_up

__all__ = ["RememberedPlans"]

_MOST_OPERATIONS = 5_000_000
"""Those of all plans that are remembered: about a gigabyte."""


T = TypeVar("T")


class RememberedPlans(PlanMaker):
    """Makes no plan twice, as long as it remembers it, and proves none.

    A proof changes no plan, and takes longer than to make one. That what is made here can be proved is tested.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._operations = 0

    def without(self, baseline: Plan, lost: Iterable[WorkerId], terms: Terms | None) -> Rerouted:
        """Returns the plan for what is left of a grid: see the class above."""
        gone = frozenset(lost)
        return self.once((baseline, gone, terms), lambda: super(RememberedPlans, self).without(baseline, gone, terms))

    def offered(self, library: PlanLibrary, baseline: Plan, lost: Iterable[WorkerId], terms: Terms) -> Rerouted | None:
        """Returns the plan that a library has: see the class above."""
        return looked_up(library, baseline, lost, terms)

    def scheduled(self, plan: Plan, terms: Terms | None) -> Plan:
        """Returns a plan with the planner's orders: see the class above."""
        return self.once((plan, terms), lambda: super(RememberedPlans, self).scheduled(plan, terms))

    def remainder(self, plan: Plan, progress: Mapping[WorkerId, StepProgress], **more: Any) -> Remainder:
        """Returns what is left of a step: see the class above."""
        return plan_remainder(plan, progress, proves=False, **more)

    def prove(self, plan: Plan, terms: Terms | None = None, ties: tuple[tuple[int, ...], ...] = ()) -> None:
        """Does nothing."""

    def reshaped(
        self,
        baseline: Plan,
        lost: Iterable[WorkerId],
        shapes: Shapes,
        *,
        leaving: Iterable[WorkerId] = (),
        joining: Iterable[WorkerId] = (),
    ) -> Reshaped | None:
        """Returns the fastest grid that the others can become: see :func:`holdfast.planning.reshaping.reshaped`."""
        absent, going, come = frozenset(lost), frozenset(leaving), tuple(joining)
        return self.once(
            (baseline, absent, going, come),
            lambda: reshaped(baseline, absent, shapes, leaving=going, joining=come, maker=self),
        )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what was made for this before, or what is made now; errors are remembered as well."""
        known = self._found.get(key)
        if known is None:
            try:
                made: Any = make()
            except HoldfastError as error:
                made = error
            known = made, _operations(made)
            self._found[key] = known
            self._operations += known[1]
            while self._operations > _MOST_OPERATIONS and len(self._found) > 1:
                self._operations -= self._found.popitem(last=False)[1][1]
        else:
            self._found.move_to_end(key)
        if isinstance(known[0], HoldfastError):
            raise known[0]
        return cast(T, known[0])


def _operations(made: Any) -> int:
    plan = made if isinstance(made, Plan) else getattr(made, "plan", None)
    return 1 if plan is None else sum(len(row) for _, row in plan.orders.rows)
