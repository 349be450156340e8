import itertools

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.errors import InfeasiblePlan
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.normalise import (
    Normalisation,
    assigned,
    bound_cost,
    bubble_cost,
    min_max,
    min_sum,
    moves,
    place,
)
from holdfast.planning.planner import Technique


def grid_of(pipelines, stages, microbatches, **costs):
    return CostedGrid(
        pipelines=pipelines,
        stages=split_evenly(stages, stages),
        microbatches=microbatches,
        costs=parse_costs(stages, **costs),
    )


UNEVEN = grid_of(3, 3, 5, costs="3:5:4,2:6:4,4:1:3", comm="1:2", optimizer="3:0:7", memory="2,1,1,8:6:4")


def assignments(stages, failures, most):
    return [each for each in itertools.product(range(most + 1), repeat=stages) if sum(each) == failures]


@pytest.mark.parametrize("make_cost", [bound_cost, bubble_cost])
@pytest.mark.parametrize("failures", range(7))
def test_both_normalisations_are_exact(make_cost, failures):
    cost = make_cost(UNEVEN)
    every = assignments(3, failures, 2)
    greatest = [max(cost(stage, x) for stage, x in enumerate(each)) for each in every]
    total = [sum(cost(stage, x) for stage, x in enumerate(each)) for each in every]
    found = min_sum(3, failures, 2, cost)
    assert sum(cost(stage, x) for stage, x in enumerate(found)) == min(total)
    best = min_max(3, failures, cost)[failures]
    assert sum(best) == failures
    assert max(cost(stage, x) for stage, x in enumerate(best)) == min(greatest)


def test_what_a_stage_can_hold_counts_for_what_a_failure_costs_it():
    """With room for one micro-batch it goes through all later stages and back before the next one is run."""
    roomy, tight = (bubble_cost(grid_of(3, 4, 4, memory=f"2,1,1,{room}"))(0, 1) for room in (99, 2))
    assert tight > 2 * roomy > 0


def test_assignments_are_nested():
    for fewer, more in itertools.pairwise(min_max(8, 64, bound_cost(grid_of(32, 8, 16)))):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))
        assert sum(more) == sum(fewer) + 1


def test_the_worst_stage_counts_not_the_sum():
    grid = grid_of(32, 8, 16)
    assert max(min_max(8, 64, bound_cost(grid))[64]) == 8


def test_more_failures_than_a_grid_survives_are_refused():
    with pytest.raises(InfeasiblePlan, match="at most 6"):
        min_max(3, 7, bound_cost(UNEVEN))
    with pytest.raises(InfeasiblePlan, match="at most 6"):
        min_sum(3, 7, 2, bound_cost(UNEVEN))


def test_failures_are_placed_in_the_last_pipelines():
    assert place((1, 0, 2), 3) == (WorkerId(1, 2), WorkerId(2, 0), WorkerId(2, 2))


def test_as_few_workers_move_as_possible():
    failed = [WorkerId(0, 0), WorkerId(1, 0), WorkerId(0, 2)]
    made, empty = moves(UNEVEN, failed, (1, 1, 1), state_bytes=(10, 20, 30))
    assert [(move.worker, move.takes, move.copied_bytes) for move in made] == [(WorkerId(2, 1), WorkerId(1, 0), 10)]
    assert empty == (WorkerId(0, 0), WorkerId(0, 2), WorkerId(2, 1))
    assert moves(UNEVEN, failed, (2, 0, 1)) == ((), tuple(sorted(failed)))
    with pytest.raises(InfeasiblePlan, match="3 workers have failed"):
        moves(UNEVEN, failed, (2, 0, 0))


def test_algorithm_1_takes_from_few_stages_what_min_max_spreads():
    """The sum of 64 failures' bubbles is least where the first stages give most, though a step waits for the worst."""
    grid, rules = grid_of(32, 8, 16), Technique.ADAPTIVE.rules
    assert assigned(grid, 64, rules, Normalisation.PAPER) == (13, 13, 13, 5, 5, 5, 5, 5)
    assert max(assigned(grid, 64, rules, Normalisation.MIN_MAX)) == 11
