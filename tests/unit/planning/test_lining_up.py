"""Failures of several stages come to be in few pipelines, and nobody gets other layers for it."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.core.validate import validate
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.lining_up import lined_up
from holdfast.planning.planner import Technique, make_plan

GRID = CostedGrid(pipelines=3, stages=split_evenly(4, 4), microbatches=6, costs=parse_costs(4, memory="2,1,1,8"))
SCATTERED = [WorkerId(0, 1), WorkerId(1, 2), WorkerId(2, 3)]


def workers(*names):
    return frozenset(WorkerId.parse(name) for name in names)


@pytest.mark.parametrize(
    ("failed", "lined"),
    [
        (workers("0.1", "1.2", "2.3"), workers("0.1", "0.2", "0.3")),
        (workers("1.2"), workers("1.2")),
        (workers("1.2", "0.3", "1.0"), workers("1.2", "1.3", "1.0")),
        (workers("0.1", "1.1", "2.0"), workers("0.1", "1.1", "0.0")),
        (workers("2.0", "2.1", "2.2", "2.3"), workers("2.0", "2.1", "2.2", "2.3")),
        (frozenset(), frozenset()),
    ],
)
def test_the_pipeline_that_lost_most_takes_the_failures_of_others(failed, lined):
    assert lined_up(failed, 4) == lined
    assert lined_up(lined, 4) == lined
    assert Counter(worker.stage for worker in lined) == Counter(worker.stage for worker in failed)


def test_scattered_failures_cost_no_more_than_those_of_one_pipeline():
    made = make_plan(GRID, SCATTERED, Technique.STAGGERED, time_limit_s=inf, tries=200)
    lined = make_plan(GRID, lined_up(SCATTERED, 4), Technique.STAGGERED, time_limit_s=inf, tries=200)
    assert made.found == lined.found
    home = make_plan(GRID, SCATTERED, Technique.STAGGERED, time_limit_s=inf, tries=200, keep_home=True)
    assert made.found.period < home.found.period
    validate(made.plan, costs=GRID.costs)
    assert set(made.plan.workers) == set(GRID_WORKERS) - set(SCATTERED)
    assert all(visit.layers.start == visit.worker.stage for route in made.plan.routes.routes for visit in route.visits)


GRID_WORKERS = [WorkerId(pipeline, stage) for pipeline in range(3) for stage in range(4)]


def test_who_keeps_home_runs_its_own_micro_batches():
    plan = make_plan(GRID, SCATTERED, Technique.STAGGERED, time_limit_s=0, keep_home=True).plan
    validate(plan, costs=GRID.costs)
    for route in plan.routes.routes:
        for worker in route.workers:
            home = WorkerId(route.microbatch.pipeline, worker.stage)
            assert worker == home or home in SCATTERED
