"""Many steps one after another."""

import dataclasses

import pytest
from tests.plan_texts import orders_of

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.planner import Technique, make_plan
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.schedule.evaluate import evaluate, steady_period

UNEVEN = dataclasses.replace(
    unit_costs(4), forward=(3, 5, 4, 4), input=(4, 3, 6, 2), weight=(2, 2, 1, 5), optimizer=(2, 1, 3, 1), comm=(1, 2, 1)
)


@pytest.mark.parametrize("costs", [unit_costs(4), UNEVEN], ids=["unit", "uneven"])
@pytest.mark.parametrize("lost", [(), (WorkerId(1, 2),)], ids=["healthy", "one lost"])
def test_a_synchronous_step_takes_its_period(costs, lost):
    plan = adaptive_plan(regular_plan(3, split_evenly(4, 4), 6), lost)
    longest, first = max(costs.optimizer), costs.optimizer[0]
    assert steady_period(plan, costs) == evaluate(plan, costs).period - longest + first, "the first stage goes on first"


@pytest.mark.parametrize("costs", [unit_costs(4), UNEVEN], ids=["unit", "uneven"])
@pytest.mark.parametrize("lost", [(), (WorkerId(1, 2),)], ids=["healthy", "one lost"])
def test_a_staggered_step_never_takes_longer_than_its_period(costs, lost):
    grid = CostedGrid(pipelines=3, stages=split_evenly(4, 4), microbatches=6, costs=costs)
    planned = make_plan(grid, lost, Technique.STAGGERED, time_limit_s=0.2)
    found = steady_period(planned.plan, costs, staggered=True)
    assert planned.bound.period - 1e-9 <= found <= planned.found.period + 1e-9


def test_one_stage_needs_no_pipeline():
    plan = regular_plan(1, split_evenly(4, 1), 3)
    assert steady_period(plan, UNEVEN, staggered=True) == 3 * sum((16, 15, 10)) + 7


def test_tied_layers_wait_for_each_other():
    plan = regular_plan(1, split_evenly(2, 2), 2)
    rows = "0.0: F0.0 F0.1 B0.0 B0.1", "0.1: F0.0 I0.0 F0.1 I0.1 W0.0 W0.1"
    plan = dataclasses.replace(plan, orders=orders_of("\n".join(rows), Batch((2,))))
    costs = dataclasses.replace(unit_costs(2), weight=(1, 9), optimizer=(2, 0))
    assert steady_period(plan, costs, staggered=True) == 22, "the last stage is the slowest, and waits for nobody"
    assert steady_period(plan, costs, staggered=True, ties=((0, 1),)) == 25, "the first one's F waits for its gradient"
