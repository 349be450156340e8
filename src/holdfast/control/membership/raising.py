"""Workers that have stopped because of an exception: what they report, and when that is of the past."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.blame import described
from holdfast.control.membership.losses import on_lost
from holdfast.control.membership.progress import on_step_done
from holdfast.control.membership.state import Decision, Membership, Record, expulsion, prefixed
from holdfast.control.membership.vacancies import answer_offers
from holdfast.control.messages import Raised, StepDone
from holdfast.telemetry.events import ExceptionRaised

__all__ = ["on_committed", "on_raised"]


def on_raised(state: Membership, report: Raised, now: float | None = None) -> Decision:
    """A worker has stopped: whose fault that is shows soon, see on_tick.

    One that was only to save what lives is lost, and so is a spare.
    """
    worker = report.worker
    known = any(each.process == report.process and each.worker == worker for each in state.exceptions.raised)
    if known or worker in state.roster.lost or state.roster.processes.get(worker) != report.process:
        return state, ()
    record = Record(
        event=ExceptionRaised(
            worker=str(worker),
            generation=report.generation,
            step=report.step,
            phase=report.phase,
            layer=report.layer,
            item=report.item,
            microbatch=report.microbatch,
            error=report.error,
        )
    )
    if state.only_saves or worker in state.roster.spares:
        return prefixed((record,), on_lost(state, {worker: f"raised: {described(report)}"}))
    raised_at = state.doubts.raised_at if state.unjudged and state.doubts.raised_at is not None else now
    state = replace(
        state,
        exceptions=replace(state.exceptions, raised=(*state.exceptions.raised, report)),
        doubts=replace(state.doubts, raised_at=raised_at),
    )
    return state, (record,)


def on_committed(state: Membership, done: StepDone, now: float) -> Decision:
    """A step is committed: an exception in it was its worker's alone, so that has nothing to wait for any more."""
    state, outputs = on_step_done(state, done, now)
    unjudged = state.unjudged
    over = tuple(each for each in state.exceptions.raised if each.step <= done.step and each not in unjudged)
    if not over:
        return state, outputs
    going = state.roster.kept & {each.worker for each in over}
    told = [each for worker in sorted(going) for each in expulsion(state, worker, "it raised; the others have gone on")]
    raised = tuple(each for each in state.exceptions.raised if each not in over)
    state = replace(
        state,
        exceptions=replace(state.exceptions, raised=raised),
        roster=state.roster.released(going),
    )
    return prefixed((*outputs, *told), answer_offers(state))
