"""The planner on pipelines that are not alike: its plans are right, its bounds are, and its solver agrees with both."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.core.ids import Batch
from holdfast.core.placement import LayerRange, home_placement
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.routes import home_routes, reroute
from holdfast.core.schedule import Op, OpKind, Orders
from holdfast.core.validate import validate
from holdfast.errors import InfeasiblePlan, InvalidSchedule
from holdfast.planning.planner import Solver, Technique, plan_routes
from holdfast.planning.solvers.process import answer_of, given_of, suits
from holdfast.schedule.evaluate import evaluate, steady_period
from holdfast.schedule.list_scheduler import list_schedule, plain_urgency
from holdfast.schedule.problem import routes_problem
from holdfast.schedule.route_bounds import route_bound
from holdfast.schedule.timing import check, measure, to_timeline

MANY, FEW, FEWER = settings(max_examples=150), settings(max_examples=25), settings(max_examples=12)
TECHNIQUES = st.sampled_from([Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED])


@st.composite
def instances(draw, pipelines=4, layers=6, microbatches=5, splits=True, tied=False, longest=9):
    """Any cuts, any counts, any costs, and any loss that leaves each layer an owner."""
    layers = draw(st.integers(1, layers))
    rows = []
    for _ in range(draw(st.integers(2, pipelines))):
        cuts = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
        rows.append([LayerRange(*pair) for pair in itertools.pairwise([0, *sorted(cuts), layers])])
    counts = draw(st.lists(st.integers(1, microbatches), min_size=len(rows), max_size=len(rows)))
    placement = home_placement(rows)
    kept = {draw(st.sampled_from(placement.owners(layer))) for layer in range(layers)}
    gone = draw(st.sets(st.sampled_from(placement.workers))) - kept
    routes = reroute(placement, home_routes(placement, Batch(tuple(counts))), gone)

    def row(least, most, count=layers):
        return tuple(draw(st.lists(st.integers(least, most), min_size=count, max_size=count)))

    gives_input, gives_weight = row(0, 2), row(1, 2)
    costs = Costs(
        forward=row(1, longest),
        input=row(1, longest),
        weight=row(1, longest),
        optimizer=row(0, longest),
        comm=row(0, longest // 2, layers - 1),
        split=draw(st.none() | st.just(row(0, 6))) if splits else None,
        takes=tuple(a + b for a, b in zip(gives_input, gives_weight, strict=True)),
        gives_input=gives_input,
        gives_weight=gives_weight,
        in_flight=draw(st.none() | st.integers(1, 5)),
    )
    ties = ((0, layers - 1),) if tied and layers > 1 and draw(st.booleans()) else ()
    return following(draw, placement.without(gone)), routes, costs, ties


def following(draw, placement):
    """Some workers follow a layer besides what they hold."""
    others = [
        (worker, LayerRange(layer, layer + 1))
        for worker in placement.workers
        for layer in range(placement.num_layers)
        if layer not in placement.held_layers(worker)
    ]
    followed = draw(st.lists(st.sampled_from(others), unique_by=lambda row: row[0], max_size=2)) if others else []
    return dataclasses.replace(placement, followed=tuple(sorted(followed)))


@MANY
@given(instances(microbatches=8, layers=8), st.sampled_from([0.5, 1.0]))
def test_nobody_waits_for_longer_than_it_has_patience(instance, patience):
    """An I may arrive before another that was sent to the same worker earlier: the first to come is waited for."""
    placement, routes, costs, _ = instance
    problem = routes_problem(placement, routes, costs, coupled=False)
    schedule = list_schedule(problem, plain_urgency(problem), patience=patience)
    visits, lasts = problem.num_visits, problem.durations
    for row in schedule.rows:
        ends = [schedule.starts[n] + lasts[n // visits][problem.part_of[n % visits]] for n in row]
        longest = max((lasts[kind][problem.part_of[n % visits]] for n in row for kind in (0, 2)), default=0)
        for at, (number, end) in enumerate(zip(row[1:], ends, strict=False), 1):
            waiting = [e for n, e in zip(row[:at], ends, strict=False) if n // visits == 1 and n + visits in row[at:]]
            if waiting:  # W that could have been run
                assert schedule.starts[number] - end <= patience * longest


@MANY
@given(instances(tied=True), TECHNIQUES, st.integers(1, 4))
def test_plans_are_right_and_take_what_they_say(instance, technique, tries):
    placement, routes, costs, ties = instance
    planned = plan_routes(placement, routes, costs, technique, ties=ties, time_limit_s=math.inf, tries=tries)
    plan, staggered = planned.plan, technique is Technique.STAGGERED
    validate(plan, ties=ties, costs=costs)
    assert (plan.placement, plan.routes) == (placement, routes)
    assert planned.bound.makespan <= planned.found.makespan + 1e-9
    assert planned.bound.period <= planned.found.period + 1e-9
    timeline = to_timeline(planned.problem, plan, planned.schedule, staggered=staggered)
    assert (timeline.makespan, timeline.period) == (planned.found.makespan, planned.found.period)
    assert evaluate(plan, costs, ties=ties).makespan <= planned.found.makespan + 1e-9
    visited = {visit.worker for route in routes.routes for visit in route.visits}
    if visited == set(placement.workers) or not staggered:
        assert steady_period(plan, costs, staggered=staggered, ties=ties) <= planned.found.period + 1e-9
    again = plan_routes(placement, routes, costs, technique, ties=ties, time_limit_s=math.inf, tries=tries)
    assert again.plan == plan


@FEW
@given(instances(splits=False))
def test_the_planner_is_no_worse_than_the_rules_of_1f1b_and_splits_no_worse_than_none(instance):
    placement, routes, costs, _ = instance
    by_rules, adaptive, decoupled, staggered = (
        plan_routes(placement, routes, costs, technique, time_limit_s=math.inf, tries=12).found
        for technique in Technique
    )
    assert adaptive.makespan <= by_rules.makespan
    assert decoupled.makespan <= by_rules.makespan
    assert staggered.period <= by_rules.period


def every_order(plan):
    """All plans with these routes in which F comes before I before W of each micro-batch on every worker."""
    rows = []
    for worker, ops in plan.orders.rows:
        visits = {op.microbatch for op in ops}
        every = [Op(kind, each) for each in sorted(visits) for kind in (OpKind.F, OpKind.I, OpKind.W)]
        rows.append([(worker, row) for row in itertools.permutations(every) if in_order(row)])
    assume(math.prod(map(len, rows)) <= 1500)
    for orders in itertools.product(*rows):
        yield Plan(placement=plan.placement, routes=plan.routes, orders=Orders(tuple(orders)))


def in_order(row):
    seen = set()
    for op in row:
        if op.kind is not OpKind.F and (OpKind.F if op.kind is OpKind.I else OpKind.I, op.microbatch) not in seen:
            return False
        seen.add((op.kind, op.microbatch))
    return True


def shortest(plan, costs):
    """The makespan of the best of all orders that memory allows."""
    best = math.inf
    for each in every_order(plan):
        try:
            validate(each, costs=costs)
        except (InvalidSchedule, InfeasiblePlan):
            continue
        best = min(best, evaluate(each, costs).makespan)
    return best


@FEW
@given(instances(pipelines=2, layers=3, microbatches=1, splits=False))
def test_bound_search_and_all_orders_agree(instance):
    placement, routes, costs, _ = instance
    planned = plan_routes(placement, routes, costs, Technique.DECOUPLED, time_limit_s=math.inf, tries=40)
    assert planned.bound.makespan <= shortest(planned.plan, costs) <= planned.found.makespan


@FEWER
@given(instances(pipelines=3, layers=3, microbatches=2, splits=False, tied=True, longest=2), TECHNIQUES)
def test_counting_and_a_variable_per_start_find_the_same_optimum_and_no_bound_is_above_it(instance, technique):
    counting = pytest.importorskip(
        "holdfast.planning.solvers.counting", reason="CP-SAT is not installed: pip install holdfast[solver]"
    )
    from tests.starts_model import least  # needs the solver, which may not be installed

    placement, routes, costs, ties = instance
    staggered = technique is Technique.STAGGERED
    problem = routes_problem(placement, routes, costs, coupled=technique.rules.coupled, ties=ties)
    hint = list_schedule(problem, plain_urgency(problem))
    assume(len(hint.sequence) == problem.num_operations)
    value = technique.minimised(measure(problem, hint, staggered=staggered))
    goal = technique.minimised(route_bound(problem, technique.rules))
    asked, per_unit = given_of(problem, staggered=staggered, hint=hint, value=value, goal=0, time_limit_s=60)
    assert suits(problem, value)
    counted = counting.solve(asked)
    assert counted["status"] == "OPTIMAL"
    assert goal <= counted["value"] == least(asked) <= value
    found = answer_of(problem, counted, per_unit).schedule
    check(problem, found)
    assert technique.minimised(measure(problem, found, staggered=staggered)) == counted["value"]


@FEWER
@given(instances(pipelines=3, layers=4, microbatches=3, splits=False))
def test_with_cp_sat_a_plan_is_no_worse(instance):
    pytest.importorskip("ortools", reason="CP-SAT is not installed: pip install holdfast[solver]")
    placement, routes, costs, _ = instance
    quick = plan_routes(placement, routes, costs, Technique.STAGGERED, time_limit_s=math.inf, tries=3)
    exact = plan_routes(placement, routes, costs, Technique.STAGGERED, time_limit_s=4, engine=Solver.CP_SAT)
    validate(exact.plan, costs=costs)
    assert quick.bound.period <= exact.bound.period <= exact.found.period <= quick.found.period
