"""Better plans than those made at once, from a library that another process fills while training runs."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.control.membership import AnswerPlanned, Improved, Membership, Phase, plan_recovery
from holdfast.core.ids import WorkerId
from holdfast.planning.library import PlanLibrary
from holdfast.planning.maker import PROVING, PlanMaker
from holdfast.planning.migration import Migration, proposed
from holdfast.planning.training import Rerouted
from holdfast.recovery.actions import RecoveryPlan

__all__ = ["PlanLookup"]


class PlanLookup:
    """Tells what a library has for a job, whenever that may have become something else.

    Args:
        library: that is filled by others.
        maker: of what is made of its plans.
    """

    def __init__(self, library: PlanLibrary, maker: PlanMaker = PROVING) -> None:
        self._library, self._maker = library, maker
        self._seen: object = None
        self._migration: Migration | None = None

    def news(self, state: Membership) -> tuple[AnswerPlanned | Improved, ...]:
        """Returns better answers to the losses that could come next, and a better plan for who is here.

        If that takes workers that change places, it is told once they gain more by it until the next failure is to be
        expected than it costs: the longer nothing has failed, the more they gain.

        Cost: microseconds if neither the library nor the membership has changed; else plans are read and proved.
        """
        if state.phase is not Phase.RUNNING or state.rules.terms is None or state.roster.dormant:
            return ()  # what is in the library has work for everybody
        seen = (
            self._library.stamp,
            state.generation,
            state.running.upcoming is None,
            len(state.prospects.planned),
            len(state.reports.joined),
        )
        found: tuple[AnswerPlanned | Improved, ...] = ()
        if seen != self._seen:
            found = (*self._answers(state), *self._improvement(state))
            self._migration = None if state.running.upcoming is not None else self._proposal(state)
            self._seen = seen
        return (*found, *self._migrating(state))

    def _answers(self, state: Membership) -> Iterator[AnswerPlanned]:
        for lost, prepared in state.prospects.planned.items():
            offer = self._offer(state, lost)
            if offer is not None and _is_better(offer, prepared):
                yield AnswerPlanned(lost=lost, recovery=plan_recovery(state, lost, offer))

    def _improvement(self, state: Membership) -> Iterator[Improved]:
        offer = self._offer(state, state.absent)
        if offer is not None and offer.plan != state.running.plan:
            yield Improved(lost=state.absent, offer=offer)

    def _proposal(self, state: Membership) -> Migration | None:
        assert state.rules.terms is not None
        if state.running.period is None:
            return None
        grid, terms, period = state.grid.baseline, state.rules.terms, state.running.period
        return proposed(self._library, grid, state.absent, terms, period, self._maker)

    def _migrating(self, state: Membership) -> Iterator[Improved]:
        every_s, migration = state.failure_every_s, self._migration
        if migration is None or every_s is None or state.roster.expected:
            return
        left_s = (state.num_steps - 1 - state.last_step) * migration.before_s
        if migration.steps_gained(min(every_s, left_s)) > 0:
            self._migration = None
            yield Improved(lost=state.absent, offer=migration)

    def _offer(self, state: Membership, lost: frozenset[WorkerId]) -> Rerouted | None:
        assert state.rules.terms is not None
        return self._maker.offered(self._library, state.grid.baseline, lost, state.rules.terms) if lost else None


def _is_better(offer: Rerouted, prepared: RecoveryPlan) -> bool:
    return offer.period is not None and prepared.period is not None and offer.period < prepared.period
