from __future__ import annotations

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.planning import search as search_module
from holdfast.planning.costed_grid import CostedGrid, grid_problem
from holdfast.planning.normalise import bound_cost, min_max, place
from holdfast.planning.search import search
from holdfast.planning.training import tries_for
from holdfast.schedule.array_scheduler import array_schedule, suits
from holdfast.schedule.list_scheduler import list_schedule, plain_urgency, precedence
from holdfast.schedule.timing import check, measure, settle

FAILED = [WorkerId(0, 1), WorkerId(1, 2)]


def uneven():
    costs = parse_costs(4, costs="10,11,8", comm="1", optimizer="5", memory="2,1,1,8")
    return grid_problem(
        CostedGrid(pipelines=4, stages=split_evenly(4, 4), microbatches=16, costs=costs), FAILED, coupled=False
    )


def alike():
    """Without failures, and large enough for the engine that moves all workers at once."""
    costs = parse_costs(8, memory="2,1,1,16")
    grid = CostedGrid(pipelines=32, stages=split_evenly(8, 8), microbatches=32, costs=costs)
    return grid_problem(grid, [], coupled=False)


def begins_with(problem):
    return len(search_module._known_rules(problem, True, suits(problem)))


def found(problem, tries, seed=0):
    return search(problem, staggered=True, goal=0.0, time_limit_s=1e9, tries=tries, seed=seed)


def test_climbing_shortens_what_the_known_rules_find():
    problem = uneven()
    climbed = found(problem, begins_with(problem) + 200)
    check(problem, climbed.schedule)
    assert climbed.value < found(problem, begins_with(problem)).value


@pytest.mark.parametrize("problem", [uneven(), alike()], ids=["list", "arrays"])
def test_equal_arguments_give_equal_schedules_and_more_tries_none_that_are_longer(problem):
    rules = begins_with(problem)
    known, climbed = found(problem, rules, seed=1), found(problem, rules + 6, seed=1)
    check(problem, climbed.schedule)
    assert climbed == found(problem, rules + 6, seed=1)
    assert climbed.value <= known.value <= found(problem, 1).value


@pytest.mark.parametrize(("failures", "period"), [(1, 207), (5, 209)])
def test_the_first_rules_for_large_grids_are_good_ones(failures, period):
    """At a loss, few schedules are made of so large a grid; one more slot is about what it takes to change plans."""
    costs = parse_costs(8, memory="2,1,1,16")
    grid = CostedGrid(pipelines=16, stages=split_evenly(8, 8), microbatches=64, costs=costs)
    lost = min_max(8, failures, bound_cost(grid))[failures]
    problem = grid_problem(grid, place(lost, 16), coupled=False)
    assert suits(problem)
    assert found(problem, tries_for(grid.num_operations, at_once=True)).value == period


def test_rules_that_memory_makes_alike_are_tried_once():
    problem = uneven()
    rules = search_module._known_rules(problem, True, False)
    assert len(set(rules)) == len(rules) < 33
    assert all(limit <= 8 / 2 for each in rules for limit in each.limits)


def strays(problem):
    """The micro-batches that are on two pipelines at least, or not on their own."""
    pipelines, stages = problem.num_workers // problem.num_groups, problem.num_groups
    on = [
        {problem.worker_of[number * stages + s] % pipelines for s in range(stages)}
        for number in range(problem.num_visits // stages)
    ]
    return {number for number, visited in enumerate(on) if visited != {number % pipelines}}


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_micro_batches_that_leave_their_pipeline_go_ahead_by_so_many_indices(ahead):
    problem = uneven()
    stages, pipelines, leave = problem.num_groups, problem.num_workers // problem.num_groups, strays(problem)
    order = [visit // stages for visit in precedence(problem, ahead)[::stages]]
    assert sorted(precedence(problem, ahead)) == list(range(problem.num_visits))
    assert 0 < len(leave) < len(order)
    for number in leave if ahead else ():
        behind = set(order[order.index(number) :]) - leave
        assert behind == {other for other in order if other // pipelines >= number // pipelines - ahead} - leave
    for alike in (leave, set(order) - leave):
        assert [number for number in order if number in alike] == sorted(alike)
    assert ahead or order == sorted(order)


def test_who_goes_ahead_is_not_what_all_wait_for_at_the_end():
    """52 failures on 16 stages: what meets another pipeline's micro-batches came back last, two slots late."""
    grid = CostedGrid(
        pipelines=32, stages=split_evenly(16, 16), microbatches=64, costs=parse_costs(16, memory="2,1,1,32")
    )
    lost = (2, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4)
    problem = grid_problem(grid, place(lost, 32), coupled=False)
    limits = [int((16 - stage) * 1.5) + 1 for stage in range(16)]

    def period(schedule):
        return measure(problem, settle(problem, schedule, staggered=True), staggered=True).period

    assert period(array_schedule(problem, limits=limits, ahead=2)) < period(array_schedule(problem, limits=limits))
    listed = [list_schedule(problem, plain_urgency(problem, ahead), limits=limits) for ahead in (0, 1)]
    assert period(listed[1]) < period(listed[0])


def test_both_engines_are_searched():
    assert suits(alike())
    assert not suits(uneven())
