"""Adaptive: the peers of lost workers do what these did."""

from __future__ import annotations

from holdfast.recovery.actions import RecoveryPlan
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import reroute
from holdfast.strategies.strategy import Strategy

__all__ = ["ADAPTIVE", "adaptive"]


def adaptive(view: ClusterView) -> RecoveryPlan:
    """Re-routes the micro-batches of lost workers to their peers, and redoes what of the interrupted step was lost.

    When a layer has no owner left, see ``answers.fall_back``.

    Source: SlipStream, section 3.1 and "Rerouting micro-batches" in 4.3. Here the plan is always computed from the
    baseline and the set of all lost workers, so that it does not depend on the order of the failures. With the
    ``decoupled`` and ``staggered`` techniques (3.2, 3.3) the planner makes it.
    """
    return reroute(view, "adaptive")


ADAPTIVE = Strategy(name="adaptive", answer=adaptive, logs=True, loops=True)
