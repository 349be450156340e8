"""Workers are gone: who hears of it, and whom it concerns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.control.detection import forget
from holdfast.control.membership.ending import end_job
from holdfast.control.membership.reattaching import conclude_return, on_parted
from holdfast.control.membership.recovering import bereft, recover, to_fill
from holdfast.control.membership.roster import without
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Output,
    Phase,
    Record,
    Tell,
    expulsion,
    fence,
    held_for_lost,
    notice,
    prefixed,
)
from holdfast.control.membership.vacancies import NO_PLACES, answer_offers, ask, matched, spawn
from holdfast.control.messages import Shutdown
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import Process
from holdfast.errors import describe_exit
from holdfast.telemetry.events import Parted

__all__ = ["on_exited", "on_lost", "on_no_show", "on_overdue", "on_spare_leaving"]


def on_exited(state: Membership, worker: WorkerId, process: Process, status: int) -> Decision:
    """A process has ended: in order, early, or it is a loss."""
    how, roster, gathering = f"process ended: {describe_exit(status)}", state.roster, state.phase is Phase.GATHERING
    if worker in roster.spares:
        return on_lost(state, {worker: how}) if roster.processes[worker] == process else (state, ())
    if worker not in state.grid.baseline.workers and worker not in roster.processes:
        waited_for = state.vacancies.starting.process_of(worker) == process
        return on_no_show(state, worker, process, how) if waited_for else (state, ())
    if gathering or not roster.may_be(worker, process):
        known = state.vacancies.starting.process_of(worker) or (roster.processes.get(worker) if gathering else None)
        return on_no_show(state, worker, process, how) if known in (None, process) else (state, ())
    asked = roster.where.get(worker) if status == 0 and worker in roster.lost & roster.expected else None
    if asked and asked.shares_agent(process.node) and state.vacancies.starting.process_of(worker) is None:
        return ask(state, worker, asked)  # it had left, and its agent found it still there
    if worker in roster.leaving and status == 0:  # it went in order, and has told or will tell so, if anybody is there
        return on_parted(state, worker) if state.phase is Phase.REATTACHING else (state, ())
    return on_lost(state, {worker: how})


def on_no_show(
    state: Membership, worker: WorkerId, process: Process | None, how: str, *, its_own: bool = True
) -> Decision:
    """A process that was started (None: which is not known) does not come, or died early: another one is tried, once.

    Not of a spare, which nobody waits for. ``its_own``: it is not known to have ended with its whole node; before the
    job has begun these do not count, and never does one whose node is to go.
    """
    if worker not in state.grid.baseline.workers:
        vacancies = replace(state.vacancies, starting=state.vacancies.starting.attached(worker))
        text = f"was lost while starting ({how}): there is one spare less"
        roster = state.roster.not_awaiting({worker})
        return replace(state, vacancies=vacancies, roster=roster), (notice(worker, text),)
    roster = state.roster
    begun, failed = state.phase is not Phase.GATHERING, process in state.vacancies.starting.spent
    if failed or (begun and worker not in state.roster.expected):
        return state, ()
    at = roster.where.get(worker) if (last := process or roster.processes.get(worker)) is None else last.node
    counts = (begun or its_own) and not any(at is not None and at.shares_agent(each) for each in state.contact.leaving)
    if counts and worker in state.vacancies.starting.again:
        return _on_second_no_show(state, worker, how)
    state = replace(
        state,
        roster=roster if begun else replace(roster, processes=without(roster.processes, worker)),
        contact=state.contact.connected(worker),
        watch=forget(state.watch, (worker,)),
        vacancies=replace(state.vacancies, starting=state.vacancies.starting.failed(worker, process, counts=counts)),
    )
    node = roster.where.get(worker) if last is None else state.contact.agent_of(last)
    state, told = ask(state, worker, node, first=not begun)
    then = "it is started again, once" if counts else "it is started again where there is room"
    return state, (notice(worker, f"was lost while starting ({how}); {then}"), *told)


def _on_second_no_show(state: Membership, worker: WorkerId, how: str) -> Decision:
    """Nobody is started a third time: a job that has not begun is over, a running one goes on without."""
    if state.phase is Phase.GATHERING:
        detail = f"worker {worker} was lost while starting, twice ({how})"
        return end_job(state, "error", detail, state.rules.directory)
    text = f"was started twice to come into the running job and was lost before it had attached ({how})"
    state = replace(
        state,
        roster=state.roster.not_awaiting({worker}),
        vacancies=replace(state.vacancies, starting=state.vacancies.starting.over(worker)),
    )
    return prefixed((notice(worker, text),), recover(state) if state.forming.wait_for_all else (state, ()))


def on_overdue(state: Membership, how: Mapping[WorkerId, str]) -> Decision:
    """Processes that were started take too long to come: they are ended, in case they ever do."""
    outputs: tuple[Output, ...] = ()
    for worker, text in how.items():
        process, _ = state.vacancies.starting.since[worker]
        starting = state.vacancies.starting.attached(worker)
        state = replace(state, vacancies=replace(state.vacancies, starting=starting))
        state, more = on_no_show(state, worker, process, text)
        outputs += (*fence(worker, process), *more)
        if state.phase is Phase.ENDED:
            break
    return state, outputs


def on_lost(state: Membership, how: Mapping[WorkerId, str]) -> Decision:
    """Workers are gone, in one event: the survivors form a new generation, or what lives is saved."""
    if stopped := state.roster.kept & frozenset(how):  # lost before, but their processes were to stay
        told = tuple(output for worker in sorted(stopped) for output in expulsion(state, worker, how[worker]))
        state, free = answer_offers(replace(state, roster=state.roster.released(stopped)))
        return prefixed((*told, *free), on_lost(state, how))
    if spares := state.roster.spares & frozenset(how):
        state, before = _lose_spares(state, {worker: how[worker] for worker in sorted(spares)})
        return prefixed(before, on_lost(state, how))
    news = {worker: text for worker, text in how.items() if worker in state.present}
    if not news:
        return state, ()
    if state.phase is Phase.GATHERING:
        return _lost_while_gathering(state, news)
    noted = tuple(output for worker, text in news.items() for output in held_for_lost(state, worker, text))
    gone = frozenset(news)
    touched = _in_generation(state) & gone
    state = bereft(state, gone)
    if state.phase is Phase.REATTACHING:
        return prefixed(noted, conclude_return(state))
    state, outputs = recover(state) if touched else (state, ())
    return prefixed((*noted, *outputs), answer_offers(state))


def _lose_spares(state: Membership, how: Mapping[WorkerId, str]) -> Decision:
    """Nobody has to recover."""
    told = [output for worker, text in how.items() for output in held_for_lost(state, worker, text)]
    return prefixed(told, _without_spares(state, frozenset(how)))


def on_spare_leaving(state: Membership, worker: WorkerId) -> Decision:
    """A spare was told to go: nobody needs it."""
    parted = Record(event=Parted(worker=str(worker), step=state.last_step + 1))
    shutdown = Tell(to=worker, process=state.roster.processes[worker], command=Shutdown(reason="it has no place"))
    return prefixed((parted, shutdown), _without_spares(state, frozenset({worker})))


def _without_spares(state: Membership, gone: frozenset[WorkerId]) -> Decision:
    """Places that they might have taken are for whom the strategy wants started there, or who was offered.

    Answers to losses that were planned while they were there may count on them.
    """
    state = state.departed(gone)
    state = replace(state, prospects=replace(state.prospects, planned={}))
    if state.phase in NO_PLACES or not state.vacant:
        return state, ()
    for_spares = {place for place, _ in matched(state)}
    state, spawned = spawn(state, sorted(to_fill(state) - for_spares))
    return prefixed(spawned, answer_offers(state))


def _lost_while_gathering(state: Membership, news: Mapping[WorkerId, str]) -> Decision:
    """They are gone before all have attached."""
    outputs: tuple[Output, ...] = ()
    for worker, text in news.items():
        starting = state.vacancies.starting
        process = state.roster.processes.get(worker) or starting.process_of(worker)
        if process is None and worker in starting.again:  # its end is known, and another one is on its way
            continue
        state, more = on_no_show(state, worker, process, text)
        outputs += (*fence(worker, process), *more)
        if state.phase is Phase.ENDED:
            break
    return state, outputs


def _in_generation(state: Membership) -> frozenset[WorkerId]:
    """Whose loss concerns this generation, or the one that is prepared or waited for."""
    prepared = state.running.upcoming.plan.workers if state.running.upcoming is not None else ()
    awaited = state.roster.arriving if state.forming.wait_for_all else ()
    return frozenset((*state.alive, *prepared, *awaited))
