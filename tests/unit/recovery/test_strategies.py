from dataclasses import fields, replace

import pytest

from holdfast.core.placement import split_evenly
from holdfast.core.plan import with_followers
from holdfast.core.profile import unit_costs
from holdfast.core.schedule import OpKind
from holdfast.errors import ConfigError
from holdfast.planning.planner import Technique
from holdfast.planning.shrink import shrunken_plan
from holdfast.planning.training import Terms, replanned, rerouted
from holdfast.recovery.actions import (
    Abort,
    Await,
    CopyState,
    GiveUp,
    InstallPlan,
    LoadState,
    Recompute,
    ReplaceGrid,
    Restore,
    SaveCommitted,
    Spawn,
    TakeBack,
)
from holdfast.recovery.rules import JobRules
from holdfast.recovery.view import ClusterView
from holdfast.schedule.builders import adaptive_plan, gpipe_orders, regular_plan
from holdfast.schedule.evaluate import evaluate
from holdfast.strategies.adaptive import adaptive
from holdfast.strategies.answers import at_boundary
from holdfast.strategies.checkfreq import checkfreq
from holdfast.strategies.checkpoint_restart import checkpoint_restart
from holdfast.strategies.registry import STRATEGIES, strategy_named
from holdfast.strategies.snapshots import snapshots
from holdfast.strategies.templates import templates

PLAN = regular_plan(3, split_evenly(4, 2), 2)
W00, W01, W10, W11, W20, W21 = PLAN.workers
RULED = {each.name for each in fields(JobRules)}


def view(*lost, **options):
    """``options`` are those of the view, and what of the rules is not as in any job."""
    return seen(PLAN, lost, **options)


def seen(baseline, lost, **options):
    told = {name: options.pop(name) for name in RULED if name in options}
    return ClusterView(rules=JobRules(steps=9, **told), baseline=baseline, lost=frozenset(lost), **options)


def test_adaptive_routes_around_the_lost():
    recovery = adaptive(view(W10, W21))
    plan = adaptive_plan(PLAN, [W10, W21])
    assert recovery.actions == (Abort(), InstallPlan(plan=plan), TakeBack(), Recompute())
    assert (recovery.strategy, recovery.plan, recovery.keeps_state) == ("adaptive", plan, True)


@pytest.mark.parametrize("terms", [None, Terms(technique=Technique.STAGGERED, costs=unit_costs(4), in_flight=4)])
def test_once_nobody_is_missing_any_more_the_plan_is_that_of_the_grid(terms):
    """GPipe's orders, or a strategy's own, and not those that would be made anew."""
    baseline = replace(PLAN, orders=gpipe_orders(PLAN.placement, PLAN.routes))
    recovery = at_boundary(seen(baseline, (), terms=terms))
    assert recovery.plan == baseline != PLAN


def test_adaptive_does_not_depend_on_the_order_of_the_failures():
    assert adaptive(view(W10, W21)) == adaptive(view(W21, W10))


def test_without_an_owner_what_lives_is_saved():
    recovery = adaptive(view(W01, W11, W21, W00))
    assert recovery.actions == (Abort(), GiveUp(lost=(2, 3)), TakeBack(), SaveCommitted())
    assert (recovery.plan, recovery.keeps_state) == (None, False)


def test_strategies_are_found_by_name():
    assert all(strategy_named(name) is strategy for name, strategy in STRATEGIES.items())
    with pytest.raises(ConfigError, match=r"resilience\.strategy: expected one of auto, adaptive, .*, got 'hope'"):
        strategy_named("hope")


RESTARTS = [(checkpoint_restart, "checkpoint-restart"), (checkfreq, "checkfreq")]


@pytest.mark.parametrize(("strategy", "name"), RESTARTS)
def test_restarting_replaces_all_lost_and_waits_for_everyone(strategy, name):
    recovery = strategy(view(W10, W21, checkpoint=4, wait_s=9.0))
    assert recovery.actions == (Abort(), Await(limit_s=9.0, everyone=True), Spawn(workers=(W10, W21)))
    assert (recovery.strategy, recovery.plan, recovery.keeps_state) == (name, None, False)


