"""Whether changing places pays: proposals are right, and the gain is that of stepping through the time."""

from dataclasses import replace

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.core.slots import exchanged, slots_of
from holdfast.core.validate import validate
from holdfast.planning.library import PlanLibrary
from holdfast.planning.migration import Migration, proposed
from holdfast.planning.planner import Technique
from holdfast.planning.training import Rerouted, Terms, looked_up, planned_grid, regular_grid, rerouted

TERMS = Terms(technique=Technique.STAGGERED, costs=unit_costs(4), in_flight=8, copy_s=(1.0, 2.0, 3.0, 4.0))
STAGES = split_evenly(4, 4)
PLAN = planned_grid(regular_grid(3, STAGES, 6, TERMS), (), TERMS, at_once=False).plan
ONE_STAGE = (WorkerId(0, 1), WorkerId(1, 1))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = PlanLibrary(tmp_path_factory.mktemp("library"))
    while library.step(regular_grid(3, STAGES, 6, TERMS), 2, TERMS.technique, time_limit_s=0.05) is not None:
        pass
    return library


def test_two_losses_of_one_stage_are_shared_out_to_others(library):
    found = proposed(library, PLAN, ONE_STAGE, TERMS, 54.0)
    migrating, places = map(set, zip(*found.moves, strict=True))
    assert places <= set(ONE_STAGE)
    assert not {worker for worker in migrating if worker.stage == 1}
    assert found.baseline == exchanged(PLAN, found.moves)
    assert slots_of(found.baseline) is not None
    assert found.copy_s == TERMS.copy_s[1] * len(migrating), "each gets the layer of the stage that it comes to"
    assert found.before_s == 54.0
    assert found.after_s < 40, "nowhere has a worker to do the work of three any more"
    assert found.after_s == looked_up(library, found.baseline, ONE_STAGE, TERMS).period, "the library's plan fits then"
    assert found.afterwards == looked_up(library, found.baseline, ONE_STAGE, TERMS)
    assert not migrating & set(found.meanwhile.plan.workers)
    validate(found.meanwhile.plan)


@pytest.mark.parametrize(
    ("lost", "terms"),
    [
        ((), TERMS),
        (ONE_STAGE, replace(TERMS, copy_s=())),
        ((*ONE_STAGE, WorkerId(0, 2)), TERMS),
    ],
    ids=["nobody is lost", "what copying takes is not known", "the library has no plan for so many"],
)
def test_nobody_moves(library, lost, terms):
    assert proposed(library, PLAN, lost, terms, 54.0) is None


def test_nobody_moves_when_failures_are_where_they_cost_least(library):
    there = library.find(regular_grid(3, STAGES, 6, TERMS), 2, TERMS.technique).failures_per_stage
    lost = [WorkerId(pipeline, stage) for stage, count in enumerate(there) for pipeline in range(count)]
    assert proposed(library, PLAN, lost, TERMS, 54.0) is None


@pytest.mark.parametrize("before_s", [0.0, 27.0, 27.2])
def test_nobody_moves_for_steps_that_are_hardly_shorter(library, before_s):
    assert proposed(library, PLAN, ONE_STAGE, TERMS, before_s) is None


def test_nobody_leaves_a_layer_to_one_worker(tmp_path):
    """In a grid of two pipelines, whoever moves leaves one behind, whose death would lose the layer."""
    plan = planned_grid(regular_grid(2, STAGES, 6, TERMS), (), TERMS, at_once=False).plan
    library, grid = PlanLibrary(tmp_path), regular_grid(2, STAGES, 6, TERMS)
    while library.step(grid, 1, TERMS.technique, time_limit_s=0.05) is not None:
        pass
    assert library.find(grid, 1, TERMS.technique) is not None
    assert all(proposed(library, plan, [lost], TERMS, 99.0) is None for lost in plan.workers)


def migration(before_s=2.0, during_s=4.0, after_s=1.0, copy_s=10.0):
    meanwhile = replace(rerouted(PLAN, ONE_STAGE, TERMS), period=during_s)
    afterwards = replace(meanwhile, period=after_s)
    return Migration(
        moves=(),
        baseline=PLAN,
        meanwhile=meanwhile,
        afterwards=afterwards,
        before_s=before_s,
        copy_s=copy_s,
    )


def test_the_gain_is_counted_in_steps():
    copying = 10.0 + 2 * 4.0
    done = copying / 4.0 + (100 - copying - 2 * 0.5) / 1.0
    assert replace(migration(), crossing_s=0.5).steps_gained(100.0) == pytest.approx(done - 50.0)


def test_a_failure_that_comes_before_they_are_there_makes_it_a_loss():
    assert migration().steps_gained(12.0) == pytest.approx(12 / 4 - 12 / 2)
    assert migration(before_s=2.0, after_s=2.0).steps_gained(1e6) < 0, "nothing is ever gained without shorter steps"


def test_the_later_the_next_failure_the_more_is_gained():
    gains = [migration().steps_gained(float(s)) for s in range(0, 200, 5)]
    late = [gain for gain in gains if gain > 0]
    assert gains[1] < 0 < gains[-1]
    assert late == sorted(late)


def test_periods_that_nobody_predicted_are_taken_for_unchanged():
    unknown = replace(migration(), meanwhile=Rerouted(plan=PLAN))
    assert replace(migration(), meanwhile=replace(unknown.meanwhile, period=1.9)).steps_gained(10.0) <= 0, "no faster"
    assert unknown.steps_gained(10.0) == pytest.approx(0.0)
