"""Skip: the survivors leave the interrupted step as it is, and go on behind it."""

from __future__ import annotations

from holdfast.recovery.actions import RecoveryPlan, SkipStep
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import reroute
from holdfast.strategies.lossy_forward import needs_whole_routes
from holdfast.strategies.strategy import Strategy

__all__ = ["SKIP", "skip"]


def skip(view: ClusterView) -> RecoveryPlan:
    """The survivors leave the interrupted step as it is, perhaps with some layers updated, and go on behind it.

    Source: Nicolae et al., section V, where it is future work.
    """
    return reroute(view, "skip", SkipStep(), keeps=view.keeps)


SKIP = Strategy(name="skip", answer=skip, needs=needs_whole_routes, exact=False, loops=True)
