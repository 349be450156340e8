"""A generation that all are told of while another one runs, and go over to between two steps."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from holdfast.control.membership.running import Upcoming
from holdfast.control.membership.state import Decision, Membership, tell_each
from holdfast.control.messages import Install
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan

__all__ = ["must_pin", "prepare"]


def must_pin(state: Membership) -> bool:
    """Whether a checkpoint is still to be pinned, at the next boundary: before the job ends, or somebody may."""
    asked = state.preempted or (state.roster.needed and state.rules.checkpoint_every)
    return bool(asked) and (state.pinned is None or not state.pinned[1])


def prepare(
    state: Membership,
    plan: Plan,
    period: float | None,
    entering: frozenset[WorkerId],
    baseline: Plan | None = None,
    dormant: frozenset[WorkerId] = frozenset(),
) -> Decision:
    """Tells everyone of the generation to go over to; ``dormant``: who computes nothing in it, being told so."""
    generation = state.generation + 1
    order = Install(
        generation=generation,
        plan=plan,
        at_boundary=True,
        staggered=state.running.staggered,
        repeated=state.running.repeated,
        pins=must_pin(state),
        checkpoint_every=state.interval,
        audits=state.audits.order if state.rules.sampling is not None else None,
    )
    at_once = msgspec.structs.replace(order, at_boundary=False)
    told = (*tell_each(state.alive, order), *tell_each(sorted(entering & state.roster.arriving), at_once))
    upcoming = Upcoming(
        generation=generation,
        plan=plan,
        entering=entering,
        period=period,
        baseline=baseline,
        pins=order.pins,
        checkpoint_every=order.checkpoint_every,
        dormant=dormant,
    )
    return replace(state, running=replace(state.running, upcoming=upcoming)), told
