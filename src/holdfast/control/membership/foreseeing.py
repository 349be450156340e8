"""What is expected of the way that answers a loss, beside what came of the one before."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.running import Foreseen
from holdfast.control.membership.state import Decision, Membership, Output, Record
from holdfast.recovery.actions import RecoveryPlan
from holdfast.telemetry.events import Held, Predicted

__all__ = ["foresee"]


def foresee(state: Membership, recovery: RecoveryPlan) -> Decision:
    """Tells what was expected of the last answer, and what of this one, as far as they were compared with others."""
    now, step = state.watch.now, max(state.last_step + 1, state.forming.resume_step)
    told: list[Output] = []
    if (before := state.prospects.foreseen) is not None and now is not None:
        seconds = max(0.0, now - before.at_s)
        expected, made = before.course.within(seconds), step - before.step
        told.append(Record(event=Held(chosen=before.chosen, seconds=seconds, expected=expected, made=made)))
    course, foreseen = recovery.course, None
    if course is not None and now is not None:
        foreseen = Foreseen(chosen=recovery.chosen, course=course, at_s=now, step=step)
        told.append(Record(event=Predicted(chosen=recovery.chosen, steps=recovery.weighed, until_s=state.expected_s)))
    return replace(state, prospects=replace(state.prospects, foreseen=foreseen)), tuple(told)
