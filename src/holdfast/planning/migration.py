"""Changing places: living workers take those of lost ones, so that failures are where they cost least."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.slots import exchanged, slots_of
from holdfast.errors import InfeasiblePlan, StateUnavailable
from holdfast.planning.course import handed_over
from holdfast.planning.library import PlanLibrary
from holdfast.planning.maker import PROVING, PlanMaker
from holdfast.planning.normalise import moves, per_stage
from holdfast.planning.training import WORTHWHILE, Rerouted, Terms, grid_of_slots

__all__ = ["Migration", "proposed"]

_KEPT = 2
"""How many workers with state every layer must keep that a worker leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Living workers take the places of lost ones and leave their own vacant.

    Attributes:
        moves: who moves, and the lost worker whose place it takes.
        baseline: the plan of the whole grid with everyone at the new places.
        meanwhile: the plan that trains while those who move get their state.
        afterwards: the plan that trains from then on.
        before_s: seconds of a step if nobody moves.
        copy_s: seconds that their state is on its way.
        crossing_s: until all are connected anew at a boundary.
    """

    moves: tuple[tuple[WorkerId, WorkerId], ...]
    baseline: Plan
    meanwhile: Rerouted
    afterwards: Rerouted
    before_s: float
    copy_s: float
    crossing_s: float = 0.0

    @property
    def after_s(self) -> float:
        """Seconds of a step once all have moved."""
        assert self.afterwards.period is not None, "a plan of the library has a period"
        return self.afterwards.period

    def steps_gained(self, expected_s: float) -> float:
        """Returns how many steps more are done until the next failure, which is expected in so many seconds.

        Whoever moves computes nothing while its state is on its way, and from the step before to the step after that.
        """
        during_s = max(self.meanwhile.period or 0.0, self.before_s)
        return handed_over(during_s, self.after_s, self.copy_s, self.crossing_s).gained(expected_s, self.before_s)


def proposed(
    library: PlanLibrary,
    baseline: Plan,
    lost: Iterable[WorkerId],
    terms: Terms,
    before_s: float,
    maker: PlanMaker = PROVING,
) -> Migration | None:
    """Returns the migration after which the library's plan for so many failures fits; None if there is none.

    There is none, either, if steps would hardly be shorter, if somebody would leave a layer to fewer than two workers
    with its state, or if it is not known what copying takes.

    Args:
        library: the library.
        baseline: the plan of the whole grid.
        lost: all workers that are gone.
        terms: what the planner goes by; costs are in seconds.
        before_s: seconds of a step if nobody moves.
        maker: of the plans.

    Raises:
        CorruptBlob: a file of the library is not what was written.
        ConfigError: a lost worker is not in the plan.

    Cost: up to 12 schedules; milliseconds for tens of workers.
    """
    slots, gone = slots_of(baseline), frozenset(lost)
    if slots is None or not gone or not terms.copy_s:
        return None
    grid, empty = grid_of_slots(slots, terms), slots.places(gone)
    found = library.find(grid, len(gone), terms.technique)
    if found is None or found.failures_per_stage == per_stage(empty, len(grid.stages)):
        return None
    if not 0 < found.found.period < before_s * (1 - WORTHWHILE):
        return None
    sits = slots.workers
    pairs = tuple((sits[move.worker], sits[move.takes]) for move in moves(grid, empty, found.failures_per_stage)[0])
    migrating = frozenset(worker for worker, _ in pairs)
    there = exchanged(baseline, pairs)
    afterwards = maker.offered(library, there, gone, terms)
    if afterwards is None:  # the library has become another one meanwhile
        return None
    try:
        meanwhile = maker.without(there, gone | migrating, terms)
    except (StateUnavailable, InfeasiblePlan):
        return None
    held = meanwhile.plan.placement
    left = (layer for worker in migrating for layer in baseline.placement.layers_of(worker))
    if any(len(held.owners(layer)) < _KEPT for layer in left):
        return None
    return Migration(
        moves=pairs,
        baseline=there,
        meanwhile=meanwhile,
        afterwards=afterwards,
        before_s=before_s,
        copy_s=sum(terms.copy_s[layer] for worker in migrating for layer in there.placement.layers_of(worker)),
        crossing_s=terms.crossing_s,
    )
