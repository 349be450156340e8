"""Who takes vacant places: spares that are there, else processes that are started, asked for or offered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from holdfast.control.membership.starting import Offer
from holdfast.control.membership.state import Decision, Membership, Output, Phase, Record, Tell, expulsion
from holdfast.control.messages import StartWorker
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.telemetry.events import Seated

__all__ = [
    "NO_PLACES",
    "answer_offers",
    "ask",
    "closed_to_all",
    "matched",
    "offered",
    "seat",
    "seat_survivors",
    "spawn",
]

_ANYWHERE: Mapping[WorkerId, NodeId] = {}
NO_PLACES = (Phase.GATHERING, Phase.REATTACHING, Phase.ENDED)
"""Phases in which nobody is started anywhere."""


def spawn(state: Membership, places: Iterable[WorkerId], on: Mapping[WorkerId, NodeId] = _ANYWHERE) -> Decision:
    """Has agents start a worker for each of these places, unless one is there or on its way already.

    Where no agent is there, the first one that is back is asked: then it says which are coming, and no place is filled
    twice. ``on``: the nodes that have offered themselves for them.
    """
    missing = [place for place in places if place in state.missing and place not in state.roster.expected]
    freed = sorted(state.roster.kept & frozenset(missing))
    told: tuple[Output, ...] = ()
    for worker in freed:
        told += expulsion(state, worker, "another process takes its place")
    state = replace(state, roster=state.roster.released(freed))
    for place in missing:
        state, asked = ask(state, place, on.get(place))
        told += asked
    return state, told


def ask(state: Membership, worker: WorkerId, node: NodeId | None = None, *, first: bool = False) -> Decision:
    """Has the agent of ``node``, else one that seems best, start a worker's process: it is expected from now on.

    ``first``: see StartWorker. That of the node where its last process was is best, as that may be what it has room
    for; else that of a node that has offered room, then that with the fewest workers. If none is there, nobody is asked
    yet. A job begins on no node that has not offered room.
    """
    if node not in state.contact.staying:
        before = state.contact.agent_of(state.roster.processes.get(worker))
        node = before if before in state.contact.staying else _emptiest(state, offered=first)
    if node is None and first:
        return replace(state, roster=state.roster.not_awaiting({worker})), ()
    state = replace(state, roster=state.roster.awaiting({worker: node}))
    if node is None:
        return state, ()
    state = _with_offers(state, _taken_up(state.vacancies.offers, worker, node))
    return state, (Tell(to=None, node=node, command=StartWorker(worker=worker, first=first)),)


def _taken_up(offers: tuple[Offer, ...], worker: WorkerId, node: NodeId) -> tuple[Offer, ...]:
    """What is left of offers once a worker is started on a node: as its agent counts, see ``WorkerGroup.expect``."""
    left = list(offers)
    taken = next((each for each in (Offer(worker, node), Offer(None, node)) if each in left), None)
    if taken is not None:
        left.remove(taken)
    return tuple(left)


def _emptiest(state: Membership, *, offered: bool) -> NodeId | None:
    """The node with the fewest workers, those included that are coming, of those whose agents are there.

    Those that have offered room come first, and no others if they must have (``offered``).
    """
    roster = state.roster
    there = Counter(roster.processes[worker].node.nonce for worker in roster.there)
    there.update(node.nonce for node in roster.where.values())
    room = {offer.node for offer in state.vacancies.offers if offer.place is None}
    fit = [node for node in state.contact.staying if node in room or not offered]
    return min(fit, key=lambda node: (node not in room, there[node.nonce]), default=None)


def offered(state: Membership, offer: Offer) -> Membership:
    """Returns the membership once an agent could start a worker."""
    return _with_offers(state, (*state.vacancies.offers, offer))


def closed_to_all(state: Membership, node: NodeId) -> Membership:
    """Returns the membership once a node is to go: whatever it could have started it cannot any more."""
    offers = tuple(offer for offer in state.vacancies.offers if offer.node != node)
    return replace(_with_offers(state, offers), contact=state.contact.told_to_go(node))


def _with_offers(state: Membership, offers: tuple[Offer, ...]) -> Membership:
    return replace(state, vacancies=replace(state.vacancies, offers=offers))


def answer_offers(state: Membership) -> Decision:
    """Asks agents to start workers for vacant places, as far as they offered; later, where no place can be filled.

    What was offered for a place that the grid has given up serves any other; where the grid can grow, whoever was
    offered comes as a spare if none is vacant.
    """
    if state.phase in NO_PLACES:
        return state, ()
    vacant = set(state.vacant) - {place for place, _ in matched(state)}
    kept: list[Offer] = []
    here = state.contact.here
    spawned: dict[WorkerId, NodeId] = {}
    more: dict[WorkerId, NodeId] = {}
    for offer in state.vacancies.offers:
        if offer.node not in here:
            kept.append(offer)
            continue
        place = offer.place if offer.place in state.grid.baseline.workers else _neediest(state, vacant)
        if place is None and state.rules.weighs:
            name = None if offer.place in more else offer.place
            name = name or _unheard_of(state, more)
            kept.append(Offer(name, offer.node))
            more[name] = offer.node
        elif place is None or place not in vacant:
            kept.append(offer)
        else:
            vacant.discard(place)
            kept.append(Offer(place, offer.node))
            spawned[place] = offer.node
    state, outputs = spawn(_with_offers(state, tuple(kept)), spawned, spawned)
    for worker, node in more.items():
        state, told = ask(state, worker, node)
        outputs += told
    return state, outputs


def _unheard_of(state: Membership, more: Iterable[WorkerId]) -> WorkerId:
    """Returns the name of a worker that there never was."""
    known = (*state.grid.baseline.workers, *state.roster.processes, *state.roster.expected, *more)
    return WorkerId(1 + max(worker.pipeline for worker in known), 0)


def matched(state: Membership) -> tuple[tuple[WorkerId, WorkerId], ...]:
    """Returns vacant places and the spares that are to take them, the neediest place first.

    A place stays vacant as long as it is not known whose fault its worker's exception was.
    """
    going = {worker for node in state.contact.leaving for worker in state.roster.on(node)}
    spares = sorted(state.roster.spares - state.contact.detached.keys() - going)
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
