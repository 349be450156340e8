"""After losses: to what pipelines whoever is left goes over, while all train by re-routing."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.control.membership import Handover, Improved, Membership, Phase
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.planning.reshaping import Reshaped, Shapes, reshaped

__all__ = ["Reshaper"]


class Reshaper:
    """Proposes, once for every loss, the grid that whoever is left is to become.

    Args:
        shapes: what new pipelines are made by.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._seen: tuple[Plan, frozenset[WorkerId]] | None = None
        self._found: Reshaped | None = None

    def news(self, state: Membership) -> tuple[Improved, ...]:
        """Returns the grid to go over to, as long as nobody does; nothing if there is no better one.

        Copies are made while all train, so what it costs is two boundaries; it must gain a step until the job ends.

        Cost: milliseconds for tens of workers if the grid, or who is absent, has changed; else microseconds.
        """
        return tuple(self._news(state))

    def _news(self, state: Membership) -> Iterator[Improved]:
        others_come = state.roster.arriving or state.roster.entering or state.roster.expected
        if state.phase is not Phase.RUNNING or not state.absent or others_come or state.grid.target is not None:
            return
        seen = (state.grid.baseline, state.absent)
        if seen != self._seen:
            self._found = reshaped(state.grid.baseline, state.absent, self._shapes)
            self._seen = seen
        found = self._found
        if found is None or (state.rules.steps - 1 - state.last_step) * (1 - found.period / found.before_s) < 1:
            return
        yield Improved(lost=state.absent, offer=Handover(grid=found.plan, why=found.why))
