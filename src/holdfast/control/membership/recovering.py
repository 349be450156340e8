"""What answers a loss: who is left goes on, waits for workers, loads a checkpoint, or saves what lives."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.acting import carry_out, give_up_replays
from holdfast.control.membership.blame import Program, described, judge, recent
from holdfast.control.membership.boundary import change_members
from holdfast.control.membership.counting import work_of
from holdfast.control.membership.ending import end_job
from holdfast.control.membership.foreseeing import foresee
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Output,
    Phase,
    held_for_lost,
    notice,
    prefixed,
)
from holdfast.control.membership.vacancies import matched, seat, seat_survivors
from holdfast.control.membership.viewing import view_of
from holdfast.control.messages import Raised, Unreadable, Unreplayed
from holdfast.core.ids import WorkerId
from holdfast.planning.training import Rerouted
from holdfast.recovery.actions import LoadState, RecoveryPlan, ReplayLayers, Spawn
from holdfast.strategies.adaptive import adaptive
from holdfast.strategies.answers import give_up, resume
from holdfast.strategies.registry import strategy_named

__all__ = [
    "bereft",
    "fill_places",
    "on_unreadable",
    "on_unreplayed",
    "plan_recovery",
    "recover",
    "restore_if_whole",
    "stop_waiting",
    "to_fill",
    "unplanned",
]


def plan_recovery(state: Membership, lost: frozenset[WorkerId], offer: Rerouted | None = None) -> RecoveryPlan:
    """Returns what answers the loss of all of ``lost``, which takes milliseconds: ahead of time where possible.

    Args:
        state: the membership.
        lost: all who would be gone.
        offer: a plan for this very loss that is better than what would be made at once.
    """
    return strategy_named(state.rules.strategy).answer(replace(view_of(state, lost), offer=offer))


def stop_waiting(state: Membership) -> Decision:
    """Whoever was waited for has not come: the others go on without."""
    recovery = strategy_named(state.rules.strategy).answer(replace(view_of(state, state.absent), waited=True))
    state, foreseen = foresee(replace(state, forming=replace(state.forming, wait_until=None)), recovery)
    return prefixed(foreseen, carry_out(state, recovery))


def unplanned(state: Membership) -> tuple[frozenset[WorkerId], ...]:
    """Returns the losses that could come next and have no answer prepared yet; none unless steps are being run."""
    if state.phase is not Phase.RUNNING:
        return ()
    ahead = (state.absent | {worker} for worker in state.full)
    return tuple(lost for lost in ahead if lost not in state.prospects.planned)


def recover(state: Membership) -> Decision:
    """Answers the loss of members: whoever was entering has to enter again.

    Whoever has stopped because of an exception is lost, too, unless that is the program's fault.
    """
    state = replace(
        state,
        generation=_newest(state),
        roster=state.roster.to_enter_again(),
        running=replace(state.running, upcoming=None),
        prospects=replace(state.prospects, promised=None),
        pinned=state.pinned and (state.pinned[0], 0),
    )
    state = _taken_for_over(state)
    if state.past_lost:
        return carry_out(seat_survivors(state), give_up("", state.forming.lost_layers))
    if state.exceptions.blame:
        return _save_all(state)
    losses = (*state.exceptions.losses, *state.unjudged)
    if program := judge(state.exceptions.raised, losses, state.rules.tolerate):
        return _blame(state, program)
    if state.unjudged:
        exceptions = replace(state.exceptions, losses=recent(losses))
        return _lose_stopped(replace(state, exceptions=exceptions), state.unjudged)
    return _answer(state)


def _answer(state: Membership) -> Decision:
    """Who is left goes on without the lost; but not from a checkpoint where workers that have stopped hold layers."""
    if program := _irreplaceable(state):
        return _blame(state, program)
    recovery = state.prospects.planned.get(state.absent) or plan_recovery(state, state.absent)
    told: tuple[Output, ...] = ()
    if recovery.weighed or not recovery.keeps_state:  # what could be loaded may be something else; spares can, too
        state, told = seat(state) if state.restoring.restorable else (state, ())
        recovery = plan_recovery(state, state.absent)
    if not state.present:  # nobody is there to load anything, or to wait for others
        return _save_all(state)
    state = replace(state, doubts=replace(state.doubts, reformations=0), prospects=replace(state.prospects, planned={}))
    state, foreseen = foresee(state, recovery)
    state, more = carry_out(state, recovery)
    # Whoever is waited for may be here already: who was about to enter, and has no state, can load it.
    return prefixed((*told, *foreseen, *more), restore_if_whole(state) if state.phase is Phase.WAITING else (state, ()))


def _taken_for_over(state: Membership) -> Membership:
    """Supposes that layers have been handed over where only then all have an owner; what workers hold will tell.

    They may have crossed that boundary, and let go, without anybody having heard of it here.
    """
    now, then = state.grid.baseline, state.grid.target
    if then is None or not now.placement.unowned_layers(state.absent) or then.placement.unowned_layers(state.absent):
        return state
    return replace(state, grid=state.grid.taken_for_over(then))


def _irreplaceable(state: Membership) -> Program | None:
    """Why nobody can go on where workers have stopped: a layer is left to them."""
    placement = state.grid.baseline.placement
    layers = placement.unowned_layers(state.absent)
    known = [each for each in state.exceptions.raised if each.worker in placement.workers]  # the grid may have shrunk
    stopped = [each for each in known if set(placement.layers_of(each.worker)) & set(layers)]
    names = ", ".join(map(str, layers))
    return Program(first=stopped[0], why=f"nobody else holds layer(s) {names} and can go on") if stopped else None


def _lose_stopped(state: Membership, stopped: tuple[Raised, ...]) -> Decision:
    """Goes on without workers that have stopped; their state stays with them until it is known whose fault it was."""
    kept = frozenset(each.worker for each in stopped if each.sound and each.worker in state.full)
    gone = frozenset(each.worker for each in stopped)
    told = [output for each in stopped for output in _told(state, each, stays=each.worker in kept)]
    without_them = _all_judged(bereft(state, gone))
    roster = without_them.roster
    without_them = _taken_for_over(replace(without_them, roster=replace(roster, kept=roster.kept | kept)))
    if program := _irreplaceable(without_them):
        return _blame(state, program)
    return prefixed(told, _answer(without_them))


def _told(state: Membership, report: Raised, *, stays: bool) -> tuple[Output, ...]:
    held = held_for_lost(state, report.worker, f"raised: {described(report)}")
    return held[:1] if stays else held


def _blame(state: Membership, program: Program) -> Decision:
    """It is the program: all that lives is saved, also by workers that have stopped, and the job ends.

    While a checkpoint is loaded nothing else is left to be saved.
    """
    if state.restoring.loading is not None:
        return end_job(_blamed(state, program), "program", program.detail, "")
    broken = [each for each in state.unjudged if not each.sound]
    told = [output for each in broken for output in _told(state, each, stays=False)]
    gone = frozenset(each.worker for each in broken)
    state = _all_judged(_blamed(bereft(state, gone), program))
    lost = state.roster.lost - state.roster.kept
    state = replace(state, roster=replace(state.roster, lost=lost, kept=frozenset()))
    return prefixed(told, _save_all(state))


def _all_judged(state: Membership) -> Membership:
    return replace(state, doubts=replace(state.doubts, raised_at=None))


def _blamed(state: Membership, program: Program) -> Membership:
    return replace(state, exceptions=replace(state.exceptions, blame=program.detail))


def _save_all(state: Membership) -> Decision:
    """A last generation, in which what lives is saved."""
    return carry_out(state, give_up("", state.grid.baseline.placement.unowned_layers(state.absent)))


def bereft(state: Membership, gone: frozenset[WorkerId]) -> Membership:
    """Returns the membership once ``gone`` are lost, which was no order of ours."""
    abandoned = (state.vacancies.abandoned | gone) - frozenset(state.full)
    lost_work = tuple(work for worker in sorted(gone) if (work := work_of(state, worker)) is not None)
    return replace(
        state.departed(gone),
        vacancies=replace(state.vacancies, abandoned=abandoned),
        forming=replace(state.forming, lost_work=state.forming.lost_work + lost_work),
        prospects=state.prospects.struck(),
    )


def _newest(state: Membership) -> int:
    """The highest number that any generation has been given."""
    told = (number for hello in state.contact.returned.values() for number in (hello.generation, hello.prepared))
    return max(
        state.generation, state.running.upcoming.generation if state.running.upcoming is not None else 0, *told, 0
    )


def restore_if_whole(state: Membership) -> Decision:
    """Once every layer has somebody again, or every place if all are waited for, all load the last checkpoint."""
    placement, missing = state.grid.baseline.placement, state.missing
    awaited = missing if state.forming.wait_for_all else placement.unowned_layers(missing)
    if awaited:
        return state, ()
    if state.rules.logging is not None:
        recovery = plan_recovery(state, state.absent)
        if any(isinstance(each, ReplayLayers) for each in recovery.actions):
            return carry_out(replace(state, forming=replace(state.forming, wait_until=None)), recovery)
    recovery = adaptive(view_of(state, missing))
    assert recovery.plan is not None, "every layer has somebody again"
    strategy = state.rules.strategy if state.forming.wait_for_all else "fallback"
    return carry_out(state, resume(strategy, recovery.plan, LoadState(step=state.restoring.restorable[0].step)))


def fill_places(state: Membership) -> Decision:
    """Spares take the places that are vacant, if it is time for that: at the next boundary, or as all wait for it."""
    if not matched(state):
        return state, ()
    if state.phase is not Phase.WAITING:
        return change_members(state)
    state, seated = seat(state)
    return prefixed(seated, restore_if_whole(state))


def to_fill(state: Membership) -> frozenset[WorkerId]:
    """Returns the places for which processes are started without anybody's offer."""
    if state.forming.wait_for_all:
        return state.missing
    spawns = (each.workers for each in plan_recovery(state, state.absent).actions if isinstance(each, Spawn))
    return frozenset(place for places in spawns for place in places) - state.vacancies.abandoned


def on_unreadable(state: Membership, message: Unreadable) -> Decision:
    """The state that everyone was to load is damaged: the one before it, if there is one."""
    left = tuple(each for each in state.restoring.restorable if each.step < message.step)
    text = f"the checkpoint of step {message.step} cannot be used: {message.detail}"
    told = (notice(message.worker, text),)
    state = replace(state, restoring=replace(state.restoring, restorable=left))
    if not left:
        return prefixed(told, end_job(state, "lost", f"{text}; there is no other", ""))
    assert state.running.plan is not None, "who loads has been told of a plan"
    return prefixed(told, carry_out(state, resume("fallback", state.running.plan, LoadState(step=left[0].step))))


def on_unreplayed(state: Membership, message: Unreplayed) -> Decision:
    """What was logged does not suffice, is damaged, or is not what comes out: all go back to the last checkpoint."""
    return give_up_replays(state, f"worker {message.worker}: {message.detail}")
