"""Strategies: pure functions from a view of the cluster to a RecoveryPlan.

The runtime carries the actions out, a simulator can price the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from holdfast.core.builders import adaptive_plan
from holdfast.core.plan import with_listeners
from holdfast.core.validate import validate
from holdfast.errors import ConfigError, StateUnavailable
from holdfast.recovery.actions import (
    Abort,
    ClusterView,
    CopyState,
    InstallPlan,
    Recompute,
    RecoveryPlan,
    SaveCommitted,
    TakeBack,
)

__all__ = ["STRATEGIES", "Strategy", "adaptive", "at_boundary", "strategy_named"]

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


def at_boundary(view: ClusterView, strategy: Strategy) -> RecoveryPlan:
    """Returns how workers come and go between two steps, nothing being given up or run again.

    The routes are those that ``strategy`` finds for whoever can compute; workers that enter listen meanwhile.

    Args:
        view: who computes afterwards, and who enters.
        strategy: re-routes.
    """
    answer = strategy(ClusterView(healthy=view.healthy, lost=view.lost))
    if answer.plan is None:
        return answer
    ranges = [(worker, view.healthy.placement.layers_of(worker)) for worker in sorted(view.entering)]
    plan = with_listeners(answer.plan, ranges)
    validate(plan)
    copies = tuple(CopyState(layers=layers, target=worker) for worker, layers in ranges)
    return RecoveryPlan(strategy=answer.strategy, actions=(InstallPlan(plan=plan, at_boundary=True), *copies))


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
