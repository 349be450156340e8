"""Workers have changed places, and a recovery began before that was known here."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.acting import on_status
from holdfast.control.membership.recovering import recover
from holdfast.control.membership.state import Decision, Membership, Phase
from holdfast.control.messages import Status
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.seats import exchanged
from holdfast.errors import InternalError

__all__ = ["on_standing"]


def on_standing(state: Membership, status: Status) -> Decision:
    """A worker has said what it holds: what its place says, or it had already moved to another one.

    Nobody is told when all go over a boundary, so a loss at that moment can be answered with a plan for the places
    before. Whoever has moved by then is given its new place, and enters there later.
    """
    known = {**state.statuses, status.worker: status}
    if state.past_lost or state.phase is not Phase.FORMING or not set(known) >= set(state.alive):
        return on_status(state, status)
    moved = [worker for worker in state.alive if known[worker].layers != _layers_of(state.healthy, worker)]
    if not moved:
        return on_status(state, status)
    vacant = sorted(state.absent)
    pairs = []
    for worker in moved:
        place = next((place for place in vacant if _layers_of(state.healthy, place) == known[worker].layers), None)
        if place is None:
            raise InternalError(f"worker {worker} holds layers {known[worker].layers}, where no place is vacant")
        vacant.remove(place)
        pairs.append((worker, place))
    healthy = exchanged(state.healthy, pairs)
    recovered, outputs = recover(replace(state, healthy=healthy, arriving=state.arriving | frozenset(moved)))
    return replace(recovered, reformations=state.reformations), outputs


def _layers_of(plan: Plan, worker: WorkerId) -> tuple[int, ...]:
    return tuple(plan.placement.layers_of(worker).indices)
