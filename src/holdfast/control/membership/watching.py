"""What time tells: who is away for too long, silent, stuck or suspected, and when waiting ends."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from holdfast.control.detection import deadlocked, forget, needed, overdue, pass_time, slow
from holdfast.control.membership.ending import end_job
from holdfast.control.membership.gathering import gather
from holdfast.control.membership.losses import on_lost, on_no_show, on_overdue
from holdfast.control.membership.recovering import fill_places, recover, stop_waiting
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Output,
    Phase,
    Record,
    Tell,
    Tick,
    notice,
    prefixed,
)
from holdfast.control.messages import Remark, Suspect
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.reach import cover
from holdfast.telemetry.events import Notice, Suspected

__all__ = ["node_due", "on_agent_closed", "on_closed", "on_suspect", "on_tick"]

DETACHED_GRACE_S = 2.0
"""Or the time in which a heartbeat must come, if that is longer: a machine on which it is needs it here, too."""
SUSPICION_GRACE_S = 1.0
OTHERS_S = 0.5
"""So long an exception waits for others of its kind, before it is judged."""
MAX_REFORMATIONS = 3
WHOLE_NODE_S = 0.04
"""Where none of a node's processes has a connection, one that lives is back in less: it tries again at once."""
AGENT_ALONE_S = 0.3
"""Where an agent has none and some of its workers do: they end with it, large ones later."""
BACK_S = 1.5
"""Where those who are back at a coordinator that was started again hold all, whoever lives is back in less: it tries
the addresses of all coordinators, again and again."""
_SILENT_BEATS = 2
"""Who had sent no heartbeat for so many by then is silent, with the whole host: its connection stands for nothing."""
AGAIN_S = 60.0
"""Nodes whose workers suspect each other again, so soon after links were made anew, cannot reach each other."""


def on_agent_closed(state: Membership, node: NodeId, now: float) -> Decision:
    """An agent's connection is gone: what it is told from now on waits until it has said what it knows."""
    if node not in state.contact.agents:  # it has left
        return state, ()
    return replace(state, contact=state.contact.agent_closed(node, now)), ()


def node_due(state: Membership) -> float | None:
    """When it is to be decided about the next node, unless its agent is back by then; None: none is away."""
    due, held = min(_due(state).values(), default=None), _held_until(state)
    noted = held is not None and state.contact.alone_at >= held - state.contact.patience_s
    return max(due, held) if due is not None and held is not None and noted else due


def _due(state: Membership) -> dict[NodeId, float]:
    """Nodes whose agents are away, and when each is held to be gone; if none is here, it is we who are cut off."""
    contact = state.contact
    away = _away(state)
    if len(away) == len(contact.agents) or state.phase is Phase.ENDED:
        return {}
    if state.phase is Phase.REATTACHING:  # workers are on their way back, too
        return _due_back(state, away)
    heard_at, closed_at = dict[str, float](), dict[str, float]()
    for worker in state.roster.there:
        nonce, at = state.roster.processes[worker].node.nonce, contact.detached.get(worker)
        if at is not None:
            closed_at[nonce] = max(at, closed_at.get(nonce, at))
        elif worker in state.watch.vitals:
            heard_at[nonce] = max(state.watch.vitals[worker].heard_at, heard_at.get(nonce, -math.inf))
        else:
            heard_at[nonce] = math.inf
    return {
        node: since + AGENT_ALONE_S
        if heard_at.get(node.nonce, -math.inf) > since - _SILENT_BEATS * state.watch.beat_s
        else max(since, closed_at.get(node.nonce, since)) + WHOLE_NODE_S
        for node, since in away.items()
    }


def _due_back(state: Membership, away: Mapping[NodeId, float]) -> dict[NodeId, float]:
    """As :func:`_due`, at a coordinator that was started again.

    Nodes of which it has seen nobody are given up soon if those that are back hold every layer; else all wait for them.
    """
    soon, unseen, whole = state.contact.reachable_since + BACK_S, _unseen(state), _is_whole(state)
    due = {node: since + AGENT_ALONE_S for node, since in away.items()}
    return due | {node: soon if whole else max(due[node], soon) for node in unseen & due.keys()}


def _unseen(state: Membership) -> frozenset[NodeId]:
    """The nodes of which a coordinator that was started again has seen neither the agent nor a worker."""
    seen = [state.roster.processes[worker].node for worker in state.contact.returned]
    never = [node for node, since in state.contact.agents.items() if since == state.contact.reattach_until]
    return frozenset(node for node in never if not any(node.shares_agent(each) for each in seen))


