"""Whoever attaches, for the first time or again: a worker, or the agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from holdfast.control.membership.acting import carry_out
from holdfast.control.membership.boundary import on_node_leaving, on_preempted
from holdfast.control.membership.forgotten import forgotten, knows_more, note_exits, on_survivor, untold
from holdfast.control.membership.gathering import gather
from holdfast.control.membership.losses import on_exited, on_spare_leaving
from holdfast.control.membership.raising import on_raised
from holdfast.control.membership.reattaching import on_return
from holdfast.control.membership.recovering import fill_places, to_fill
from holdfast.control.membership.scoring import on_scored, scores_kept
from holdfast.control.membership.starting import Offer
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Output,
    Phase,
    Tell,
    expulsion,
    fence,
    notice,
    prefixed,
)
from holdfast.control.membership.vacancies import answer_offers, ask, spawn
from holdfast.control.messages import Attached, BeginAnew, Expel, Hello, Started, StartWorker, Strike
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process
from holdfast.strategies.answers import resume

__all__ = ["on_agent", "on_hello", "on_started"]


def on_hello(state: Membership, worker: WorkerId, hello: Hello) -> Decision:
    """A worker's process attaches: it is let in, or told that it is none of ours any more."""
    if _is_over(state, worker, hello):
        reason = f"worker {worker} is no member any more"
        return state, (Tell(to=worker, process=hello.process, command=Expel(reason=reason)),)
    ids = state.grid.baseline.workers
    outputs: tuple[Output, ...] = ()
    for scored in hello.scored if worker in state.present else ():
        state, told = on_scored(state, scored)
        outputs += told
    if state.running.evaluated and worker in state.present:  # it may have missed that, and wait for it
        outputs += (Tell(to=worker, process=hello.process, command=scores_kept(state)),)
    if hello.raised is not None and worker in ids and not state.past_lost:  # time begins to count at the next tick
        state, told = on_raised(state, hello.raised)
        outputs += told
    return prefixed(outputs, _let_in(state, worker, hello))


def _let_in(state: Membership, worker: WorkerId, hello: Hello) -> Decision:
    node = hello.process.node
    again = tuple(Tell(to=None, node=node, command=Strike(worker=worker, spec=spec)) for spec in hello.strikes)
    return prefixed((Tell(to=worker, process=hello.process, command=Attached()), *again), _admit(state, worker, hello))


def _is_over(state: Membership, worker: WorkerId, hello: Hello) -> bool:
    """Whether this process is none that may take part: it was held for lost, or another one has taken its place.

    Where there is no place for it, it may be a spare if it is fresh; or if it knows more of the past than we do.
    """
    process, roster, ids = hello.process, state.roster, state.grid.baseline.workers
    if process in state.vacancies.starting.spent:
        return True
    ours = roster.may_be(worker, process)
    if worker in roster.spares or (worker in ids and worker not in roster.lost):
        return not ours
    if worker in ids:
        return ours and worker not in roster.kept
    known = state.past_lost or knows_more(state, hello)
    return roster.processes.get(worker) == process or (hello.generation > 0 and not known)


def _admit(state: Membership, worker: WorkerId, hello: Hello) -> Decision:
    if knows_more(state, hello):
        state, told = forgotten(state)
        return prefixed(told, on_survivor(state, worker, hello))
    if state.past_lost:
        return on_survivor(state, worker, hello)
    stopped = worker in state.roster.kept
    if stopped and state.roster.processes[worker] == hello.process:  # it is none of us, but stays
        return state, ()
    if stopped:  # another process takes its place already
        told = expulsion(state, worker, "another process has taken its place")
        return prefixed(told, _admit(replace(state, roster=state.roster.released({worker})), worker, hello))
    if worker not in state.grid.baseline.workers:
        return _admit_spare(state, worker, hello)
    new, rests = worker in state.roster.lost, worker in state.roster.dormant
    state = _came(state.attached(worker, hello.process, arriving=new), worker)
    state = replace(
        state,
        roster=state.roster.not_awaiting({worker}).told_to_rest(worker, hello.dormant),
        prospects=replace(state.prospects, planned={}) if new or rests != hello.dormant else state.prospects,
    )
    if state.generation:
        return on_return(state, worker, hello)
    if set(state.roster.processes) >= set(state.grid.baseline.workers):
        return carry_out(state, resume("", state.grid.baseline))
    return state, ()


def _came(state: Membership, worker: WorkerId) -> Membership:
    """It is not waited for any more."""
    starting = state.vacancies.starting
    starting = starting.over(worker) if state.generation else starting.attached(worker)
    return replace(state, vacancies=replace(state.vacancies, starting=starting))


def _admit_spare(state: Membership, worker: WorkerId, hello: Hello) -> Decision:
    """There is no place for it so far: it waits for one, unless it was told to go."""
    known = worker in state.roster.spares
    state = _came(state.with_spare(worker, hello.process), worker)
    state = replace(state, roster=state.roster.not_awaiting({worker}).told_to_rest(worker, hello.dormant))
    if hello.raised is not None:
        return on_raised(state, hello.raised)
    if hello.leaving:
        return on_spare_leaving(state, worker)
    told = () if known else (notice(worker, "is here as a spare, for the next place that is vacant"),)
    return prefixed(told, fill_places(state))


