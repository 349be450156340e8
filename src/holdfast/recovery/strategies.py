"""Strategies: pure functions from a view of the cluster to a RecoveryPlan.

The runtime carries the actions out, a simulator can price the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from holdfast.core.builders import adaptive_plan
from holdfast.core.validate import validate
from holdfast.errors import ConfigError, StateUnavailable
from holdfast.recovery.actions import (
    Abort,
    ClusterView,
    InstallPlan,
    Recompute,
    RecoveryPlan,
    SaveCommitted,
    TakeBack,
)

__all__ = ["STRATEGIES", "Strategy", "adaptive", "strategy_named"]

Strategy = Callable[[ClusterView], RecoveryPlan]


def adaptive(view: ClusterView) -> RecoveryPlan:
    """Re-routes the micro-batches of lost workers to their peers and redoes the interrupted step.

    When a layer has no owner left, the last committed step of the layers that live is saved and training ends.

    Source: SlipStream, section 3.1 and "Rerouting micro-batches" in 4.3. Here the plan is always computed from the
    healthy one and the set of all lost workers, so that it does not depend on the order of the failures.
    """
    try:
        plan = adaptive_plan(view.healthy, view.lost)
    except StateUnavailable as error:
        salvage = (Abort(), TakeBack(), SaveCommitted(lost=error.layers))
        return RecoveryPlan(strategy="adaptive", actions=salvage)
    validate(plan)
    return RecoveryPlan(strategy="adaptive", actions=(Abort(), TakeBack(), InstallPlan(plan=plan), Recompute()))


STRATEGIES: Mapping[str, Strategy] = MappingProxyType({"auto": adaptive, "adaptive": adaptive})


def strategy_named(name: str) -> Strategy:
    """Returns the strategy of this name; ``auto`` is the best one that there is.

    Raises:
        ConfigError: there is none.
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ConfigError(f"resilience.strategy: unknown {name!r}; known: {', '.join(STRATEGIES)}") from None
