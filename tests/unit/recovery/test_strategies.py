import pytest

from holdfast.core.builders import adaptive_plan, regular_plan
from holdfast.core.placement import split_evenly
from holdfast.errors import ConfigError
from holdfast.recovery.actions import Abort, ClusterView, InstallPlan, Recompute, SaveCommitted, TakeBack
from holdfast.recovery.strategies import STRATEGIES, adaptive, strategy_named

PLAN = regular_plan(3, split_evenly(4, 2), 2)
W00, W01, W10, W11, W20, W21 = PLAN.workers


def view(*lost):
    return ClusterView(healthy=PLAN, lost=frozenset(lost))


def test_adaptive_routes_around_the_lost():
    recovery = adaptive(view(W10, W21))
    plan = adaptive_plan(PLAN, [W10, W21])
    assert recovery.actions == (Abort(), TakeBack(), InstallPlan(plan=plan), Recompute())
    assert (recovery.strategy, recovery.plan, recovery.lost_layers) == ("adaptive", plan, ())


def test_adaptive_does_not_depend_on_the_order_of_the_failures():
    assert adaptive(view(W10, W21)) == adaptive(view(W21, W10))


def test_without_an_owner_what_lives_is_saved():
    recovery = adaptive(view(W01, W11, W21, W00))
    assert recovery.actions == (Abort(), TakeBack(), SaveCommitted(lost=(2, 3)))
    assert (recovery.plan, recovery.lost_layers) == (None, (2, 3))


def test_strategies_are_found_by_name():
    assert all(strategy_named(name) is strategy for name, strategy in STRATEGIES.items())
    with pytest.raises(ConfigError, match=r"resilience\.strategy: unknown 'hope'; known: auto, adaptive"):
        strategy_named("hope")
