"""How a job begins: once agents have room for all its workers, each worker is given a node."""

from __future__ import annotations

from collections import Counter

from holdfast.control.membership.state import Decision, Membership, Output, Phase, Record, Tell, prefixed
from holdfast.control.membership.vacancies import ask
from holdfast.control.messages import Remark
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.seating import seat, survives
from holdfast.telemetry.events import Notice

__all__ = ["HEARD_S", "gather", "unplaced"]

HEARD_S = 1.0
"""Within it agents have come back to a coordinator that was started again, and have said what they were asked for."""


def gather(state: Membership, now: float) -> Decision:
    """Has workers started where agents have offered room for them, and all others once there is room for all.

    Spares come then, as far as there is room.
    """
    if state.phase is not Phase.GATHERING or now < state.contact.seats_from:
        return state, ()
    here, known = state.contact.here, _known(state)
    beginning = (*state.grid.baseline.workers, *state.rules.first_spares)
    named = {offer.place: offer.node for offer in state.vacancies.offers if offer.node in here}
    outputs: tuple[Output, ...] = ()
    for worker in beginning:
        if worker in named and worker not in known:
            state, told = ask(state, worker, named[worker], first=True)
            outputs += told
    waiting, free, placement = _waiting(state), _free(state), state.grid.baseline.placement
    if waiting and len(waiting) <= free.total():
        where = {worker: node for worker, node in _where(state).items() if worker in placement}
        seats = seat(placement, free, where)
        for worker, node in seats.items():
            state, told = ask(state, worker, node, first=True)
            outputs += told
        outputs += _told_spread(state, {**where, **seats})
    return prefixed(outputs, _with_spares(state))


def unplaced(state: Membership) -> int:
    """Returns for how many workers no agent has offered room so far; 0 once the job has begun."""
    if state.phase is not Phase.GATHERING:
        return 0
    return max(0, len(_waiting(state)) - _free(state).total())


def _waiting(state: Membership) -> tuple[WorkerId, ...]:
    """The workers of the grid that nobody has started or been asked for."""
    known = _known(state)
    return tuple(worker for worker in state.grid.baseline.workers if worker not in known)


def _known(state: Membership) -> frozenset[WorkerId]:
    """Who is here, is being started, or somebody has been asked for."""
    return state.roster.expected.union(state.roster.processes, state.vacancies.starting.since)


def _free(state: Membership) -> Counter[NodeId]:
    """How many more workers could be started on each node whose agent is there, whichever they are."""
    here = state.contact.here
    return Counter(offer.node for offer in state.vacancies.offers if offer.place is None and offer.node in here)


def _where(state: Membership) -> dict[WorkerId, NodeId]:
    """The node of everybody who has one."""
    starting = {worker: process.node for worker, (process, _) in state.vacancies.starting.since.items()}
    there = {worker: process.node for worker, process in state.roster.processes.items()}
    return starting | dict(state.roster.where) | there


def _told_spread(state: Membership, where: dict[WorkerId, NodeId]) -> tuple[Output, ...]:
    """What is said of a job on several nodes: how many of them it survives."""
    nodes = {node.nonce for node in where.values()}
    if len(nodes) == 1:
        return ()
    lost = survives(state.grid.baseline.placement, where)
    but = "" if state.contact.others_lead else ", but the coordinator's"
    some = f"any {lost} of them may be lost{but}" if lost else "some layer has owners on one alone"
    text = f"{len(where)} workers begin on {len(nodes)} nodes: {some}"
    told = Tell(to=None, command=Remark(worker=None, kind="nodes", text=text))
    return (Record(event=Notice(worker="coordinator", text=text)), told)


def _with_spares(state: Membership) -> Decision:
    """Spares are started where room is left."""
    outputs: tuple[Output, ...] = ()
    known = _known(state)
    for spare in state.rules.first_spares:
        if spare not in known and not _waiting(state) and (free := _free(state)):
            state, told = ask(state, spare, max(sorted(free), key=free.__getitem__), first=True)
            outputs += told
    return state, outputs
