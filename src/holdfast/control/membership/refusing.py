"""Steps that were updated ahead of their verdict and do not stand: all make those updates again."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.recovering import recover
from holdfast.control.membership.state import Decision, Membership, Phase, Record, prefixed
from holdfast.control.messages import Refused
from holdfast.telemetry.events import MadeAgain, Notice

__all__ = ["on_refused"]

OFTEN, WITHIN = 3, 50
"""So many scaled steps within so many: waiting for the verdict costs less than making up for it."""


def on_refused(state: Membership, refused: Refused) -> Decision:
    """All go back to the step before at once, and make its update again as the verdict wants it.

    Nothing failed, so the generation keeps its members. If gradients are scaled often, updates wait for the verdict
    from now on, for the rest of the job.
    """
    if state.phase is not Phase.RUNNING:
        return state, ()
    why = "a gradient was not finite" if refused.omitted else "the gradients are scaled"
    noted = [Record(event=MadeAgain(step=refused.step, generation=state.generation, why=why))]
    scaled = () if refused.omitted else (refused.step,)
    refusals = (*state.running.refusals, *scaled)[-OFTEN:]
    state = replace(state, running=replace(state.running, refusals=refusals))
    if (
        state.running.staggered
        and len(state.running.refusals) == OFTEN
        and state.running.refusals[-1] - state.running.refusals[0] < WITHIN
    ):
        state = replace(state, running=replace(state.running, staggered=False))
        steps = ", ".join(map(str, state.running.refusals))
        text = f"gradients were scaled in steps {steps}: updates wait for the norm from now on"
        noted.append(Record(event=Notice(worker="coordinator", text=text)))
    return prefixed(noted, recover(state))