@pytest.mark.parametrize(("strategy", "name"), RESTARTS)
def test_who_has_come_already_is_not_started_again(strategy, name):
    recovery = strategy(view(W10, W21, entering=frozenset({W21}), checkpoint=4, wait_s=9.0))
    assert Spawn(workers=(W10,)) in recovery.actions


@pytest.mark.parametrize(("strategy", "name"), RESTARTS)
def test_after_the_limit_the_smaller_grid_goes_on(strategy, name):
    recovery = strategy(view(W10, W21, checkpoint=4))
    kinds = (Abort, ReplaceGrid, LoadState, InstallPlan, TakeBack, Recompute)
    assert (recovery.strategy, tuple(map(type, recovery.actions))) == ("fallback", kinds)
    assert recovery.actions[2] == LoadState(step=4)
    assert recovery.actions[1].plan is recovery.plan
    assert set(recovery.plan.workers) <= {W00, W01, W11, W20}


def test_who_has_come_without_state_has_a_place_in_the_smaller_grid():
    """All load their layers there, so it is as good as any other."""
    recovery = adaptive(view(W01, W11, W21, W20, entering=frozenset({W20}), checkpoint=4))
    assert recovery.strategy == "fallback"
    assert set(recovery.plan.workers) == {W00, W10, W20}


@pytest.mark.parametrize("wait_s", [0.0, 9.0])
def test_who_has_come_for_a_layer_that_nobody_holds_loads_it_with_all_others_at_once(wait_s):
    recovery = adaptive(view(W01, W11, W21, W20, entering=frozenset({W21}), checkpoint=4, wait_s=wait_s))
    assert recovery.strategy == "fallback"
    plan = InstallPlan(plan=adaptive_plan(PLAN, [W01, W11, W20]))
    assert recovery.actions == (Abort(), LoadState(step=4), plan, TakeBack(), Recompute())


@pytest.mark.parametrize(("strategy", "name"), RESTARTS)
def test_with_nothing_to_load_what_lives_is_saved(strategy, name):
    assert GiveUp(lost=(2, 3)) in strategy(view(W01, W11, W21, wait_s=9.0)).actions


def test_where_nobody_is_left_nothing_is_loaded():
    assert adaptive(view(*PLAN.workers, checkpoint=4)).actions[1] == GiveUp(lost=(0, 1, 2, 3))


def test_waiting_for_the_layers_only_is_not_waiting_for_everyone():
    recovery = adaptive(view(W01, W11, W21, checkpoint=4, wait_s=9.0))
    assert recovery.actions == (Abort(), Await(limit_s=9.0))


def test_snapshots_reroutes_as_adaptive_goes_back_further_and_fills_the_places():
    recovery = snapshots(view(W10, W21, entering=frozenset({W21})))
    plan = adaptive_plan(PLAN, [W10, W21])
    spawn = Spawn(workers=(W10,))
    assert recovery.actions == (Abort(), InstallPlan(plan=plan), spawn, Restore(), Recompute())
    assert (recovery.strategy, recovery.plan, recovery.keeps_state) == ("snapshots", plan, True)


@pytest.mark.parametrize("options", [{}, {"checkpoint": 4}, {"checkpoint": 4, "wait_s": 9.0}])
def test_snapshots_without_an_owner_fall_back_as_adaptive(options):
    lost = view(W01, W11, W21, **options)
    assert snapshots(lost) == adaptive(lost)


def test_between_steps_nobody_goes_back_whatever_answers_losses():
    recovery = at_boundary(view(W10, W21, entering=frozenset({W21}), checkpoint=4, wait_s=9.0))
    copy = CopyState(layers=PLAN.placement.held_by(W21)[0], target=W21)
    assert recovery.actions == (copy, InstallPlan(plan=recovery.plan, at_boundary=True))
    changed = at_boundary(view(W10), PLAN)
    assert changed.actions == (InstallPlan(plan=changed.plan, at_boundary=True, grid=PLAN),)


