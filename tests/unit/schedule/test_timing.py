import dataclasses
from itertools import pairwise

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.core.validate import validate
from holdfast.errors import ConfigError, InfeasiblePlan, InvalidSchedule, StateUnavailable
from holdfast.planning.costed_grid import CostedGrid, grid_problem
from holdfast.planning.planner import Technique, make_plan
from holdfast.schedule.evaluate import evaluate, measured
from holdfast.schedule.list_scheduler import list_schedule, plain_urgency
from holdfast.schedule.problem import to_plan
from holdfast.schedule.timing import check, from_orders, fuse, measure, rows_to_run, settle, to_timeline

COSTS = parse_costs(3, costs="3:5:4,2:6:4,4:1:3", comm="1:2", optimizer="3:0:7", memory="3,1,2,12:9:6")
GRID = CostedGrid(pipelines=2, stages=split_evenly(3, 3), microbatches=4, costs=COSTS)
PROBLEM = grid_problem(GRID, [WorkerId(0, 1)])
SCHEDULE = list_schedule(PROBLEM, plain_urgency(PROBLEM))


def test_flat_and_object_form_agree():
    plan = to_plan(PROBLEM, SCHEDULE.rows)
    validate(plan, costs=COSTS)
    timeline = evaluate(plan, COSTS, staggered=True)
    found = measure(PROBLEM, SCHEDULE, staggered=True)
    assert (timeline.period, timeline.makespan) == (found.period, found.makespan)
    assert to_timeline(PROBLEM, plan, SCHEDULE, staggered=True) == timeline
    again = from_orders(PROBLEM, plan.orders)
    assert (again.rows, again.starts) == (SCHEDULE.rows, SCHEDULE.starts)


def test_workers_that_are_slow_take_so_many_times_as_long_and_messages_do_not():
    plan = to_plan(PROBLEM, SCHEDULE.rows)
    quick = measured(plan, COSTS, staggered=True)
    double = parse_costs(3, costs="6:10:8,4:12:8,8:2:6", comm="1:2", optimizer="6:0:14", memory="3,1,2,12:9:6")
    everybody = dict.fromkeys(plan.workers, 2.0)
    assert measured(plan, COSTS, staggered=True, slowed=everybody) == measured(plan, double, staggered=True)
    for worker in plan.workers:
        computes = sum(span.end - span.start for span in evaluate(plan, COSTS).spans if span.worker == worker)
        slow = measured(plan, COSTS, staggered=True, slowed={worker: 100.0})
        assert 100 * computes <= slow.makespan <= 100 * computes + quick.makespan


@pytest.mark.parametrize("ties", [((0, 2),), ((0, 1), (1, 2))])
def test_flat_and_object_form_agree_on_tied_stages(ties):
    costs = parse_costs(3, costs="3:2:1,2:1:1,1:2:9", comm="1:2", optimizer="3:6:7")
    problem = grid_problem(dataclasses.replace(GRID, costs=costs, ties=ties), [])
    schedule = list_schedule(problem, plain_urgency(problem))
    plan = to_plan(problem, schedule.rows)
    timeline = evaluate(plan, costs, staggered=True, ties=ties)
    assert timeline.period == measure(problem, schedule, staggered=True).period
    assert timeline.period > evaluate(plan, costs, staggered=True).period
    assert to_timeline(problem, plan, schedule, staggered=True) == timeline


def test_a_stage_waits_for_those_that_share_a_weight_with_it():
    costs, ties = parse_costs(6, costs="1,1,1"), ((0, 1), (0, 5), (3, 4))
    grid = CostedGrid(pipelines=1, stages=split_evenly(6, 3), microbatches=1, costs=costs, ties=ties)
    assert grid.waits_for == ((0, 2), (1, 2), (0, 1, 2))
    with pytest.raises(ConfigError, match=r"ties \(\(0, 6\),\) are impossible: expected layers 0 to 5"):
        dataclasses.replace(grid, ties=((0, 6),))


def test_later_starts_never_make_the_period_longer():
    settled = settle(PROBLEM, SCHEDULE, staggered=True)
    check(PROBLEM, settled)
    assert settled.rows == SCHEDULE.rows
    assert measure(PROBLEM, settled, staggered=True).period <= measure(PROBLEM, SCHEDULE, staggered=True).period


def broken(change):
    starts, rows = list(SCHEDULE.starts), [list(row) for row in SCHEDULE.rows]
    change(starts, rows)
    return dataclasses.replace(SCHEDULE, starts=starts, rows=rows)


def drop(starts, rows):
    rows[0].pop()


def stray(starts, rows):
    rows[0], rows[1] = rows[1], rows[0]


def overlap(starts, rows):
    starts[rows[3][1]] = starts[rows[3][0]]


