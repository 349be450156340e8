import math
from itertools import accumulate, pairwise

import pytest

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import LayerRange, home_placement, regular_placement, split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import parse_costs, unit_costs
from holdfast.core.routes import Route, Routes, Visit, home_routes
from holdfast.core.schedule import format_orders
from holdfast.core.validate import validate
from holdfast.errors import ConfigError, InfeasiblePlan, StateUnavailable
from holdfast.schedule import builders
from holdfast.schedule.builders import (
    Limit,
    adaptive_plan,
    assigned_plan,
    gpipe_orders,
    home_plan,
    one_f_one_b,
    regular_plan,
)
from holdfast.schedule.evaluate import evaluate

EXAMPLE = regular_plan(3, split_evenly(4, 4), 6)
TALL, SHORT = regular_placement(1, split_evenly(3, 3)), regular_placement(1, split_evenly(2, 2))


def peaks(plan, costs):
    return {str(worker): peak for worker, peak in evaluate(plan, costs).peak_memory}


def test_healthy_orders_are_classic_1f1b():
    orders = one_f_one_b(
        regular_placement(1, split_evenly(3, 3)), home_routes(regular_placement(1, split_evenly(3, 3)), Batch((4,)))
    )
    assert format_orders(orders) == (
        "0.0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3\n"
        "0.1: F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3\n"
        "0.2: F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3\n"
    )


def test_healthy_orders_do_not_depend_on_the_costs():
    costs = parse_costs(4, costs="10:3:30:1,11,8", comm="7")
    assert regular_plan(3, split_evenly(4, 4), 6, costs=costs) == EXAMPLE


def of_lanes(sizes, lanes, microbatches):
    """One pipeline whose stages have these sizes and so many lanes."""
    cuts = [LayerRange(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
    row = [cut for cut, width in zip(cuts, lanes, strict=True) for _ in range(width)]
    return home_plan(home_placement([row]), Batch((microbatches,)))


def test_micro_batches_take_lanes_by_turns():
    plan = of_lanes((1, 2, 1), (1, 2, 1), 4)
    names = [" ".join(map(str, route.workers)) for route in plan.routes.routes]
    assert names == ["0.0 0.1 0.3", "0.0 0.2 0.3"] * 2


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), (1, 2, 1), (1, 3, 1), (2, 1, 2), (3, 2, 1), (1, 2, 2, 1)])
def test_a_stage_of_d_lanes_is_d_times_as_fast(sizes):
    """Each stage has as many lanes as layers, so all are equally fast: 3 per micro-batch, and 1.5 of 2 x 2 at most."""
    few, many = (of_lanes(sizes, sizes, count) for count in (24, 48))
    validate(many)
    costs = unit_costs(sum(sizes))
    assert evaluate(many, costs).makespan - evaluate(few, costs).makespan == 24 * 3


def test_lanes_of_lanes_are_pipelines_of_their_own():
    plan = of_lanes((1, 1, 1), (2, 2, 2), 8)
    alike = regular_plan(2, split_evenly(3, 3), 4)
    assert peaks(plan, unit_costs(3)) == {f"0.{2 * s + lane}": 3 - s for s in range(3) for lane in range(2)}
    assert evaluate(plan, unit_costs(3)).makespan == evaluate(alike, unit_costs(3)).makespan


def test_the_other_lane_takes_over():
    healthy = of_lanes((1, 2, 1), (1, 2, 1), 8)
    plan = adaptive_plan(healthy, [WorkerId(0, 1)])
    validate(plan)
    assert {route.workers for route in plan.routes.routes} == {(WorkerId(0, 0), WorkerId(0, 2), WorkerId(0, 3))}


def test_gpipe_runs_all_forwards_first():
    orders = gpipe_orders(
        regular_placement(1, split_evenly(2, 2)), home_routes(regular_placement(1, split_evenly(2, 2)), Batch((2,)))
    )
    assert format_orders(orders) == "0.0: F0.0 F0.1 B0.0 B0.1\n0.1: F0.0 F0.1 B0.0 B0.1\n"


def test_gpipe_does_not_deadlock_on_shared_workers():
    plan = adaptive_plan(EXAMPLE, [WorkerId(1, 2), WorkerId(0, 2)])
    validate(Plan(placement=plan.placement, routes=plan.routes, orders=gpipe_orders(plan.placement, plan.routes)))


def test_adaptive_reaches_the_proved_optimum_of_the_running_example():
    plan = adaptive_plan(EXAMPLE, [WorkerId(1, 2)])
    validate(plan)
    assert evaluate(plan, unit_costs(4)).makespan == 36
    orders = one_f_one_b(plan.placement, plan.routes, limit=Limit.MEMORY)
    free = Plan(placement=plan.placement, routes=plan.routes, orders=orders)
    validate(free)
    assert evaluate(free, unit_costs(4)).makespan == 33


def test_adaptive_keeps_the_limits_of_1f1b():
    plan = adaptive_plan(EXAMPLE, [WorkerId(1, 2), WorkerId(0, 0)])
    for worker, peak in peaks(plan, unit_costs(4)).items():
        assert peak <= 4 - int(worker.partition(".")[2])


