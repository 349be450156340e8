"""What a strategy may look at, of all that the coordinator knows."""

from __future__ import annotations

from holdfast.control.membership.state import Membership
from holdfast.core.ids import WorkerId
from holdfast.recovery.view import ClusterView

__all__ = ["view_of"]


def view_of(state: Membership, lost: frozenset[WorkerId]) -> ClusterView:
    """Returns the cluster as a strategy sees it.

    How long a step has been run is not known here.

    Args:
        state: the membership.
        lost: all who cannot compute, or would not be able to.
    """
    restorable = state.restoring.restorable
    return ClusterView(
        rules=state.rules,
        baseline=state.grid.baseline,
        lost=lost,
        entering=state.roster.arriving,
        dormant=state.roster.dormant,
        checkpoint=restorable[0].step if restorable else None,
        plan=state.running.plan,
        step=max(state.last_step + 1, state.forming.resume_step),
        coming=bool(state.roster.expected & lost),
        updates_ahead=state.running.staggered,
        spares=len(state.roster.spares),
        expected_s=state.expected_s,
        maker=state.maker,
        logs=state.rules.logging is not None and not state.restoring.unlogged,
    )
