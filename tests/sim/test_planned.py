"""The planner's plans in jobs that lose, regain and shed workers, in virtual time: bits stay, and plans are its.

The other tests here run with staggered plans, too; see conftest.py.
"""

from __future__ import annotations

import os
import random
from functools import cache

import pytest

from holdfast.core.builders import regular_plan
from holdfast.core.faults import Fault
from holdfast.core.placement import split_evenly
from holdfast.planning.planner import Technique
from holdfast.telemetry.events import Installed, Notice, StepOps
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "20"))
GRID, STEPS = (3, 3, 3), 10
POINTS = ["start", "forward", "backward", "reduce", "update", "commit"]
PLANNED = [Technique.DECOUPLED, Technique.STAGGERED]


def run(*faults, technique, seed=0, grid=GRID, **options):
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(2 * stages, stages), microbatches)
    options = {"steps": STEPS, "staggered": technique is Technique.STAGGERED, **options}
    parsed = [Fault.parse(text) for text in faults]
    return VirtualCluster(
        plan, microbatches=microbatches, seed=seed, faults=parsed, technique=technique, **options
    ).run()


@cache
def coupled(grid=GRID, steps=STEPS):
    """The bits of the run with 1F1B in which nothing fails."""
    return run(technique=None, grid=grid, steps=steps).digest


def check(result, *faults, grid=GRID, steps=STEPS):
    assert result.outcome == "done", result.detail
    assert sorted(result.fired) == sorted(str(Fault.parse(text)) for text in faults)
    assert result.digest == coupled(grid, steps)


def kinds(result, generation):
    """The kinds of operations that were run in a generation."""
    ran = (event for _, event in result.events if isinstance(event, StepOps) and event.generation == generation)
    return {kind for event in ran for kind, *_ in event.ops}


def last_generation(result):
    return max(event.generation for _, event in result.events if isinstance(event, Installed))


def notices(result):
    return [event.text for _, event in result.events if isinstance(event, Notice)]


@pytest.mark.parametrize("technique", PLANNED)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_two_deaths_anywhere(seed, technique):
    draw = random.Random(seed)
    first, second = draw.sample([f"{p}.{s}" for p in range(3) for s in range(3)], 2)
    faults = [
        f"kill:{first}@{draw.randrange(1, 5)}:{draw.choice(POINTS)}",
        f"kill:{second}@{draw.randrange(5, STEPS)}:{draw.choice(POINTS)}",
    ]
    result = run(*faults, technique=technique, seed=seed)
    check(result, *faults)
    assert {"I", "W"} <= kinds(result, 1)
    assert {"I", "W"} <= kinds(result, last_generation(result)), "the answers to losses are the planner's, too"
    assert notices(result) == []


@pytest.mark.parametrize("technique", PLANNED)
@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_one_comes_back_and_another_leaves(seed, technique):
    faults = ["kill:1.1@2:backward", "join:1.1@4", "leave:0.2@12"]
    result = run(*faults, technique=technique, seed=seed, steps=25)
    check(result, *faults, steps=25)
    assert {"I", "W"} <= kinds(result, last_generation(result))


@pytest.mark.parametrize("technique", PLANNED)
@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_a_grid_that_shrinks_is_planned_anew(seed, technique):
    grid, faults = (2, 3, 3), ["kill:0.1@4:forward", "kill:1.1@5:backward", "kill:0.0@8:forward"]
    result = run(*faults, technique=technique, seed=seed, grid=grid, checkpoint_every=3)
    check(result, *faults, grid=grid)
    strategies = [event.strategy for _, event in result.events if isinstance(event, Installed)]
    assert "fallback" in strategies


def test_a_grid_that_the_planner_does_not_know_goes_on_and_says_so():
    """Six workers become three pipelines, which eight micro-batches cannot be shared out to evenly."""
    grid, faults = (2, 4, 4), ["kill:0.1@4:forward", "kill:1.1@5:backward", "kill:0.0@8:forward"]
    result = run(*faults, technique=Technique.DECOUPLED, grid=grid, checkpoint_every=3)
    assert result.outcome == "done", result.detail
    assert result.digest == run(technique=None, grid=grid).digest
    assert any("not regular" in text for text in notices(result))
