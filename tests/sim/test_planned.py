"""The planner's plans in jobs that lose, regain and shed workers, in virtual time: bits stay, and plans are its.

The other tests here run with staggered plans, too; see conftest.py.
"""

from __future__ import annotations

import itertools
import os
import random
from functools import cache

import pytest

from holdfast.core.faults import Fault
from holdfast.core.placement import split_evenly
from holdfast.planning.planner import Technique
from holdfast.planning.training import Rerouted, rerouted
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.telemetry.events import Agreed, Installed, Notice, PlanImproved, StepOps
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "20")) // 5
GRID, STEPS = (3, 3, 3), 10
POINTS = ["start", "forward", "backward", "reduce", "update", "commit"]
PLANNED = [Technique.DECOUPLED, Technique.STAGGERED]


@pytest.fixture(autouse=True)
def staggered():
    """These tests say themselves by what technique they plan: once is enough."""


def run(*faults, technique, seed=0, grid=GRID, **options):
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(2 * stages, stages), microbatches)
    options = {"steps": STEPS, "staggered": technique is Technique.STAGGERED, **options}
    parsed = [Fault.parse(text) for text in faults]
    return VirtualCluster(Scenario(plan=plan, seed=seed, faults=parsed, technique=technique, **options)).run()


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
    """The last one in which anything was run: one that begins behind the last step runs nothing."""
    return max(event.generation for _, event in result.events if isinstance(event, StepOps))


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


def test_a_grid_that_is_not_regular_is_planned_too():
    """Six workers become three pipelines, which eight micro-batches cannot be shared out to evenly."""
    grid, faults = (2, 4, 4), ["kill:0.1@4:forward", "kill:1.1@5:backward", "kill:0.0@8:forward"]
    result = run(*faults, technique=Technique.DECOUPLED, grid=grid, checkpoint_every=3)
    check(result, *faults, grid=grid)
    assert "fallback" in [event.strategy for _, event in result.events if isinstance(event, Installed)]
    assert {"I", "W"} <= kinds(result, last_generation(result))


class Alternating:
    """Offers now 1F1B's and now the planner's plan for who is here, each as if it were better than the one before."""

    def __init__(self, every=1):
        self._asked, self._every = itertools.count(1), every

    def __call__(self, state):
        asked = next(self._asked)
        if state.running.period is None or asked % self._every or state.rules.terms is None:
            return None
        plan = adaptive_plan(state.grid.baseline, state.absent)
        if plan == state.running.plan:
            plan = rerouted(state.grid.baseline, state.absent, state.rules.terms).plan
        return Rerouted(plan=plan, period=state.running.period * 0.9)


@pytest.mark.parametrize("technique", PLANNED)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_plans_are_swapped_under_load(seed, technique):
    """While workers die, come and leave; and no worker runs any step twice because of a swap."""
    draw = random.Random(seed)
    faults = [f"kill:1.1@2:{draw.choice(POINTS)}"]
    faults += draw.sample([f"kill:0.2@{draw.randrange(8, 14)}:forward", "join:1.1@6", "leave:2.0@10"], seed % 3)
    result = run(*faults, technique=technique, seed=seed, steps=25, better=Alternating(1 + seed % 2))
    check(result, *faults, steps=25)
    swaps = [event for _, event in result.events if isinstance(event, PlanImproved)]
    assert swaps
    if seed % 3 == 0:
        assert len([event for _, event in result.events if isinstance(event, Agreed)]) == 2, "swaps abort nothing"