def on_started(state: Membership, started: Started, now: float) -> Decision:
    """The agent has started a process: from now on it is waited for, unless it is here already.

    Before the job has begun another one may be: it was asked for twice.
    """
    here = state.roster.processes.get(started.worker)
    if here == started.process:
        return state, ()
    if here is not None and state.phase is Phase.GATHERING:
        return state, fence(started.worker, started.process)
    starting = state.vacancies.starting.begun(started, now)
    return replace(state, vacancies=replace(state.vacancies, starting=starting)), ()


def on_agent(state: Membership, hello: Hello, now: float) -> Decision:
    """An agent is back: what it saw meanwhile counts now, and what it may have missed is told again."""
    if knows_more(state, hello):
        state, told = forgotten(state)
        return prefixed(told, on_agent(state, hello, now))
    if state.past_lost:
        state, hello = note_exits(state, hello), msgspec.structs.replace(hello, offers=(), started=())
    node, found = hello.process.node, _sifted(state, hello)
    hello = found.hello
    outputs: tuple[Output, ...] = ()
    for each in found.left_over:
        outputs += fence(each.worker, each.process)
    if found.of_no_use:
        hello = msgspec.structs.replace(hello, offers=())
        outputs += (Tell(to=None, node=node, command=BeginAnew(reason=f"node {node} was held to be gone")),)
    state = _heard(state, hello, now)
    for started in hello.started:
        state, told = on_started(state, started, now)
        outputs += told
    gone = {exit_.process for exit_ in hello.exits}
    for process, worker in found.lost.items():
        outputs += fence(worker, process) if process.node.shares_agent(node) and process not in gone else ()
    for exit_ in hello.exits:
        if state.roster.may_be(exit_.worker, exit_.process):
            state, more = on_exited(state, exit_.worker, exit_.process, exit_.status)
            outputs += untold(state, exit_, more)
    if state.phase is Phase.ENDED or found.of_no_use:
        return state, outputs
    asked = {
        each.command.worker for each in outputs if isinstance(each, Tell) and isinstance(each.command, StartWorker)
    }
    unheard = state.roster.expected_of(node) - frozenset(hello.coming) - asked
    if state.phase is Phase.GATHERING and hello.preempted:
        return prefixed(outputs, on_preempted(state))
    if state.phase is Phase.GATHERING:
        come = state.roster.processes.keys()
        state = replace(state, roster=state.roster.awaiting({who: node for who in hello.coming if who not in come}))
        for worker in sorted(unheard):
            state, told = ask(state, worker, node, first=True)
            outputs += told
        return prefixed(outputs, gather(state, now))
    state = replace(state, roster=state.roster.not_awaiting(unheard))
    again = dict.fromkeys(sorted(unheard & to_fill(state)), node)
    state, spawned = spawn(state, again, again) if unheard else (state, ())
    state, preempted = on_preempted(state) if hello.preempted else (state, ())
    state, leaving = on_node_leaving(state, node) if hello.leaving else (state, ())
    return prefixed((*outputs, *spawned, *preempted, *leaving), answer_offers(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sifted:
    """What an agent's hello comes to.

    Attributes:
        hello: the same, without what is left over.
        left_over: processes that nobody waits for.
        lost: the newest processes of workers that are lost, and whose.
        of_no_use: whether it was held to be gone, and is back with nothing that anybody waits for.
    """

    hello: Hello
    left_over: tuple[Started, ...]
    lost: Mapping[Process, WorkerId]
    of_no_use: bool


def _sifted(state: Membership, hello: Hello) -> _Sifted:
    node, roster = hello.process.node, state.roster
    newest = roster.processes
    lost = {newest[worker]: worker for worker in sorted(roster.lost - roster.kept) if worker in newest}
    left = tuple(each for each in hello.started if _is_left_over(state, node, each.worker, each.process))
    ended = {each.worker for each in hello.started if each in left or each.process in lost}
    started = tuple(each for each in hello.started if each not in left)
    coming = tuple(
        worker for worker in hello.coming if worker not in ended and not _is_left_over(state, node, worker, None)
    )
    known = state.past_lost or any(each.shares_agent(node) for each in state.contact.agents)
    had_something = hello.started or hello.coming or hello.exits
    useful = coming or any(each.process not in lost for each in started)
    return _Sifted(
        hello=msgspec.structs.replace(hello, started=started, coming=coming),
        left_over=left,
        lost=lost,
        of_no_use=bool(had_something and not known and not useful),
    )


def _is_left_over(state: Membership, node: NodeId, worker: WorkerId, process: Process | None) -> bool:
    """Whether nobody waits for a worker on a node any more (of a process, if it is known)."""
    if process in state.vacancies.starting.spent:
        return True
    if worker in state.roster.expected_of(node):
        return False
    known = (state.roster.processes.get(worker), state.vacancies.starting.process_of(worker))
    places = [each.node for each in known if each is not None]
    places += [state.roster.where[worker]] if worker in state.roster.where else []
    return bool(places) and not any(place.shares_agent(node) for place in places)


def _heard(state: Membership, hello: Hello, now: float) -> Membership:
    """An agent is here, and has said what it offers."""
    node = hello.process.node
    others = tuple(offer for offer in state.vacancies.offers if offer.node != node)
    contact = state.contact.with_agent(node, now)
    return replace(
        state,
        contact=contact.told_to_go(node) if hello.leaving else contact,
        vacancies=replace(state.vacancies, offers=(*others, *(Offer(place, node) for place in hello.offers))),
    )