def _is_whole(state: Membership) -> bool:
    """Whether those who are back at a coordinator that was started again, with their agents, hold every layer."""
    processes, placement = state.roster.processes, state.grid.baseline.placement
    back = {
        worker
        for worker, hello in state.contact.returned.items()
        if hello.has_state and state.contact.agent_of(processes[worker]) is not None
    }
    return all(placement.without(frozenset(placement.workers) - (back - state.absent)).owners_by_layer)


def _away(state: Membership) -> dict[NodeId, float]:
    """The nodes whose agents are away, and since when; not before another one could be reached."""
    contact = state.contact
    return {node: max(at, contact.reachable_since) for node, at in contact.agents.items() if at is not None}


def _on_gone(state: Membership, nodes: Sequence[NodeId], now: float) -> Decision:
    """Nodes are held to be gone, unless no other one is reached: then it may be we who are cut off.

    Where another coordinator could lead, it is for the store to say whether one does: a decision that changes nothing
    is put there first. Elsewhere all that others can do is to wait for us, or end: so is it waited for them, for as
    long, unless there is but one; nothing is decided by time until then, as nobody gets on without them.
    """
    contact, since, held = state.contact, _alone_since(state), _held_until(state)
    noted = replace(state, contact=replace(contact, alone_at=now))
    if since is not None and contact.others_lead and contact.alone_at < since:
        return replace(noted, revision=state.revision + 1), ()
    if held is None or now >= held:
        return _on_nodes_gone(state, nodes)
    if contact.alone_at >= held - contact.patience_s:
        return state, ()
    text = f"no other node is reached: nothing is decided before one is, or {contact.patience_s:g} s have passed"
    return noted, (Record(event=Notice(worker="coordinator", text=text)),)


def _alone_since(state: Membership) -> float | None:
    """Since when no other node is reached, while that could be our fault; None if one is, or nothing is at stake."""
    if state.phase in (Phase.GATHERING, Phase.REATTACHING, Phase.ENDED):
        return None
    return state.contact.alone_since(_away(state))


def _held_until(state: Membership) -> float | None:
    """Until when nothing is decided since no other node is reached, and nobody could tell why; None: it is decided."""
    contact, since = state.contact, _alone_since(state)
    return None if since is None or contact.others_lead or len(contact.agents) <= 2 else since + contact.patience_s


def on_node_left(state: Membership, node: NodeId) -> Decision:
    """The agent of a node that was told to go ends, as none of its workers runs any more: nobody waits for it."""
    return _on_nodes_gone(state, [node]) if node in state.contact.agents else (state, ())


def _told_gone(state: Membership, node: NodeId) -> str:
    if node in state.contact.leaving and not state.roster.on(node):
        return f"node {node} has left"
    return f"node {node} is gone: its agent has lost its connection, and is not back"


def _on_nodes_gone(state: Membership, nodes: Sequence[NodeId]) -> Decision:
    """Agents are gone, and whatever they have started ends with them: one event."""
    said = [Record(event=Notice(worker="coordinator", text=_told_gone(state, node))) for node in nodes]
    workers = {worker: node for node in nodes for worker in state.roster.on(node)}
    asked = {worker: process.node for worker, (process, _) in state.vacancies.starting.since.items()}
    asked |= state.roster.where
    coming = {
        worker: node
        for worker, at in asked.items()
        for node in nodes
        if at.shares_agent(node) and worker not in workers
    }
    state = replace(
        state,
        contact=state.contact.without_agents(nodes),
        vacancies=replace(
            state.vacancies, offers=tuple(offer for offer in state.vacancies.offers if offer.node not in nodes)
        ),
    )
    if state.phase is Phase.GATHERING:  # who has attached by then begins elsewhere, too
        here = {worker: node for worker, node in workers.items() if worker not in state.roster.spares}
        workers, coming = {each: workers[each] for each in workers.keys() - here.keys()}, coming | here
    state, outputs = on_lost(state, {worker: f"its node {node} is gone" for worker, node in sorted(workers.items())})
    for worker, node in sorted(coming.items()):
        if state.phase is Phase.ENDED:
            break
        process = state.vacancies.starting.process_of(worker) or state.roster.processes.get(worker)
        state, more = on_no_show(state, worker, process, f"its node {node} is gone", its_own=False)
        outputs += more
    return prefixed(said, (state, outputs))


def _away_with(state: Membership, workers: Collection[WorkerId]) -> list[NodeId]:
    """The nodes of these workers whose agents are away, too: all else there is as they are."""
    nodes = {state.roster.processes[worker].node for worker in workers}
    away = [node for node, since in state.contact.agents.items() if since is not None]
    return sorted(agent for agent in away if state.contact.here and any(agent.shares_agent(node) for node in nodes))