@pytest.mark.parametrize("cap", ["4:3:2:1", "1", "2", "9:1:9:1"])
def test_memory_is_respected(cap):
    costs = parse_costs(4, costs="10,11,8", comm="1", memory=f"1,0,1,{cap}")
    for plan in (
        regular_plan(3, split_evenly(4, 4), 6, costs=costs),
        adaptive_plan(EXAMPLE, [WorkerId(1, 2)], costs),
    ):
        validate(plan, costs=costs)


def test_memory_with_fractions_and_parts_kept_for_good_is_respected():
    costs = parse_costs(3, memory="0.3,0.1,0.1,1.3")
    plan = regular_plan(2, split_evenly(3, 3), 9, costs=costs)
    validate(plan, costs=costs)
    assert max(peaks(plan, costs).values()) == pytest.approx(7 * 0.1 + 2 * 0.3)


def test_too_little_memory_names_the_stage_and_what_it_needs():
    with pytest.raises(InfeasiblePlan, match=r"stage 2 .* has 1 of memory, but its 6 .* need at least 2"):
        regular_plan(3, split_evenly(4, 4), 6, costs=parse_costs(4, memory="2,1,1,8:8:1:8"))
    with pytest.raises(InfeasiblePlan, match="at least 7"):
        regular_plan(1, split_evenly(1, 1), 6, costs=parse_costs(1, memory="2,0,1,6"))
    validate(regular_plan(1, split_evenly(1, 1), 6, costs=parse_costs(1, memory="2,0,1,7")))


def test_pipelines_of_different_shape_are_scheduled():
    plan = home_plan(home_placement([split_evenly(6, 2), split_evenly(6, 3)]), Batch((5, 3)))
    validate(plan, ties=((0, 5),))
    assert format_orders(plan.orders).startswith("0.0: F0.0 F0.1 B0.0 F0.2")


A, B, MIDDLE = WorkerId(1, 0), WorkerId(2, 0), WorkerId(0, 1)


def in_either_order(each, **memory):
    """Two whole pipelines stand in on both sides of a third one's middle, in either order; orders, and their length."""
    placement = home_placement([split_evenly(3, 3), split_evenly(3, 1), split_evenly(3, 1)])
    first, second, third = split_evenly(3, 3)
    turns = [(A, B)] * each + [(B, A)] * each
    ways = [(Visit(one, first), Visit(MIDDLE, second), Visit(other, third)) for one, other in turns]
    routes = Routes(tuple(map(Route, Batch((2 * each,)).microbatches, ways)))
    living = placement.without([WorkerId(0, 0), WorkerId(0, 2)])
    costs = parse_costs(3, **memory)
    plan = Plan(placement=living, routes=routes, orders=one_f_one_b(living, routes, costs, limit=Limit.MEMORY))
    validate(plan, costs=costs)
    return format_orders(plan.orders), evaluate(plan, costs).makespan


@pytest.mark.parametrize("room", [3, 4, 6])
def test_workers_that_wait_for_one_anothers_room_keep_some_for_the_next_in_turn(room):
    """Left alone each would fill up with what the other has to run next."""
    _, roomy = in_either_order(4, memory="1,0,1,99")
    _, tight = in_either_order(4, memory=f"1,0,1,{room}")
    one_by_one = 8 * 3 * 3
    assert roomy <= tight <= 0.7 * one_by_one


def test_the_last_resort_is_one_micro_batch_after_another(monkeypatch):
    """No grid was found that needs it, but nothing rules it out where micro-batches leave memory behind for good."""
    monkeypatch.setattr(builders, "_in_turns", lambda *args: None)
    text, _ = in_either_order(3, memory="4,1,1,48")
    assert text.startswith("0.1: F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3")


@pytest.mark.parametrize("counts", [[2, 1], [2, 1, 1], [4]], ids=["too few", "a pipeline more", "a pipeline less"])
def test_micro_batches_that_do_not_go_through_these_pipelines_are_refused(counts):
    rows = [[Visit(WorkerId(pipeline, 0), LayerRange(0, 2))] for pipeline in range(2)]
    numbers = regular_plan(2, split_evenly(2, 1), 2).routes.microbatches
    assert len(assigned_plan(rows, numbers, [3, 1]).routes.routes) == 4
    with pytest.raises(ConfigError, match="4 micro-batches cannot go as"):
        assigned_plan(rows, numbers, counts)


def test_nothing_left_of_a_layer_is_refused():
    with pytest.raises(StateUnavailable, match="1"):
        adaptive_plan(EXAMPLE, [WorkerId(p, 1) for p in range(3)])


def test_unknown_techniques_are_refused():
    with pytest.raises(ConfigError, match=r"'zb'.* 1f1b or gpipe"):
        regular_plan(1, split_evenly(1, 1), 1, "zb")


def test_operations_without_duration_are_scheduled():
    costs = parse_costs(4, costs="0,0,0")
    plan = adaptive_plan(EXAMPLE, [WorkerId(1, 2)], costs)
    validate(plan)
    assert evaluate(plan, costs).makespan == 0
    assert math.isfinite(evaluate(plan, unit_costs(4)).makespan)
