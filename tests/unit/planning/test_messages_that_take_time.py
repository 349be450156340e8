"""Messages that take a little time must not make a plan much longer than messages that take none."""

from __future__ import annotations

import random
import statistics
from math import inf

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.planning import planner, search
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.planner import Technique, make_plan
from holdfast.schedule.evaluate import evaluate


def planned(stages, pipelines, microbatches, failed, tries, **costs):
    grid = CostedGrid(
        pipelines=pipelines,
        stages=split_evenly(stages, stages),
        microbatches=microbatches,
        costs=parse_costs(stages, **costs),
    )
    return make_plan(grid, failed, Technique.STAGGERED, time_limit_s=inf, tries=tries)


def test_uneven_costs_with_messages_reach_the_bound():
    """240 was found in 30 s without looking at instant messages."""
    found = planned(4, 3, 6, (), 100, costs="10,11,8", comm="1", optimizer="5", memory="2,1,1,8")
    assert found.found.period == found.bound.period == 230


@pytest.mark.parametrize("technique", [Technique.ADAPTIVE, Technique.DECOUPLED])
def test_the_largest_grids_get_times_that_count_messages(technique, monkeypatch):
    monkeypatch.setattr(search, "_LARGE", 10)
    costs = parse_costs(2, costs="1.037,1.11,0.83", comm="0.013")
    grid = CostedGrid(pipelines=2, stages=split_evenly(2, 2), microbatches=3, costs=costs)
    monkeypatch.setattr(planner, "_SMALL", 0)
    monkeypatch.setattr(planner, "_AT_ONCE", 0)
    found = make_plan(grid, [WorkerId(0, 1)], technique, time_limit_s=inf, tries=1)
    assert found.found.makespan == pytest.approx(evaluate(found.plan, costs).makespan, rel=1e-12)


def test_a_dozen_schedules_are_no_worse_than_without_instant_messages(monkeypatch):
    """Over some seeds: those that come first are such that the dozen covers most."""
    ratios = []
    for seed in range(12):
        rng = random.Random(seed)
        stages, pipelines = rng.randint(3, 6), rng.randint(2, 4)
        costs = {"costs": "10,11,8", "comm": str(rng.choice([0.5, 1])), "optimizer": "3"}
        lost = [WorkerId(rng.randrange(pipelines - 1), rng.randrange(stages))]
        found = planned(stages, pipelines, 2 * stages, lost, 12, **costs).found.period
        with monkeypatch.context() as patch:
            patch.setattr(search, "_WITH_MESSAGES", ())
            ratios.append(found / planned(stages, pipelines, 2 * stages, lost, 12, **costs).found.period)
    assert statistics.mean(ratios) <= 1


@pytest.mark.parametrize("lost", [(WorkerId(1, 2),), (WorkerId(1, 2), WorkerId(2, 3))])
def test_a_hundredth_more_is_not_worth_two_operations(lost):
    """On 4 x 6 a message of a hundredth of an operation lengthened the step by two or three of them."""
    instant, real = (planned(6, 4, 12, lost, 12, memory="2,1,1,12", comm=comm).found.period for comm in ("0", "0.01"))
    assert instant <= real < instant + 0.5
