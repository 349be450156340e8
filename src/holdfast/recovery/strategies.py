"""Strategies: pure functions from a view of the cluster to a RecoveryPlan.

The runtime carries the actions out, a simulator can price the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from holdfast.core.builders import adaptive_plan
from holdfast.core.plan import with_listeners
from holdfast.core.shrink import shrunken_plan
from holdfast.core.validate import validate
from holdfast.errors import ConfigError, StateUnavailable
from holdfast.recovery.actions import (
    Abort,
    Await,
    ClusterView,
    CopyState,
    InstallPlan,
    LoadState,
    Recompute,
    RecoveryPlan,
    SaveCommitted,
    TakeBack,
)

__all__ = ["STRATEGIES", "Strategy", "adaptive", "at_boundary", "fall_back", "strategy_named"]

Strategy = Callable[[ClusterView], RecoveryPlan]


def adaptive(view: ClusterView) -> RecoveryPlan:
    """Re-routes the micro-batches of lost workers to their peers and redoes the interrupted step.

    When a layer has no owner left, see :func:`fall_back`.

    Source: SlipStream, section 3.1 and "Rerouting micro-batches" in 4.3. Here the plan is always computed from the
    healthy one and the set of all lost workers, so that it does not depend on the order of the failures.
    """
    try:
        plan = adaptive_plan(view.healthy, view.lost)
    except StateUnavailable as error:
        return fall_back(view, error.layers)
    validate(plan)
    return RecoveryPlan(strategy="adaptive", actions=(Abort(), TakeBack(), InstallPlan(plan=plan), Recompute()))


def fall_back(view: ClusterView, layers: tuple[int, ...]) -> RecoveryPlan:
    """What is left when layers have no owner: wait for workers, then a smaller grid, from the last checkpoint.

    Every process that lives goes on in place, as a member of the fastest grid of those that hold at most twice as many
    layers per worker as before. Without a state to load, what lives is saved and training ends.

    Args:
        view: the cluster.
        layers: that nobody holds.
    """
    if view.checkpoint is None:
        return RecoveryPlan(strategy="fallback", actions=(Abort(), TakeBack(), SaveCommitted(lost=layers)))
    if view.wait_s > 0:
        return RecoveryPlan(strategy="fallback", actions=(Abort(), Await(limit_s=view.wait_s)))
    healthy = view.healthy
    left = [worker for worker in healthy.workers if worker not in view.lost or worker in view.entering]
    most = max(held.stop - held.start for _, held in healthy.placement.ranges)
    num_layers = healthy.placement.num_layers
    plan = shrunken_plan(left, healthy.routes.microbatches, num_layers, max_layers=2 * most)
    validate(plan)
    actions = (Abort(), LoadState(step=view.checkpoint), InstallPlan(plan=plan))
    return RecoveryPlan(strategy="fallback", actions=actions)


def at_boundary(view: ClusterView, strategy: Strategy) -> RecoveryPlan:
    """Returns how workers come and go between two steps, nothing being given up or run again.

    The routes are those that ``strategy`` finds for whoever can compute; workers that enter listen meanwhile.

    Args:
        view: who computes afterwards, and who enters.
        strategy: re-routes.
    """
    answer = strategy(ClusterView(healthy=view.healthy, lost=view.lost))  # no checkpoint: nobody goes back for this
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
