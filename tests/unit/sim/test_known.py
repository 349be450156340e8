"""Plans of a job's library in simulations: who is left changes places, so that losses are where they cost least."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.unit.sim.test_engine import COSTS, LAYERS, SPEEDS, comes, job, lost, of, world

from holdfast.core.placement import split_evenly
from holdfast.core.slots import slots_of
from holdfast.planning.library import PlanLibrary
from holdfast.planning.planner import Technique
from holdfast.planning.training import Terms, grid_of_slots, looked_up, planned_grid, regular_grid
from holdfast.sim.engine import simulate
from holdfast.telemetry.events import Installed, Migrating

TERMS = Terms(technique=Technique.STAGGERED, costs=COSTS, in_flight=4, copy_s=(0.3,) * LAYERS, crossing_s=0.01)
PLAN = planned_grid(regular_grid(4, split_evenly(LAYERS, 2), 4, TERMS), (), TERMS, at_once=True).plan
MACHINES = len(PLAN.workers)
FIRST_STAGES = [index for index, worker in enumerate(PLAN.workers) if worker.stage == 0]


def with_library(library):
    made = job(checkpoint_every=0, terms=TERMS, staggered=True)
    return replace(made, plan=PLAN, library=library)


def two_of_one_stage(**more):
    return world(lost(100.0, FIRST_STAGES[0]), lost(200.0, FIRST_STAGES[1]), machines=MACHINES, **more)


def test_a_worker_takes_the_place_of_a_lost_one_and_steps_are_as_short_as_the_librarys():
    library = PlanLibrary(None)
    without, outcome = (simulate(with_library(each), two_of_one_stage(), SPEEDS) for each in (None, library))
    ((at, _),) = of(outcome, Migrating)
    assert at > 200.0
    assert not of(without, Migrating)
    assert [event.strategy for _, event in of(outcome, Installed)].count("boundary") >= 2, "meanwhile, and afterwards"
    assert outcome.steps > without.steps
    assert outcome.rates[-1][1] < without.rates[-1][1]
    gone = frozenset(PLAN.workers[index] for index in FIRST_STAGES[:2])
    found = library.find(grid_of_slots(slots_of(PLAN), TERMS), 2, Technique.STAGGERED)
    assert found.failures_per_stage == (1, 1)
    assert looked_up(library, PLAN, gone, TERMS) is None, "it has none for two of one stage"


def test_every_second_has_its_part_and_runs_share_the_library():
    library = PlanLibrary(None)
    happens = two_of_one_stage(hours=0.5)
    first, again = (simulate(with_library(library), happens, SPEEDS) for _ in range(2))
    assert first == again
    assert math.fsum(first.parts.values()) == pytest.approx(first.seconds)


def test_who_comes_ends_what_was_proposed():
    happens = world(
        lost(100.0, FIRST_STAGES[0]),
        lost(200.0, FIRST_STAGES[1]),
        comes(200.5, MACHINES),
        comes(200.5, MACHINES + 1),
        machines=MACHINES,
    )
    outcome = simulate(with_library(PlanLibrary(None)), happens, SPEEDS)
    assert outcome.rates[-1][1] == pytest.approx(outcome.healthy_s)
