"""Who takes vacant places: spares that are there, else processes that are started, asked for or offered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.control.membership.state import Decision, Membership, Phase, Record, Tell, expulsion
from holdfast.control.messages import StartWorker
from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import Seated

__all__ = ["NO_PLACES", "answer_offers", "matched", "on_offer", "seat", "seat_survivors", "spawn"]

NO_PLACES = (Phase.GATHERING, Phase.REATTACHING, Phase.ENDED)
"""Phases in which nobody is started anywhere."""


def spawn(state: Membership, places: tuple[WorkerId, ...]) -> Decision:
    """Has the agent start a worker for each of these places, unless one is there or on its way already.

    An agent that is away is asked when it is back: then it says which are coming, and no place is filled twice.
    """
    missing = tuple(place for place in places if place in state.missing and place not in state.roster.expected)
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
    """Asks the agent to start workers for vacant places, as far as it offered; later, where no place can be filled.

    What was offered for a place that the grid has given up serves any other; where the grid can grow, whoever was
    offered comes as a spare if none is vacant.
    """
    if state.phase in NO_PLACES:
        return state, ()
    vacant = set(state.vacant) - {place for place, _ in matched(state)}
    kept: list[WorkerId | None] = []
    spawned: list[WorkerId] = []
    more: list[WorkerId] = []
    for offer in state.vacancies.offers:
        place = offer if offer in state.grid.baseline.workers else _neediest(state, vacant)
        if place is None and state.rules.weighs:
            more.append(offer or _unheard_of(state, more))
        elif place is None or place not in vacant:
            kept.append(offer)
        else:
            vacant.discard(place)
            spawned.append(place)
    state, told = spawn(_with_offers(state, tuple(kept)), tuple(spawned))
    state = replace(state, roster=state.roster.awaiting(more))
    return state, (*told, *(Tell(to=None, command=StartWorker(worker=worker)) for worker in more))


def _unheard_of(state: Membership, more: Iterable[WorkerId]) -> WorkerId:
    """Returns the name of a worker that there never was."""
    known = (*state.grid.baseline.workers, *state.roster.processes, *state.roster.expected, *more)
    return WorkerId(1 + max(worker.pipeline for worker in known), 0)


def matched(state: Membership) -> tuple[tuple[WorkerId, WorkerId], ...]:
    """Returns vacant places and the spares that are to take them, the neediest place first.

    A place stays vacant as long as it is not known whose fault its worker's exception was.
    """
    spares = sorted(state.roster.spares - state.contact.detached.keys())
    if not spares or state.preempted or state.only_saves:
        return ()
    vacant = set(state.vacant.difference(each.worker for each in state.exceptions.raised))
    pairs: list[tuple[WorkerId, WorkerId]] = []
    for spare in spares[: len(vacant)]:
        place = _neediest(state, vacant)
        assert place is not None, "there are as many places left"
        vacant.discard(place)
        pairs.append((place, spare))
    return tuple(pairs)


def seat(state: Membership) -> Decision:
    """Spares take vacant places: from now on the plan of the whole grid has them there, and they have yet to enter."""
    pairs = matched(state)
    if not pairs:
        return state, ()
    told = tuple(Record(event=Seated(worker=str(spare), place=str(place))) for place, spare in pairs)
    state = replace(state, prospects=replace(state.prospects, planned={}))
    return _seated(state, pairs, arriving=True), told


def seat_survivors(state: Membership) -> Membership:
    """Returns the membership in which whoever holds state has a place, so that it can save that: any place will do.

    Where what was decided is not known, it is not known either which spare had taken whose place.
    """
    holding = sorted(state.roster.spares & state.contact.returned.keys())
    return _seated(state, tuple(zip(sorted(state.missing), holding, strict=False)), arriving=False)


def _seated(state: Membership, pairs: tuple[tuple[WorkerId, WorkerId], ...], *, arriving: bool) -> Membership:
    spares = tuple(spare for _, spare in pairs)
    grid = state.grid.exchanged(pairs) if pairs else state.grid
    return replace(
        state.logging_in(grid.baseline, state.last_step + 2),
        grid=grid,
        roster=state.roster.seated(spares, arriving=arriving),
    )


def _neediest(state: Membership, vacant: set[WorkerId]) -> WorkerId | None:
    """The vacant place of a layer that has the fewest owners, those included that are coming; else of those left."""
    placement = state.grid.baseline.placement
    coming, left = placement.without(vacant), placement.without(state.absent)

    def owners(worker: WorkerId) -> list[int]:
        layers = placement.layers_of(worker)
        return [min(len(them.owners(layer)) for layer in layers) for them in (coming, left)]

    return min(sorted(vacant), key=owners, default=None)
