"""Better plans than those made at once, from a library that another process fills while training runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.control.membership import Improved, Membership, Phase, Planned, plan_recovery
from holdfast.core.ids import WorkerId
from holdfast.planning.library import PlanLibrary
from holdfast.planning.training import Rerouted, looked_up
from holdfast.recovery.actions import RecoveryPlan

__all__ = ["Adviser"]


class Adviser:
    """Tells what a library has for a job, whenever that may have become something else.

    Args:
        folder: where the library is or will be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = PlanLibrary(folder)
        self._seen: object = None

    def news(self, state: Membership) -> tuple[Planned | Improved, ...]:
        """Returns better answers to the losses that could come next, and a better plan for who is here.

        Raises:
            StorageError: a file of the library is damaged.

        Cost: microseconds if neither the folder nor the membership has changed; else plans are read and proved.
        """
        seen = self._stamp(), state.generation, state.upcoming is None, len(state.planned), len(state.joined)
        if state.phase is not Phase.RUNNING or state.terms is None or seen == self._seen:
            return ()
        found: tuple[Planned | Improved, ...] = (*self._answers(state), *self._improvement(state))
        self._seen = seen
        return found

    def _answers(self, state: Membership) -> Iterator[Planned]:
        for lost, prepared in state.planned.items():
            offer = self._offer(state, lost)
            if offer is not None and _is_better(offer, prepared):
                yield Planned(lost=lost, recovery=plan_recovery(state, lost, offer))

    def _improvement(self, state: Membership) -> Iterator[Improved]:
        offer = self._offer(state, state.absent)
        if offer is not None and offer.plan != state.plan:
            yield Improved(lost=state.absent, offer=offer)

    def _offer(self, state: Membership, lost: frozenset[WorkerId]) -> Rerouted | None:
        assert state.terms is not None
        return looked_up(self._library, state.healthy, lost, state.terms) if lost else None

    def _stamp(self) -> int:
        """What differs whenever a file was put into the folder."""
        try:
            return self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def _is_better(offer: Rerouted, prepared: RecoveryPlan) -> bool:
    return offer.period is not None and prepared.period is not None and offer.period < prepared.period