BY_RULES = regular_plan(3, split_evenly(6, 3), 3)
TERMS = Terms(technique=Technique.STAGGERED, costs=unit_costs(6), in_flight=6, ties=((0, 5),))
PLANNED = replanned(BY_RULES, TERMS)


def planned_view(*lost, **options):
    return seen(PLANNED, lost, terms=TERMS, **options)


def test_with_the_planners_techniques_the_planner_answers():
    lost = PLANNED.workers[4:5]
    recovery = adaptive(planned_view(*lost))
    assert recovery.plan == rerouted(PLANNED, lost, TERMS).plan
    assert recovery.plan != adaptive(view_of(BY_RULES, *lost)).plan


def view_of(plan, *lost):
    return seen(plan, lost)


def test_at_a_boundary_the_planner_answers_too():
    lost = PLANNED.workers[4:5]
    recovery = at_boundary(planned_view(*lost, entering=frozenset(lost)))
    expected = rerouted(PLANNED, lost, TERMS).plan
    assert recovery.plan == with_followers(expected, [(lost[0], *PLANNED.placement.held_by(lost[0]))])


def test_the_planner_schedules_the_smaller_grid():
    stage = [worker for worker in PLANNED.workers if worker.stage == 1]
    recovery = adaptive(planned_view(*stage, checkpoint=4))
    assert recovery.strategy == "fallback"
    assert recovery.plan == replanned(recovery.plan, TERMS)
    assert any(op.kind is OpKind.I for _, row in recovery.plan.orders.rows for op in row)


def test_the_planner_plans_what_is_left_of_a_grid_that_is_not_regular():
    plan = regular_plan(2, split_evenly(8, 4), 4)
    left = [worker for worker in plan.workers if worker.stage != 1]
    uneven = shrunken_plan(left, plan.routes.microbatches, 8, max_layers=4)
    terms = Terms(technique=Technique.DECOUPLED, costs=unit_costs(8), in_flight=8)
    recovery = adaptive(seen(uneven, uneven.workers[:1], terms=terms))
    assert recovery.plan is not None
    assert any(op.kind is OpKind.I for _, row in recovery.plan.orders.rows for op in row)
    by_rules = adaptive_plan(uneven, uneven.workers[:1])
    assert recovery.period < evaluate(by_rules, unit_costs(8)).period


def test_with_fewer_workers_than_are_to_go_on_all_is_saved():
    assert templates(view(W10, fewest=5)).plan is not None
    recovery = templates(view(W10, W21, fewest=5))
    why = "4 workers are left, and 5 are needed to tolerate as many failures as the job is to"
    assert recovery.actions == (Abort(), GiveUp(lost=(), why=why), TakeBack(), SaveCommitted())
    assert templates(view(W10, W21, fewest=5, spares=1)).plan is not None
    assert templates(view(W10, W21, fewest=5, entering=frozenset({W21}))).plan is not None
    assert templates(view(W10, W21)).plan is not None


@pytest.mark.parametrize("terms", [None, Terms(technique=Technique.STAGGERED, costs=unit_costs(4), in_flight=4)])
def test_the_dormant_hold_their_layers_and_compute_nothing(terms):
    plan = adaptive(view(W10, dormant=frozenset([W21]), terms=terms)).plan
    assert plan.placement == PLAN.placement.without([W10])
    assert plan.orders.of(W21) == ()
    assert all(plan.orders.of(worker) for worker in (W00, W01, W11, W20))
    assert all(W21 not in route.workers for route in plan.routes.routes)


def test_the_dormant_compute_where_nobody_else_could():
    assert adaptive(view(W01, W11, dormant=frozenset([W21]))) == adaptive(view(W01, W11))
    assert adaptive(view(W10, dormant=frozenset([W10]))) == adaptive(view(W10)), "the lost do not rest"
