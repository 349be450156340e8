import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.core.validate import validate
from holdfast.errors import InfeasiblePlan
from holdfast.planning.shrink import shrunken_plan
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.schedule.evaluate import evaluate


def microbatches(pipelines, each):
    return Batch((each,) * pipelines).microbatches


@given(
    workers=st.sets(st.builds(WorkerId, st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12),
    pipelines=st.integers(1, 3),
    each=st.integers(1, 4),
    layers=st.integers(1, 7),
    limit=st.none() | st.integers(1, 7),
)
def test_any_survivors_get_a_valid_plan_of_all_microbatches(workers, pipelines, each, layers, limit):
    plan = shrunken_plan(sorted(workers), microbatches(pipelines, each), layers, max_layers=limit)
    validate(plan)
    assert set(plan.routes.microbatches) == set(microbatches(pipelines, each))
    assert set(plan.workers) <= workers


def test_a_lost_stage_of_three_by_four_leaves_nine_workers_that_are_all_used():
    left = [WorkerId(p, s) for p in range(3) for s in range(4) if s != 1]
    plan = shrunken_plan(left, microbatches(3, 6), 8, max_layers=3)
    assert set(plan.workers) == set(left)
    assert max(layers.stop - layers.start for _, layers in plan.placement.ranges) == 3


def test_the_limit_gives_way_where_nothing_else_is_left():
    plan = shrunken_plan([WorkerId(0, 0), WorkerId(2, 1)], microbatches(3, 2), 8, max_layers=2)
    assert [str(layers) for _, layers in plan.placement.ranges] == ["0:4", "4:8"]


def test_it_is_as_good_as_any_smaller_regular_grid():
    left = [WorkerId(p, s) for p in range(3) for s in range(4) if (p, s) != (1, 2)]
    found = evaluate(shrunken_plan(left, microbatches(3, 4), 12), unit_costs(12)).makespan
    for pipelines, stages in [(2, 5), (5, 2), (11, 1), (1, 11), (3, 3), (2, 4)]:
        if 12 % pipelines == 0:
            plan = regular_plan(pipelines, split_evenly(12, stages), 12 // pipelines)
            assert found <= evaluate(plan, unit_costs(12)).makespan


def test_a_shrunken_plan_survives_further_losses():
    left = [WorkerId(p, s) for p in range(3) for s in range(4) if s != 1]
    plan = shrunken_plan(left, microbatches(3, 6), 6, max_layers=2)
    again = adaptive_plan(plan, [plan.workers[0]])
    validate(again)


def test_nobody_left_is_refused():
    with pytest.raises(InfeasiblePlan, match=r"0 worker\(s\)"):
        shrunken_plan([], microbatches(1, 1), 1)
