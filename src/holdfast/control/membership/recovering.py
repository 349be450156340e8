"""What answers a loss: who is left goes on, waits for workers, loads a checkpoint, or saves what lives."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.blame import Program, described, judge, recent
from holdfast.control.membership.ending import NOT_ALL_THERE, end_job, end_preempted
from holdfast.control.membership.forming import form
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Output,
    Phase,
    departed,
    held_for_lost,
    noted,
    notice,
    prefixed,
    tell_each,
)
from holdfast.control.membership.vacancies import spawn
from holdfast.control.messages import Expel, Raised, Unreadable
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.schedule import OpKind
from holdfast.planning.training import Rerouted
from holdfast.recovery.actions import ClusterView, RecoveryPlan
from holdfast.recovery.strategies import adaptive, strategy_named

__all__ = [
    "bereft",
    "carry_out",
    "last_resort",
    "on_unreadable",
    "plan_recovery",
    "recover",
    "restore_if_whole",
    "unplanned",
]


def plan_recovery(state: Membership, lost: frozenset[WorkerId], offer: Rerouted | None = None) -> RecoveryPlan:
    """Returns what answers the loss of all of ``lost``, which takes milliseconds: ahead of time where possible.

    Args:
        state: the membership.
        lost: all who would be gone.
        offer: a plan for this very loss that is better than what would be made at once.
    """
    view = ClusterView(healthy=state.healthy, lost=lost, terms=state.terms, offer=offer)
    return strategy_named(state.strategy)(view)


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
    if state.past_lost:
        return form(state, None)
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
        layers = state.healthy.placement.without(state.absent).unowned_layers()
        return form(replace(state, lost_layers=layers), None)
    recovery = state.planned.get(state.absent) or plan_recovery(state, state.absent)
    if recovery.plan is None:
        recovery = last_resort(state, waiting=state.wait_s > 0)
    return carry_out(replace(state, lost_layers=recovery.lost_layers, reformations=0, planned={}), recovery)


def _irreplaceable(state: Membership) -> Program | None:
    """Why nobody can go on where workers have stopped: a layer is left to them."""
    placement = state.healthy.placement
    layers = placement.without(state.absent).unowned_layers()
    stopped = [each for each in state.raised if set(placement.layers_of(each.worker).indices) & set(layers)]
    names = ", ".join(map(str, layers))
    return Program(first=stopped[0], why=f"nobody else holds layer(s) {names} and can go on") if stopped else None


def _lose_stopped(state: Membership, stopped: tuple[Raised, ...]) -> Decision:
    """Goes on without workers that have stopped; their state stays with them until it is known whose fault it was."""
    kept = frozenset(each.worker for each in stopped if each.sound and each.worker in state.full)
    gone = frozenset(each.worker for each in stopped)
    told = [output for each in stopped for output in _told(state, each, stays=each.worker in kept)]
    without_them = replace(bereft(state, gone), kept=state.kept | kept, raised_at=None)
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
    layers = state.healthy.placement.without(state.absent).unowned_layers()
    return form(replace(state, lost_layers=layers), None)


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


def last_resort(state: Membership, *, waiting: bool) -> RecoveryPlan:
    """Returns what answers the loss of all owners of a layer.

    It counts with what can be loaded, whoever is here without state and, if ``waiting``, those who may come yet.
    """
    view = ClusterView(
        healthy=state.healthy,
        lost=state.absent,
        entering=state.arriving,
        checkpoint=state.restorable[0].step if state.restorable else None,
        wait_s=state.wait_s if waiting else 0.0,
        terms=state.terms,
    )
    return strategy_named(state.strategy)(view)


def carry_out(state: Membership, recovery: RecoveryPlan) -> Decision:
    """Waits for workers, shrinks the grid, or begins the generation that goes on or saves, as ``recovery`` says."""
    if recovery.awaits_s > 0:
        return _wait_for_workers(state, recovery)
    if recovery.loads is not None and recovery.plan is not None:
        return _shrink(state, recovery.plan, recovery.strategy)
    state, outputs = form(state, recovery.plan, recovery.strategy)
    state = replace(state, period=recovery.period)
    vacant = tuple(place for place in recovery.spawns if place not in state.abandoned)
    return prefixed((*noted(recovery), *outputs), spawn(state, vacant))


def _wait_for_workers(state: Membership, recovery: RecoveryPlan) -> Decision:
    if state.preempted:
        return end_preempted(state, NOT_ALL_THERE)
    until = _after_now(state, recovery.awaits_s) if state.wait_until is None else state.wait_until
    state, outputs = form(state, None, recovery.strategy)
    if state.phase is Phase.ENDED:
        return state, outputs
    state = replace(state, phase=Phase.WAITING, wait_until=until, wait_for_all=recovery.awaits_everyone)
    return prefixed(outputs, spawn(state, recovery.spawns))


def _after_now(state: Membership, seconds: float) -> float | None:
    """None if we have just been started and know no time yet: the next tick will."""
    return None if state.watch.now is None else state.watch.now + seconds


def _shrink(state: Membership, plan: Plan, strategy: str) -> Decision:
    """Everyone who has a place in the smaller grid loads it; the others end."""
    here = [worker for worker in state.healthy.workers if worker not in state.lost]
    idle = [worker for worker in here if worker not in plan.workers]
    reason = f"the grid shrinks to {len(plan.workers)} workers, which need no further one"
    state = replace(
        departed(state, frozenset(idle)),
        healthy=plan,
        lost=frozenset(),
        arriving=frozenset(),
        wait_until=None,
        wait_for_all=False,
    )
    state, outputs = form(state, plan, strategy, load=state.restorable[0])
    told = (notice(worker, reason) for worker in idle)
    return state, (*told, *outputs, *tell_each(idle, Expel(reason=reason)))


def restore_if_whole(state: Membership) -> Decision:
    """Once every layer has somebody again, or every place if all are waited for, all load the last checkpoint."""
    missing = state.lost if state.wait_for_all else state.healthy.placement.without(state.lost).unowned_layers()
    if missing:
        return state, ()
    recovery = adaptive(ClusterView(healthy=state.healthy, lost=state.lost, terms=state.terms))
    strategy = state.strategy if state.wait_for_all else "fallback"
    state = replace(state, arriving=frozenset(), wait_for_all=False)
    return form(state, recovery.plan, strategy, load=state.restorable[0])


def on_unreadable(state: Membership, message: Unreadable) -> Decision:
    """The state that everyone was to load is damaged: the one before it, if there is one."""
    left = tuple(each for each in state.restorable if each.step < message.step)
    text = f"the checkpoint of step {message.step} cannot be used: {message.detail}"
    told = (notice(message.worker, text),)
    state = replace(state, restorable=left)
    if not left:
        return prefixed(told, end_job(state, "lost", f"{text}; there is no other", ""))
    return prefixed(told, form(state, state.plan, "fallback", load=left[0]))


def _pairs_run(state: Membership, worker: WorkerId) -> tuple[tuple[int, int], ...]:
    """The step that a worker was at when it was lost, and the pairs of it that it had run."""
    vital = state.watch.vitals.get(worker)
    beat = None if vital is None else vital.beat
    if beat is None or worker not in state.full or state.plan is None or beat.generation != state.generation:
        return ()
    forwards = [op.microbatch for op in state.plan.orders.of(worker)[: beat.op] if op.kind is OpKind.F]
    visits = (state.plan.routes.of(microbatch).visit(worker) for microbatch in forwards)
    return ((beat.step, sum(len(visit.layers.indices) for visit in visits)),)
