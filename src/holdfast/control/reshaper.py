"""To what pipelines whoever is here goes over, or why not: after losses, before workers go, when others have come."""

from __future__ import annotations

import math
from collections.abc import Callable

from holdfast.control.membership import Handover, Improved, Membership, Phase, Situation, Stay, matched
from holdfast.core.plan import Plan
from holdfast.errors import HoldfastError
from holdfast.planning.reshaping import Reshaped, Shapes, reshaped

__all__ = ["Reshaper"]


class Reshaper:
    """Proposes the grid that whoever is here is to become, or says why everything stays as it is.

    Args:
        shapes: what new pipelines are made by.
        reshaped: makes them.
    """

    def __init__(self, shapes: Shapes, reshaped: Callable[..., Reshaped | None] = reshaped) -> None:
        self._shapes, self._make = shapes, reshaped
        self._seen: tuple[Plan, Situation] | None = None
        self._found: Reshaped | None = None
        self._why_none = ""

    def news(self, state: Membership) -> tuple[Improved, ...]:
        """Returns the grid to go over to, as long as nobody does; once in each situation why there is none.

        Staying, going over now and going over later are compared by the steps that are predicted until the next
        failure is to be expected, or the job ends. All train while layers are copied. What does not pay now may pay
        later: the longer nothing has failed, the more it gains.

        Cost: milliseconds for tens of workers if the grid, or who is here, has changed; else microseconds.
        """
        situation = state.situation
        if state.phase is not Phase.RUNNING or state.grid.target is not None or state.running.upcoming is not None:
            return ()
        if state.preempted or not (situation.absent or situation.going or situation.spares):
            return ()
        why = self._why_later(state) or self._look(state, situation)
        if why:
            known = state.prospects.weighed == (situation, why)
            return () if known else (Improved(lost=state.absent, offer=Stay(situation=situation, why=why)),)
        assert self._found is not None, "there is a reason if nothing was found"
        gained = self._found.steps_gained(self._left_s(state, self._found))
        why = self._found.why + ("" if math.isinf(gained) else f", {gained:.1f} steps more until the job ends")
        offer = Handover(grid=self._found.plan, leaving=situation.going, why=why)
        return (Improved(lost=state.absent, offer=offer),)

    @staticmethod
    def _left_s(state: Membership, found: Reshaped) -> float:
        """What is left of the job, in the units of the costs, if all go on as they do."""
        return (state.num_steps - 1 - state.last_step) * found.before_s

    def _why_later(self, state: Membership) -> str:
        """Whom it is better to wait for: with them other pipelines are the best; empty if for nobody."""
        coming = sorted({*state.roster.arriving, *state.roster.entering, *state.roster.expected})
        if coming:
            return f"other pipelines later, once {', '.join(map(str, coming))} can be part of them"
        return "other pipelines later, as spares take vacant places first" if matched(state) else ""

    def _look(self, state: Membership, situation: Situation) -> str:
        """Looks for other pipelines; returns why all stay as they are, or nothing."""
        seen = (state.grid.baseline, situation)
        if seen != self._seen:
            self._found, self._why_none = self._reshaped(state, situation)
            self._seen = seen
        found = self._found
        if found is None:
            return self._why_none
        if found.steps_gained(self._left_s(state, found)) < 1:
            return f"all stay as they are: {found.why}, but that gains less than a step until the job ends"
        every_s = state.failure_every_s if self._shapes.copy_s else None  # else costs are in no unit of time
        if every_s is not None and found.steps_gained(every_s) <= 0:
            return f"other pipelines later: {found.why}, but copying costs more before a failure is to be expected"
        return ""

    def _reshaped(self, state: Membership, situation: Situation) -> tuple[Reshaped | None, str]:
        try:
            found = self._make(
                state.grid.baseline,
                situation.absent,
                self._shapes,
                leaving=situation.going,
                joining=sorted(situation.spares),
            )
        except HoldfastError as error:
            return None, f"all stay as they are: {error}"
        return found, "" if found else "all stay as they are: other pipelines would hardly be faster"
