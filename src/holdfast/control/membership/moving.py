"""Workers have changed places or handed layers over, and a recovery began before that was known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.control.membership.acting import on_status
from holdfast.control.membership.grid import GridState
from holdfast.control.membership.recovering import recover
from holdfast.control.membership.state import Decision, Membership, Phase
from holdfast.control.messages import Status
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.slots import exchanged
from holdfast.errors import InternalError
from holdfast.recovery.actions import Rejoin

__all__ = ["on_standing"]


def on_standing(state: Membership, status: Status) -> Decision:
    """A worker has said what it holds: what its place says, or it had already moved, or handed layers over.

    Nobody is told when all go over a boundary, so a loss at that moment can be answered with a plan for the grid
    before. Whoever has moved by then is given its new place, and enters there later. Where layers were handed over, all
    who took some held them before anybody let go of them: so all go on in the new grid.
    """
    known = {**state.reports.statuses, status.worker: status}
    if state.past_lost or state.phase is not Phase.FORMING or not state.has_all(known):
        return on_status(state, status)
    if any(isinstance(action, Rejoin) for action in state.forming.pending):  # whoever lacks something replays it
        return on_status(state, status)
    moved = _without_their_layers(state, known, state.grid.baseline)
    if not moved:
        return on_status(state, status)
    for other, target in ((state.grid.target, None), (state.grid.former, state.grid.baseline)):
        if other is not None and not _without_their_layers(state, known, other):
            return _begin_anew(state, replace(state, grid=GridState(baseline=other)), target)
    vacant, layers_of = sorted(state.absent), state.grid.baseline.placement.layers_of
    pairs = []
    for worker in moved:
        place = next((place for place in vacant if layers_of(place) == known[worker].layers), None)
        if place is None:
            raise InternalError(f"worker {worker} holds layers {known[worker].layers}, where no place is vacant")
        vacant.remove(place)
        pairs.append((worker, place))
    baseline = exchanged(state.grid.baseline, pairs)
    grid, roster = replace(state.grid, baseline=baseline), state.roster
    roster = replace(roster, arriving=roster.arriving.union(moved))
    return _begin_anew(state, replace(state, grid=grid, roster=roster))


def _begin_anew(before: Membership, state: Membership, target: Plan | None = None) -> Decision:
    """Answers the same loss again, in the grid that there is; that is no suspicion more, nor fewer.

    ``target``: what it was wrongly taken to have become, and is still to become, unless it shrinks.
    """
    recovered, outputs = recover(state)
    if recovered.grid == state.grid:
        recovered = replace(recovered, grid=replace(recovered.grid, target=target))
    doubts = replace(recovered.doubts, reformations=before.doubts.reformations)
    return replace(recovered, doubts=doubts), outputs


def _without_their_layers(state: Membership, known: Mapping[WorkerId, Status], grid: Plan) -> list[WorkerId]:
    """Who does not have all that is its own in a grid. One that was to take layers over may have more."""
    return [worker for worker in state.alive if not set(known[worker].layers) >= set(grid.placement.layers_of(worker))]
