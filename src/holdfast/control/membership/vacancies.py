"""Who is started where: processes for vacant places, asked for or offered."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.state import Decision, Membership, Phase, Tell, expulsion
from holdfast.control.messages import StartWorker
from holdfast.core.ids import WorkerId

__all__ = ["answer_offers", "on_offer", "spawn"]

_NO_PLACES = (Phase.GATHERING, Phase.REATTACHING, Phase.ENDED)


def spawn(state: Membership, places: tuple[WorkerId, ...]) -> Decision:
    """Has the agent start a worker for each of these places, unless one is there or on its way already.

    An agent that is away is asked when it is back: then it says which are coming, and no place is filled twice.
    """
    missing = tuple(place for place in places if place in state.roster.lost and place not in state.roster.expected)
    state = replace(state, roster=state.roster.awaiting(missing))
    asked = () if state.contact.agent_away else missing
    freed = sorted(state.roster.kept & frozenset(missing))
    told = [output for worker in freed for output in expulsion(state, worker, "another process takes its place")]
    state = replace(state, roster=state.roster.released(freed))
    return state, (*told, *(Tell(to=None, command=StartWorker(worker=place)) for place in asked))


def on_offer(state: Membership, worker: WorkerId | None) -> Decision:
    """The agent could start a worker at a place, or at any if ``worker`` is None."""
    return answer_offers(_with_offers(state, (*state.vacancies.offers, worker)))


def _with_offers(state: Membership, offers: tuple[WorkerId | None, ...]) -> Membership:
    return replace(state, vacancies=replace(state.vacancies, offers=offers))


def answer_offers(state: Membership) -> Decision:
    """Asks the agent to start workers for vacant places, as far as it offered; later, where no place can be filled."""
    if state.phase in _NO_PLACES:
        return state, ()
    vacant = set(state.roster.lost - state.roster.expected - state.roster.kept)
    kept: list[WorkerId | None] = []
    spawned: list[WorkerId] = []
    for offer in state.vacancies.offers:
        place = offer if offer is not None else _neediest(state, vacant)
        if place is None or place not in vacant:
            kept.append(offer)
            continue
        vacant.discard(place)
        spawned.append(place)
    return spawn(_with_offers(state, tuple(kept)), tuple(spawned))


def _neediest(state: Membership, vacant: set[WorkerId]) -> WorkerId | None:
    """The vacant place of a layer that has the fewest owners left."""
    placement = state.grid.baseline.placement
    left = placement.without(state.absent)

    def owners(worker: WorkerId) -> int:
        return min(len(left.owners(layer)) for layer in placement.layers_of(worker))

    return min(sorted(vacant), key=owners, default=None)
