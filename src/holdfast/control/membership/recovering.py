"""What answers a loss: who is left goes on, waits for workers, loads a checkpoint, or saves what lives."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.acting import carry_out
from holdfast.control.membership.blame import Program, described, judge, recent
from holdfast.control.membership.ending import end_job
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Output,
    Phase,
    departed,
    held_for_lost,
    notice,
    prefixed,
)
from holdfast.control.messages import Raised, Unreadable
from holdfast.core.ids import WorkerId
from holdfast.core.schedule import OpKind
from holdfast.planning.training import Rerouted
from holdfast.recovery.actions import ClusterView, LoadState, RecoveryPlan
from holdfast.recovery.strategies import adaptive, give_up, resume, strategy_named

__all__ = [
    "bereft",
    "on_unreadable",
    "plan_recovery",
    "recover",
    "restore_if_whole",
    "stop_waiting",
    "unplanned",
]


def plan_recovery(state: Membership, lost: frozenset[WorkerId], offer: Rerouted | None = None) -> RecoveryPlan:
    """Returns what answers the loss of all of ``lost``, which takes milliseconds: ahead of time where possible.

    Args:
        state: the membership.
        lost: all who would be gone.
        offer: a plan for this very loss that is better than what would be made at once.
    """
    return strategy_named(state.strategy)(_view(state, lost, state.wait_s, offer))


def _view(state: Membership, lost: frozenset[WorkerId], wait_s: float, offer: Rerouted | None = None) -> ClusterView:
    return ClusterView(
        baseline=state.baseline,
        lost=lost,
        entering=state.arriving,
        checkpoint=state.restorable[0].step if state.restorable else None,
        wait_s=wait_s,
        terms=state.terms,
        offer=offer,
    )


def stop_waiting(state: Membership) -> Decision:
    """Whoever was waited for has not come: the others go on without."""
    recovery = strategy_named(state.strategy)(_view(state, state.absent, 0.0))
    return carry_out(replace(state, wait_until=None), recovery)


def unplanned(state: Membership) -> tuple[frozenset[WorkerId], ...]:
    """Returns the losses that could come next and have no answer prepared yet; none unless steps are being run."""
    if state.phase is not Phase.RUNNING:
        return ()
    ahead = (state.absent | {worker} for worker in state.full)
    return tuple(lost for lost in ahead if lost not in state.planned)


def recover(state: Membership) -> Decision:
    """Answers the loss of members: whoever was entering has to enter again.

    Whoever has stopped because of an exception is lost, too, unless that is the program's fault.
    """
    state = replace(
        state,
        generation=_newest(state),
        arriving=state.arriving | (state.entering - state.synced - state.lost),
        entering=frozenset(),
        synced=frozenset(),
        upcoming=None,
        promised=None,
        pinned=state.pinned and (state.pinned[0], 0),
    )
    state = _taken_for_over(state)
    if state.past_lost:
        return carry_out(state, give_up("", state.lost_layers))
    if state.blame:
        return _save_all(state)
    losses = (*state.losses_by_exception, *state.unjudged)
    if program := judge(state.raised, losses, state.tolerate):
        return _blame(state, program)
    if state.unjudged:
        return _lose_stopped(replace(state, losses_by_exception=recent(losses)), state.unjudged)
    return _answer(state)


def _answer(state: Membership) -> Decision:
    """Who is left goes on without the lost; but not from a checkpoint where workers that have stopped hold layers."""
    if program := _irreplaceable(state):
        return _blame(state, program)
    if not state.present:  # nobody is there to load anything, or to wait for others
        return _save_all(state)
    recovery = state.planned.get(state.absent)
    if recovery is None or not recovery.keeps_state:  # what could be loaded may be something else by now
        recovery = plan_recovery(state, state.absent)
    return carry_out(replace(state, reformations=0, planned={}), recovery)


def _taken_for_over(state: Membership) -> Membership:
    """Supposes that layers have been handed over where only then all have an owner; what workers hold will tell.

    They may have crossed that boundary, and let go, without anybody having heard of it here.
    """
    now, then = state.baseline, state.target
    if then is None or not now.placement.unowned_layers(state.absent) or then.placement.unowned_layers(state.absent):
        return state
    return replace(state, baseline=then, target=None, former=now)


def _irreplaceable(state: Membership) -> Program | None:
    """Why nobody can go on where workers have stopped: a layer is left to them."""
    placement = state.baseline.placement
    layers = placement.unowned_layers(state.absent)
    stopped = [each for each in state.raised if set(placement.layers_of(each.worker)) & set(layers)]
    names = ", ".join(map(str, layers))
    return Program(first=stopped[0], why=f"nobody else holds layer(s) {names} and can go on") if stopped else None


def _lose_stopped(state: Membership, stopped: tuple[Raised, ...]) -> Decision:
    """Goes on without workers that have stopped; their state stays with them until it is known whose fault it was."""
    kept = frozenset(each.worker for each in stopped if each.sound and each.worker in state.full)
    gone = frozenset(each.worker for each in stopped)
    told = [output for each in stopped for output in _told(state, each, stays=each.worker in kept)]
    without_them = _taken_for_over(replace(bereft(state, gone), kept=state.kept | kept, raised_at=None))
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
    if state.loading is not None:
        return end_job(replace(state, blame=program.detail), "program", program.detail, "")
    broken = [each for each in state.unjudged if not each.sound]
    told = [output for each in broken for output in _told(state, each, stays=False)]
    gone = frozenset(each.worker for each in broken)
    state = replace(bereft(state, gone), raised_at=None, blame=program.detail)
    state = replace(state, lost=state.lost - state.kept, kept=frozenset())
    return prefixed(told, _save_all(state))


def _save_all(state: Membership) -> Decision:
    """A last generation, in which what lives is saved."""
    return carry_out(state, give_up("", state.baseline.placement.unowned_layers(state.absent)))


def bereft(state: Membership, gone: frozenset[WorkerId]) -> Membership:
    """Returns the membership once ``gone`` are lost, which was no order of ours."""
    return replace(
        departed(state, gone),
        abandoned=(state.abandoned | gone) - frozenset(state.full),
        lost_work=state.lost_work + tuple(work for worker in sorted(gone) for work in _pairs_run(state, worker)),
        losses=state.losses + (state.began is not None),
    )


def _newest(state: Membership) -> int:
    """The highest number that any generation has been given."""
    told = (number for hello in state.returned.values() for number in (hello.generation, hello.prepared))
    return max(state.generation, state.upcoming.generation if state.upcoming is not None else 0, *told, 0)


def restore_if_whole(state: Membership) -> Decision:
    """Once every layer has somebody again, or every place if all are waited for, all load the last checkpoint."""
    missing = state.lost if state.wait_for_all else state.baseline.placement.unowned_layers(state.lost)
    if missing:
        return state, ()
    recovery = adaptive(ClusterView(baseline=state.baseline, lost=state.lost, terms=state.terms))
    assert recovery.plan is not None, "every layer has somebody again"
    strategy = state.strategy if state.wait_for_all else "fallback"
    state = replace(state, arriving=frozenset(), wait_for_all=False)
    return carry_out(state, resume(strategy, recovery.plan, LoadState(step=state.restorable[0].step)))


def on_unreadable(state: Membership, message: Unreadable) -> Decision:
    """The state that everyone was to load is damaged: the one before it, if there is one."""
    left = tuple(each for each in state.restorable if each.step < message.step)
    text = f"the checkpoint of step {message.step} cannot be used: {message.detail}"
    told = (notice(message.worker, text),)
    state = replace(state, restorable=left)
    if not left:
        return prefixed(told, end_job(state, "lost", f"{text}; there is no other", ""))
    assert state.plan is not None, "who loads has been told of a plan"
    return prefixed(told, carry_out(state, resume("fallback", state.plan, LoadState(step=left[0].step))))


def _pairs_run(state: Membership, worker: WorkerId) -> tuple[tuple[int, int], ...]:
    """The step that a worker was at when it was lost, and the pairs of it that it had run."""
    vital = state.watch.vitals.get(worker)
    beat = None if vital is None else vital.beat
    if beat is None or worker not in state.full or state.plan is None or beat.generation != state.generation:
        return ()
    forwards = [op.microbatch for op in state.plan.orders.of(worker)[: beat.op] if op.kind is OpKind.F]
    visits = (state.plan.routes.of(microbatch).visit(worker) for microbatch in forwards)
    return ((beat.step, sum(len(visit.layers.indices) for visit in visits)),)
