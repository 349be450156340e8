"""A connection, or the coordinator itself, was lost and is back: can what runs go on, or do all begin anew?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.control.membership.boundary import change_members
from holdfast.control.membership.ending import save
from holdfast.control.membership.progress import all_finished, on_finished
from holdfast.control.membership.recovering import recover, restore_if_whole
from holdfast.control.membership.scoring import tell_scores
from holdfast.control.membership.state import Decision, Membership, Phase, Record, prefixed
from holdfast.control.membership.vacancies import answer_offers
from holdfast.control.messages import Hello
from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import Parted, Reattached

__all__ = ["conclude_return", "on_parted", "on_return"]


def on_return(state: Membership, worker: WorkerId, hello: Hello) -> Decision:
    """A worker is back. What was on its way to it or from it may be lost, so if that can matter, all begin anew."""
    if hello.leaving:
        state = replace(state, roster=state.roster.told_to_go({worker}))
    if _healed(state, worker, hello):
        state = replace(state, roster=state.roster.caught_up(worker))
    if state.phase is Phase.REATTACHING:
        last_step = max(state.last_step, hello.step - 1)
        return conclude_return(replace(state, last_step=last_step, contact=state.contact.back(worker, hello)))
    if not _undisturbed(state, worker, hello):
        return recover(state)
    if worker in state.roster.arriving:
        return restore_if_whole(state) if state.phase is Phase.WAITING else change_members(state)
    state = replace(state, reports=state.reports.of_joined(worker))
    state, outputs = on_finished(state, worker, hello.step) if hello.activity == "finished" else (state, ())
    return prefixed(outputs, change_members(state))


def _healed(state: Membership, worker: WorkerId, hello: Hello) -> bool:
    """Whether a worker that entered holds its state by now, though we may not have heard so; all may have gone over."""
    over = state.running.upcoming is not None and hello.generation == state.running.upcoming.generation
    return worker in state.roster.entering and hello.has_state and (over or _runs(state, hello))


def _runs(state: Membership, hello: Hello) -> bool:
    return hello.generation == state.generation and hello.activity != "waiting"


def _undisturbed(state: Membership, worker: WorkerId, hello: Hello) -> bool:
    """Whether everything can go on as if this worker had never been away."""
    if worker in state.roster.arriving:  # nothing is asked of it before a generation with it is prepared
        return state.running.upcoming is None or worker not in state.running.upcoming.entering
    return state.phase is Phase.RUNNING and _settled(state) and _runs(state, hello) and not hello.prepared


def _settled(state: Membership) -> bool:
    """Whether nobody is between two generations."""
    return state.running.upcoming is None and not state.roster.entering and not state.catching_up


def conclude_return(state: Membership) -> Decision:
    """Once all who live are back: if all run the stored generation they go on, undisturbed; else all begin anew."""
    if not set(state.contact.returned) >= state.present:
        return state, ()
    hellos = {worker: state.contact.returned[worker] for worker in state.alive}
    members = set(state.running.plan.workers) if state.running.plan is not None else set()
    runs = all(_runs(state, hello) and not hello.prepared for hello in hellos.values())
    adopted = bool(hellos) and members == set(hellos) and _settled(state) and runs
    record = Record(event=Reattached(generation=state.generation, adopted=adopted))
    state, outputs = _adopt(state, hellos) if adopted else recover(state)
    state, told = tell_scores(state, over=adopted and state.phase is Phase.SAVING)
    return prefixed((record, *outputs, *told), answer_offers(state))


def _adopt(state: Membership, hellos: Mapping[WorkerId, Hello]) -> Decision:
    """Goes on with what all members run."""
    done = {worker: hello.step for worker, hello in hellos.items() if hello.activity == "finished"}
    ends = min(done.values(), default=state.num_steps)
    state = replace(
        state,
        phase=Phase.RUNNING,
        running=replace(state.running, ends=ends) if ends < state.num_steps else state.running,
        reports=replace(state.reports, joined=frozenset(hellos), finished=state.reports.finished | frozenset(done)),
        forming=replace(state.forming, resume_step=min(hello.step for hello in hellos.values()), lost_work=()),
        contact=replace(state.contact, returned={}),
    )
    return save(state, state.num_steps) if all_finished(state) else change_members(state)


def on_parted(state: Membership, worker: WorkerId) -> Decision:
    """A worker has left in order while there was no coordinator."""
    step = max((hello.step for hello in state.contact.returned.values()), default=0)
    parted = Record(event=Parted(worker=str(worker), step=step))
    return prefixed((parted,), conclude_return(state.departed(frozenset({worker}))))