def on_closed(state: Membership, worker: WorkerId, now: float) -> Decision:
    """A connection is gone: of a dead worker, as the agent will say at once, or of one that will be back."""
    if worker not in state.present | state.roster.spares:
        return state, ()
    return replace(state, contact=state.contact.closed(worker, now)), ()


def _given_up(state: Membership, now: float) -> dict[WorkerId, str]:
    """Who has been away for too long, and how that shows."""
    if state.phase is Phase.REATTACHING:
        if state.contact.others_lead and not (state.contact.here or state.contact.returned):
            return {}  # it is we whom nobody reaches, or wants: another one may have all of them
        late = state.present - set(state.contact.returned)
        until = max(state.contact.reattach_until, state.contact.reachable_since + BACK_S)
        return dict.fromkeys(sorted(late), "did not come back") if now >= until else {}
    grace_s = max(DETACHED_GRACE_S, state.watch.limit_s)
    how = f"connection closed for {grace_s:g} s"
    return {worker: how for worker in state.contact.detached if now - _away_since(state, worker) >= grace_s}


def _away_since(state: Membership, worker: WorkerId) -> float:
    """When its connection was closed, or when a pause of everybody ended after that."""
    vital = state.watch.vitals.get(worker)
    return max(state.contact.detached[worker], state.contact.detached[worker] if vital is None else vital.heard_at)


def on_suspect(state: Membership, suspect: Suspect, now: float) -> Decision:
    """A worker could not talk to a peer: if no loss explains that soon, see on_tick."""
    record = Record(
        event=Suspected(
            worker=str(suspect.worker),
            peer=str(suspect.peer or ""),
            generation=state.generation,
            detail=suspect.detail,
        )
    )
    since = now if state.doubts.suspected_at is None else state.doubts.suspected_at
    said = {**state.doubts.suspicions, (suspect.worker, suspect.peer): f"{suspect.worker}: {suspect.detail}"}
    return replace(state, doubts=replace(state.doubts, suspected_at=since, suspicions=said)), (record,)


def on_tick(state: Membership, tick: Tick, now: float) -> Decision:
    """Whoever is away for too long, or hung, is lost; any suspicion that no loss explains: all connect anew."""
    members, spares = _judged(state)
    state = replace(state, watch=pass_time(state.watch, (*members, *spares), now, gap_s=tick.gap_s))
    if gone := [node for node, due in sorted(_due(state).items()) if now >= due]:
        return _on_gone(state, gone, now)
    if given_up := _given_up(state, now):
        return on_lost(state, given_up)
    if state.phase is not Phase.REATTACHING and (late := state.vacancies.starting.overdue(now)):
        return on_overdue(state, late)
    if state.phase is Phase.GATHERING:
        return gather(state, now)
    if state.phase is Phase.REATTACHING:
        return state, ()
    raised_at = now if state.doubts.raised_at is None else state.doubts.raised_at
    state = replace(state, doubts=replace(state.doubts, raised_at=raised_at if state.unjudged else None))
    if state.doubts.raised_at is not None and now - state.doubts.raised_at >= OTHERS_S:
        return recover(state)
    if state.prospects.began is None and state.phase is Phase.RUNNING:
        state = replace(state, prospects=replace(state.prospects, began=now))
    if state.phase is Phase.WAITING and state.forming.wait_until is None:
        state = replace(state, forming=replace(state.forming, wait_until=now + state.rules.wait_s))
    if state.phase is Phase.WAITING and state.forming.wait_until is not None and now >= state.forming.wait_until:
        return stop_waiting(state)
    filled, outputs = fill_places(state)
    if outputs:
        return filled, outputs
    running = state.phase in (Phase.FORMING, Phase.RUNNING)
    found = slow(state.watch, members) if running else {}
    owners = _owners(state) if found else ()  # whoever is stuck was slow before
    suspected = {peer for _, peer in state.doubts.suspicions if peer is not None}
    if hung := overdue(state.watch, (*members, *spares), running=running, owners=owners, suspected=suspected):
        gone = _away_with(state, hung)
        return _on_gone(state, gone, now) if gone else on_lost(state, hung)
    state, told = _tell_slow(state, found, needed(state.watch, members, owners)) if running else (state, ())
    unexplained = _unexplained(state, now)
    stuck = running and state.contact.detached.keys() <= state.roster.spares and deadlocked(state.watch, members)
    if not (unexplained or stuck):
        return state, told
    reason = next(iter(state.doubts.suspicions.values())) if unexplained else "all workers wait for one another"
    return prefixed(told, _reform(state, reason, now))