def hurry(kind, visit):
    def change(starts, rows):
        starts[kind * PROBLEM.num_visits + visit] = 0

    return change


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (drop, "exactly once"),
        (stray, "does not visit"),
        (overlap, "same time|before"),
        (hurry(0, 2), "F starts before its input"),
        (hurry(1, 1), "gradient|own forward"),
        (hurry(2, 0), "W starts before"),
    ],
)
def test_every_broken_rule_is_found(change, rule):
    check(PROBLEM, SCHEDULE)
    with pytest.raises(InvalidSchedule, match=rule):
        check(PROBLEM, broken(change))


def test_too_much_memory_is_found():
    costs = dataclasses.replace(COSTS, capacity=(3, 9, 6))
    problem = grid_problem(dataclasses.replace(GRID, costs=costs), [WorkerId(0, 1)])
    with pytest.raises(InvalidSchedule, match="more than the 3"):
        check(problem, SCHEDULE)


def test_what_cannot_be_planned_is_named():
    with pytest.raises(StateUnavailable, match="stage 1"):
        make_plan(GRID, [WorkerId(0, 1), WorkerId(1, 1)], Technique.STAGGERED)
    costs = dataclasses.replace(COSTS, capacity=(12, 2, 6))
    with pytest.raises(InfeasiblePlan, match=r"stage 1 has 2 of memory, .* at least 3"):
        make_plan(dataclasses.replace(GRID, costs=costs), [], Technique.STAGGERED)


def test_backwards_are_fused_where_the_split_buys_nothing():
    grid = dataclasses.replace(GRID, pipelines=1)
    problem = grid_problem(grid, [])
    schedule = settle(problem, list_schedule(problem, plain_urgency(problem)), staggered=True)
    fused = fuse(problem, schedule, staggered=True)
    check(problem, fused)
    plan = to_plan(problem, rows_to_run(problem, fused))
    kinds = [op.kind.value for _, row in plan.orders.rows for op in row]
    assert 0 < kinds.count("B") < 3 * grid.microbatches
    assert kinds.count("I") == kinds.count("W") == 3 * grid.microbatches - kinds.count("B")
    validate(plan, costs=COSTS)
    timeline = to_timeline(problem, plan, fused, staggered=True)
    assert timeline.period == measure(problem, schedule, staggered=True).period
    assert evaluate(plan, COSTS).makespan <= timeline.makespan


def test_a_b_in_two_parts_is_found():
    problem = grid_problem(dataclasses.replace(GRID, pipelines=1), [])
    schedule = settle(problem, list_schedule(problem, plain_urgency(problem)), staggered=True)
    visits = problem.num_visits
    inputs = [pair for row in schedule.rows for pair in pairwise(row) if pair[0] // visits == 1]
    apart = next(before for before, after in inputs if after != before + visits)
    with pytest.raises(InvalidSchedule, match="do not follow one another"):
        check(problem, dataclasses.replace(schedule, fused=frozenset([apart - visits])))


@pytest.mark.parametrize("split", ["1:3:2", "9:8:7"])
def test_a_split_that_costs_time_is_made_only_where_it_buys_more(split):
    costs = parse_costs(3, costs="3:5:4,2:6:4,4:1:3", comm="1:2", optimizer="3:0:7", split=split)
    grid = dataclasses.replace(GRID, costs=costs)
    free = make_plan(dataclasses.replace(GRID, costs=dataclasses.replace(costs, split=None)), [], Technique.STAGGERED)
    made = make_plan(grid, [], Technique.STAGGERED, time_limit_s=0.3)
    coupled = make_plan(grid, [], Technique.ADAPTIVE, time_limit_s=0.3)
    assert free.found.period <= made.found.period <= coupled.found.period
    assert made.bound.period <= made.found.period
    validate(made.plan, costs=costs)
    timeline = to_timeline(made.problem, made.plan, made.schedule, staggered=True)
    assert timeline.period == made.found.period
    lengths = {(str(span.op.kind), span.worker.stage): span.end - span.start for span in timeline.spans}
    expected = {
        "F": (3, 5, 4),
        "I": [b + int(s) for b, s in zip((2, 6, 4), split.split(":"), strict=True)],
        "W": (4, 1, 3),
    }
    expected["B"] = (6, 7, 7)
    assert all(length == expected[kind][stage] for (kind, stage), length in lengths.items())
    if split == "9:8:7":
        assert {kind for kind, _ in lengths} == {"F", "B"}


def test_fused_operations_shorten_a_schedule_whose_split_costs_time():
    grid = CostedGrid(
        pipelines=1, stages=split_evenly(1, 1), microbatches=4, costs=parse_costs(1, costs="3,2,4", split="1")
    )
    problem = grid_problem(grid, [])
    schedule = list_schedule(problem, [n for v in range(4) for n in (v, 4 + v, 8 + v)])
    assert measure(problem, schedule, staggered=True).period == 4 * (3 + 2 + 1 + 4)
    fused = fuse(problem, schedule, staggered=True)
    check(problem, fused)
    assert measure(problem, fused, staggered=True).period == 4 * (3 + 2 + 4)
    assert make_plan(grid, [], Technique.STAGGERED).optimal
