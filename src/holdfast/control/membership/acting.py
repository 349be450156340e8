"""Carries a recovery plan out: each kind of action by one function, in the order of the plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from holdfast.control.membership.ending import NOT_ALL_THERE, end_preempted, save
from holdfast.control.membership.finishing import finish_step
from holdfast.control.membership.forming import abort, agreed, all_told, install, leave_behind, lowest, newest_snapshot
from holdfast.control.membership.grid import GridState
from holdfast.control.membership.preparing import prepare
from holdfast.control.membership.replaying import TooLittle, order_replays
from holdfast.control.membership.scoring import begun_from, unevaluated
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Output,
    Phase,
    Record,
    notice,
    prefixed,
    tell_each,
)
from holdfast.control.membership.vacancies import matched, spawn
from holdfast.control.membership.viewing import view_of
from holdfast.control.messages import Expel, Resume, Status
from holdfast.errors import InternalError
from holdfast.recovery.actions import (
    Abort,
    Action,
    AverageOverSurvivors,
    Await,
    CopyState,
    FinishStep,
    GiveUp,
    InstallPlan,
    LoadState,
    Recompute,
    RecoveryPlan,
    Rejoin,
    RepeatStep,
    ReplaceGrid,
    ReplayLayers,
    Restore,
    SaveCommitted,
    SkipStep,
    Spawn,
    TakeBack,
    TakeStock,
)
from holdfast.strategies.registry import strategy_named
from holdfast.telemetry.events import Notice

__all__ = ["carry_out", "give_up_replays", "on_status"]


def carry_out(state: Membership, recovery: RecoveryPlan) -> Decision:
    """Carries out what a strategy has chosen: as far as it goes at once, the rest when all have said what they hold."""
    return _proceed(replace(state, forming=state.forming.answered(recovery)))


def on_status(state: Membership, status: Status) -> Decision:
    """A worker has said what it holds; once all have, what was waiting for that is done."""
    state = replace(state, reports=state.reports.of_status(status))
    if status.ends is not None:
        state = replace(state, running=replace(state.running, ends=status.ends))
    if state.phase is not Phase.FORMING or not all_told(state):
        return state, ()
    state, told = leave_behind(state) if state.exceptions.blame else (state, ())
    return prefixed(told, _proceed(state) if state.phase is not Phase.ENDED else (state, ()))


def _proceed(state: Membership) -> Decision:
    outputs: tuple[Output, ...] = ()
    while state.forming.pending and state.phase is not Phase.ENDED:
        action, *rest = state.forming.pending
        if action.needs_reports and not all_told(state):
            break
        state = replace(state, forming=replace(state.forming, pending=tuple(rest)))
        state, told = _FUNCTIONS[type(action)](state, action)
        outputs += told
    return state, outputs


def _abort(state: Membership, action: Abort) -> Decision:
    return abort(state)


def _install(state: Membership, action: InstallPlan) -> Decision:
    if not action.at_boundary:
        return install(state, action.plan, keeps=action.keeps)
    entering = frozenset(worker for worker in state.forming.copying if not action.plan.placement.held_by(worker))
    state = replace(state, forming=replace(state.forming, copying=frozenset()))
    return prepare(state, action.plan, state.forming.period, entering, action.grid, state.forming.dormant)


def _copy_state(state: Membership, action: CopyState) -> Decision:
    """The workers do it themselves, from the boundary on: whoever enters asks those who hold the layers."""
    copying = state.forming.copying | {action.target}
    return replace(state, forming=replace(state.forming, copying=copying)), ()


def _load_state(state: Membership, action: LoadState) -> Decision:
    for each in state.restoring.restorable:
        if each.step == action.step:
            return replace(state, restoring=replace(state.restoring, loading=each)), ()
    steps = ", ".join(str(each.step) for each in state.restoring.restorable) or "none"
    raise InternalError(f"a strategy chose to load the state before step {action.step}; those that there are: {steps}")


def _replace_grid(state: Membership, action: ReplaceGrid) -> Decision:
    """Everyone who has a place in the new grid stays, also whoever is to come for it; the others end."""
    here = [worker for worker in state.grid.baseline.workers if worker not in state.roster.lost]
    idle = [worker for worker in here if worker not in action.plan.workers]
    reason = f"the grid shrinks to {len(action.plan.workers)} workers, which need no further one"
    state = state.departed(frozenset(idle))
    state = replace(
        state,
        grid=GridState(baseline=action.plan),
        roster=replace(state.roster, lost=state.roster.lost.intersection(action.plan.workers), arriving=frozenset()),
        forming=replace(state.forming, wait_until=None, wait_for_all=False),
    )
    return state, (*(notice(worker, reason) for worker in idle), *tell_each(idle, Expel(reason=reason)))


def _await(state: Membership, action: Await) -> Decision:
    if state.preempted:
        return end_preempted(state, NOT_ALL_THERE)
    if not state.restoring.restorable:
        raise InternalError("a strategy chose to wait for workers, but there is no state that all could load then")
    until = _after_now(state, action.limit_s) if state.forming.wait_until is None else state.forming.wait_until
    state, told = install(state, None, keeps=state.rules.logging is not None)
    if state.phase is Phase.ENDED:
        return state, told
    forming = replace(state.forming, wait_until=until, wait_for_all=action.everyone)
    return replace(state, phase=Phase.WAITING, forming=forming), told


def _after_now(state: Membership, seconds: float) -> float | None:
    """None if we have just been started and know no time yet: the next tick will."""
    return None if state.watch.now is None else state.watch.now + seconds


def _spawn(state: Membership, action: Spawn) -> Decision:
    """Where a joiner has died without state, nobody is started again unasked, unless all wait for it.

    Nor is anybody started where a spare is to take the place.
    """
    given_up = frozenset() if state.phase is Phase.WAITING else state.vacancies.abandoned
    left_out = given_up.union(place for place, _ in matched(state))
    return spawn(state, [place for place in action.workers if place not in left_out])


def _take_back(state: Membership, action: TakeBack) -> Decision:
    return agreed(state, lowest(state))


def _restore(state: Membership, action: Restore) -> Decision:
    return agreed(state, newest_snapshot(state))


def _finish_step(state: Membership, action: FinishStep) -> Decision:
    return _finish(state, ())


def _average(state: Membership, action: AverageOverSurvivors) -> Decision:
    statuses = state.reports.statuses.values()
    counted = {m for each in statuses for kept in each.progress for _, found in kept.counted for m in found}
    return _finish(state, state.forming.left_out_of(lowest(state)) - counted)


def _skip_step(state: Membership, action: SkipStep) -> Decision:
    return _finish(state, _all_microbatches(state))


def _repeat_step(state: Membership, action: RepeatStep) -> Decision:
    return _finish(state, _all_microbatches(state), repeats=True)


def _all_microbatches(state: Membership) -> frozenset[int]:
    plan = state.running.plan
    return frozenset() if plan is None else frozenset(each.number for each in plan.routes.microbatches)


def _finish(state: Membership, left_out: Container[int], *, repeats: bool = False) -> Decision:
    """Or, where what is kept of the step does not suffice, all go back and run it again."""
    state, told = finish_step(state, left_out, repeats=repeats)
    if state.phase is not Phase.FORMING:
        return state, told
    state, more = _take_back(state, TakeBack())
    return prefixed((*told, *more), _recompute(state, Recompute()))


def _take_stock(state: Membership, action: TakeStock) -> Decision:
    state = replace(state, roster=state.roster.mustered(state.grid.baseline.workers))
    return install(state, None, keeps=True)


def _replay_layers(state: Membership, action: ReplayLayers) -> Decision:
    """Whoever replays says again what it holds, once it has."""
    try:
        return order_replays(state, action.plan)
    except TooLittle as error:
        return give_up_replays(state, str(error))


def give_up_replays(state: Membership, why: str) -> Decision:
    """What was logged does not suffice: the loss is answered as if nothing had been."""
    state = replace(
        state,
        roster=state.roster.to_enter_again(),
        restoring=replace(state.restoring, unlogged=True),
    )
    text = f"lost layers cannot be replayed: {why}; all go back to the last checkpoint"
    recovery = strategy_named(state.rules.strategy).answer(view_of(state, state.absent))
    return prefixed((Record(event=Notice(worker="coordinator", text=text)),), carry_out(state, recovery))


def _rejoin(state: Membership, action: Rejoin) -> Decision:
    told: tuple[Output, ...] = ()
    if action.grid is not None:
        state = state.logging_in(action.grid, state.forming.resume_step)
        state, told = _replace_grid(state, ReplaceGrid(plan=action.grid))
    state = replace(state, roster=state.roster.provided())
    recovery = strategy_named(state.rules.strategy).answer(view_of(state, state.absent))
    if recovery.keeps_state:  # what answers the loss is the replay, whatever all go on by
        recovery = replace(recovery, strategy=state.forming.strategy)
    return prefixed(told, carry_out(state, recovery))


def _recompute(state: Membership, action: Recompute) -> Decision:
    state, scored = begun_from(state, state.forming.resume_step)
    state = replace(
        state,
        phase=Phase.RUNNING,
        grid=replace(state.grid, former=None),
        forming=replace(state.forming, lost_work=(), rest=None, left_out=frozenset()),
        restoring=state.restoring.over(),
        last_step=state.forming.resume_step - 1,
    )
    resume = Resume(
        generation=state.generation,
        step=state.forming.resume_step,
        votes=state.forming.votes,
        repeated=state.running.repeated,
        ends=state.running.ends,
        evaluates=unevaluated(state, state.forming.resume_step),
        scored=state.running.evaluated,
    )
    return state, (*scored, *tell_each(state.alive, resume))


def _give_up(state: Membership, action: GiveUp) -> Decision:
    return install(replace(state, forming=replace(state.forming, lost_layers=action.lost, too_few=action.why)), None)


def _save_committed(state: Membership, action: SaveCommitted) -> Decision:
    return save(state, state.forming.resume_step, state.forming.votes)


_FUNCTIONS: Mapping[type[Action], Callable[[Membership, Any], Decision]] = MappingProxyType(
    {
        Abort: _abort,
        AverageOverSurvivors: _average,
        Await: _await,
        CopyState: _copy_state,
        FinishStep: _finish_step,
        GiveUp: _give_up,
        InstallPlan: _install,
        LoadState: _load_state,
        Recompute: _recompute,
        Rejoin: _rejoin,
        RepeatStep: _repeat_step,
        ReplaceGrid: _replace_grid,
        ReplayLayers: _replay_layers,
        Restore: _restore,
        SaveCommitted: _save_committed,
        SkipStep: _skip_step,
        Spawn: _spawn,
        TakeBack: _take_back,
        TakeStock: _take_stock,
    }
)