def _unexplained(state: Membership, now: float) -> bool:
    """Whether a suspicion is as old as it may be, and no lost connection may explain it: it is back soon, or lost."""
    doubted = {worker for pair in state.doubts.suspicions for worker in pair if worker is not None}
    waited = state.doubts.suspected_at is not None and now - state.doubts.suspected_at >= SUSPICION_GRACE_S
    return waited and not doubted & state.contact.detached.keys()


def _owners(state: Membership) -> tuple[tuple[WorkerId, ...], ...]:
    """Per layer, who holds it and can be talked to."""
    return state.grid.baseline.placement.without(state.absent | state.contact.detached.keys()).owners_by_layer


def _tell_slow(state: Membership, found: Mapping[WorkerId, str], kept: Mapping[WorkerId, str]) -> Decision:
    """Who is slow, and who is waited for though it is stuck, is told once, until it moves on."""
    if not found and not state.doubts.slow:  # nearly always
        return state, ()
    news = [who for who in found if who not in state.doubts.slow]
    told: tuple[Output, ...] = tuple(notice(who, f"is slow: {found[who]}") for who in news)
    if kept.keys() - state.doubts.waited_for:
        text = ", ".join(f"worker {who} ({what})" for who, what in kept.items())
        whose = "its layers" if len(kept) == 1 else "their layers"
        text = f"waiting for {text}: nobody else holds all of {whose} and surely works"
        told += (Record(event=Notice(worker="coordinator", text=text)),)
        told += (Tell(to=None, command=Remark(worker=None, kind=text, text=text)),)
    doubts = replace(state.doubts, slow=frozenset(found), waited_for=frozenset(kept))
    return replace(state, doubts=doubts), told


def _judged(state: Membership) -> tuple[tuple[WorkerId, ...], tuple[WorkerId, ...]]:
    """The members and the spares whose heartbeats are waited for."""
    if state.phase in (Phase.GATHERING, Phase.REATTACHING):
        return (), ()
    members = tuple(worker for worker in state.alive if worker not in state.contact.detached)
    return members, tuple(sorted(state.roster.spares - state.contact.detached.keys()))


def _reform(state: Membership, reason: str, now: float) -> Decision:
    """All begin anew, broken links included, unless that has been tried in vain.

    Where it has been because of nodes that cannot reach each other, all go on without some of these.
    """
    where = {worker: process.node for worker, process in state.roster.processes.items() if worker in _there(state)}
    pairs = _suspected(state, where)
    again = {pair for pair in pairs if now - state.doubts.renewed.get(pair, -math.inf) < AGAIN_S}
    if apart := _apart(state, where, again):
        return on_lost(state, apart)
    if state.doubts.reformations >= MAX_REFORMATIONS:
        detail = f"communication keeps failing though every worker lives: {reason}"
        return end_job(state, "error", detail, state.rules.directory)
    reformations, renewed = state.doubts.reformations + 1, {**state.doubts.renewed, **dict.fromkeys(pairs, now)}
    state = state.refusing(f"layers could not be handed over: {reason}")
    state, outputs = recover(replace(state, watch=forget(state.watch, state.alive)))
    return replace(state, doubts=replace(state.doubts, reformations=reformations, renewed=renewed)), outputs


def _there(state: Membership) -> frozenset[WorkerId]:
    return state.present | state.roster.spares


def _suspected(state: Membership, where: Mapping[WorkerId, NodeId]) -> set[tuple[NodeId, NodeId]]:
    """The pairs of nodes, in order, whose workers suspect each other."""
    pairs = {
        (min(where[worker], where[peer]), max(where[worker], where[peer]))
        for worker, peer in state.doubts.suspicions
        if worker in where and peer is not None and peer in where
    }
    return {(one, other) for one, other in pairs if one != other}


def _apart(
    state: Membership, where: Mapping[WorkerId, NodeId], pairs: Collection[tuple[NodeId, NodeId]]
) -> dict[WorkerId, str]:
    """Who is to go, and why, so that all who are left reach each other; nobody where a layer would be lost by that."""
    found = cover(pairs, where, state.grid.baseline.placement.without(state.absent))
    others = {
        node: ", ".join(sorted({str(end) for pair in pairs if node in pair for end in pair if end != node}))
        for node in found
    }
    return {
        worker: f"its node {node} and {others[node]} cannot reach each other"
        for worker, node in sorted(where.items())
        if node in found
    }
