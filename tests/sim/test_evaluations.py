"""Evaluations while workers and coordinators die: each is told whole, with the scores of the run without failures."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from holdfast.core.evaluation import Evaluating
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Evaluated, Parted
from holdfast.testing.scenario import Scenario, VirtualResult
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "30"))
STEPS = 5
EVALUATING = Evaluating(every=2, microbatches=5)
STEPS_EVALUATED = {2, 4, 5}
GRIDS = [(2, 3, 2), (3, 2, 2), (2, 1, 3), (3, 3, 1)]
FIRST_EFFECT_AFTER_INSTALL = 4


def run(grid, seed=0, steps=STEPS, **options) -> VirtualResult:
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(stages + 1, stages), microbatches)
    return VirtualCluster(Scenario(plan=plan, steps=steps, seed=seed, **options)).run()


def evaluated(grid, seed=0, **options) -> VirtualResult:
    return run(grid, seed, evaluating=EVALUATING, **options)


def scores(result: VirtualResult, *, whole=True) -> dict[int, dict]:
    """Of each step, what was told last; all of it by all micro-batches, or only what is ``whole``."""
    told = {event.step: event for _, event in result.events if isinstance(event, Evaluated)}
    assert all(event.of == 5 for event in told.values())
    assert STEPS in told or result.outcome != "done", "at the end it is said what is missing"
    if whole:
        assert all(event.microbatches == 5 for event in told.values())
    return {step: dict(event.scores) for step, event in told.items() if event.microbatches == 5}


def check(result: VirtualResult, grid, *, whole=True) -> None:
    pipelines, stages, _ = grid
    if any(all(WorkerId(p, s) in result.lost for p in range(pipelines)) for s in range(stages)):
        assert result.outcome == "lost", result.detail
        return
    assert result.outcome == "done", result.detail
    assert result.digest == run(grid).digest
    found, expected = scores(result, whole=whole), scores(evaluated(grid))
    assert found == {step: expected[step] for step in (expected if whole else found)}


@pytest.mark.parametrize("grid", GRIDS)
def test_training_has_the_bits_that_it_has_without(grid, staggered):
    plain, found = run(grid), evaluated(grid)
    assert found.outcome == plain.outcome == "done"
    assert found.digest == plain.digest
    assert scores(found).keys() == STEPS_EVALUATED
    assert len({each["loss"] for each in scores(found).values()}) == 3, "each is of other weights"


def test_scores_are_the_same_on_any_grid():
    plans = [regular_plan(pipelines, split_evenly(3, stages), 6 // pipelines) for pipelines, stages in ((1, 1), (2, 3))]
    found = [VirtualCluster(Scenario(plan=plan, steps=STEPS, evaluating=EVALUATING)).run() for plan in plans]
    assert found[0].digest == found[1].digest
    assert scores(found[0]) == scores(found[1])


@pytest.mark.parametrize("worker", [WorkerId(0, 0), WorkerId(1, 1), WorkerId(0, 2)])
def test_a_worker_dies_at_each_of_its_effects(worker):
    grid = (2, 3, 2)
    for effect in itertools.count(FIRST_EFFECT_AFTER_INSTALL):
        result = evaluated(grid, seed=effect, kill_at_effect=[(worker, effect)])
        check(result, grid)
        if not result.fired:
            break
    assert effect > 80


@pytest.mark.parametrize("step", sorted(STEPS_EVALUATED))
@pytest.mark.parametrize("worker", ["0.0", "1.1", "0.2"])
def test_a_worker_dies_half_way_through_an_evaluation(worker, step):
    grid = (2, 3, 2)
    fault = Fault.parse(f"kill:{worker}@{step}:evaluate")
    result = evaluated(grid, seed=3, faults=[fault])
    assert result.fired == (str(fault),)
    check(result, grid)


def random_kills(source, grid, staggered):
    workers = [WorkerId(p, s) for p in range(grid[0]) for s in range(grid[1])]
    yielded = evaluated(grid).effects
    victims = source.sample(workers, source.randint(0, max(1, len(workers) // 2)))
    return [(worker, source.randint(FIRST_EFFECT_AFTER_INSTALL, yielded[worker])) for worker in victims]


@pytest.mark.parametrize("start", range(0, SEEDS, 10))
def test_workers_and_coordinators_die_at_any_time(start, staggered):
    """What a worker and whoever has heard of it take with them both, is said to be missing."""
    for seed in range(start, min(start + 10, SEEDS)):
        source = random.Random(seed)
        grid = source.choice(GRIDS)
        kills = random_kills(source, grid, staggered)
        end = evaluated(grid).events[-1][0]
        deaths = [(source.uniform(0.0, 0.9 * end), source.uniform(0.0, 0.4)) for _ in range(source.randint(0, 1))]
        try:
            result = evaluated(grid, seed, kill_at_effect=kills, coordinator_deaths=deaths)
            check(result, grid, whole=not (kills and deaths))
        except BaseException as error:
            told = f"seed {seed}, grid {grid}, kills {[(str(w), n) for w, n in kills]}, coordinator {deaths}"
            error.add_note(f"repeat: {told}")
            raise


def test_workers_leave_and_come_while_it_is_evaluated():
    grid = (3, 2, 2)
    faults = [Fault.parse(text) for text in ("kill:1.1@1:backward", "join:1.1@2", "leave:0.0@2:evaluate")]
    result = evaluated(grid, seed=2, faults=faults)
    check(result, grid)
    assert any(isinstance(event, Parted | Detected) for _, event in result.events)
    assert set(result.fired) == set(map(str, faults))


@pytest.mark.parametrize("seed", range(4))
def test_whoever_goes_back_to_a_checkpoint_evaluates_again(seed):
    """All workers of a stage die behind an evaluation; others come, and all load a checkpoint of before."""
    grid = (2, 2, 2)
    faults = [Fault.parse(text) for text in ("kill:0.1@4:backward", "kill:1.1@4:backward", "join:0.1@4", "join:1.1@4")]
    result = evaluated(grid, seed, faults=faults, checkpoint_every=1, wait_for_replacement=60.0)
    assert result.outcome == "done", result.detail
    assert scores(result) == scores(evaluated(grid))
    assert result.digest == run(grid).digest


@pytest.mark.parametrize("part", range(3))
def test_the_coordinator_dies_as_scores_are_on_their_way(part):
    """What it was told is told again to its successor."""
    grid = (2, 3, 2)
    times = [time for time, event in evaluated(grid).events if isinstance(event, Evaluated)]
    for at in (times[part] - 0.001 * tenth for tenth in range(30)):
        result = evaluated(grid, coordinator_deaths=[(at, 0.3)])
        assert result.fired, at
        check(result, grid)


@pytest.mark.parametrize("strategy", ["lossy-forward", "skip", "rollback"])
@pytest.mark.parametrize("point", ["evaluate", "start", "backward", "reduce", "commit"])
def test_lossy_strategies_evaluate_what_there_is(strategy, point):
    """Behind a loss the state may be another one, and there may be a step more."""
    fault = Fault.parse(f"kill:1.0@2:{point}")
    result = evaluated((4, 1, 2), seed=1, faults=[fault], strategy=strategy)
    assert result.outcome == "done", result.detail
    assert result.fired == (str(fault),)
    told = {event.step: event for _, event in result.events if isinstance(event, Evaluated)}
    assert {2, 4} <= told.keys()
    assert result.step in told
    assert all(event.microbatches == event.of for event in told.values())


def test_an_evaluation_is_interrupted_again_and_again():
    """Each time one dies half-way through what is left of it."""
    grid = (4, 2, 1)
    faults = [Fault.parse(f"kill:{worker}@2:evaluate") for worker in ("0.1", "1.0", "2.1")]
    result = evaluated(grid, seed=4, faults=faults)
    check(result, grid)
    assert "kill:0.1@2:evaluate" in result.fired
    assert len(result.fired) >= 2


@pytest.mark.parametrize("seed", range(6))
def test_the_best_state_is_the_same_whoever_dies(seed):
    """Also of those that evaluate again what they have gone back to, and of whoever leads next."""
    grid, source = (2, 2, 2), random.Random(seed)
    options = {"evaluating": Evaluating(every=1, microbatches=5, best="loss"), "checkpoint_every": 1}
    healthy = run(grid, **options)
    faults = [Fault.parse(text) for text in ("kill:0.1@4:backward", "kill:1.1@4:backward", "join:0.1@4", "join:1.1@4")]
    deaths = [(source.uniform(0.0, healthy.events[-1][0]), 0.2)] if seed % 2 else []
    result = run(grid, seed, faults=faults, wait_for_replacement=60.0, coordinator_deaths=deaths, **options)
    assert result.outcome == "done", result.detail
    assert set(map(str, faults)) <= set(result.fired)
    assert best_of(result) == best_of(healthy)
    assert best_of(healthy) in range(1, STEPS + 1)


def best_of(result: VirtualResult) -> int:
    return [event.step for _, event in result.events if isinstance(event, Evaluated) and event.best][-1]


PATIENCE = Evaluating(every=2, microbatches=5, best="loss", patience=2)


def patient(grid, seed=0, evaluating=PATIENCE, **options) -> VirtualResult:
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(stages + 1, stages), microbatches)
    options = {"steps": 30, "checkpoint_every": evaluating.every, **options}
    return VirtualCluster(Scenario(plan=plan, seed=seed, evaluating=evaluating, **options)).run()


def course(result: VirtualResult) -> tuple:
    """Where a job has ended, with which bits, and what each evaluation came to."""
    assert result.outcome == "done", result.detail
    told = {event.step: event for _, event in result.events if isinstance(event, Evaluated)}
    assert all(event.microbatches == event.of for event in told.values())
    return result.step, result.digest, {step: (event.scores, event.best) for step, event in told.items()}


@pytest.mark.parametrize(("every", "patience"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)])
def test_a_job_ends_where_the_next_evaluation_is_due_once_patience_is_out(every, patience, staggered):
    evaluating = Evaluating(every=every, microbatches=5, best="loss", patience=patience)
    step, digest, told = course(patient((2, 2, 2), evaluating=evaluating))
    whole = patient((2, 2, 2), evaluating=Evaluating(every=every, microbatches=5, best="loss"))
    found = course(whole)[2]
    best, ends = 0, 0
    for at in range(every, 31, every):
        best = at if found[at][1] else best
        if (at - best) // every >= patience:
            ends = at + every
            break
    assert step == ends < 30
    assert told == {at: each for at, each in found.items() if at <= ends}
    assert digest == run((2, 2, 2), steps=ends).digest


@pytest.mark.parametrize("worker", [WorkerId(0, 0), WorkerId(1, 1)])
def test_it_ends_there_whoever_dies_at_each_of_its_effects(worker):
    grid, healthy = (2, 2, 2), course(patient((2, 2, 2)))
    for effect in itertools.count(FIRST_EFFECT_AFTER_INSTALL):
        result = patient(grid, seed=effect, kill_at_effect=[(worker, effect)])
        assert course(result) == healthy
        if not result.fired:
            break
    assert effect > 50


@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_ends_there_whoever_dies_comes_and_leads(seed):
    source, grid = random.Random(seed), (3, 2, 2)
    healthy = patient(grid)
    last = healthy.step
    faults = [
        f"kill:{source.randrange(3)}.{source.randrange(2)}@{source.randrange(last)}:{point}" for point in POINTS[:2]
    ]
    faults += [f"join:{each.split('@')[0][5:]}@{source.randrange(last)}" for each in faults]
    deaths = [(source.uniform(0.0, healthy.events[-1][0]), 0.2) for _ in range(seed % 3)]
    result = patient(grid, seed, faults=[Fault.parse(text) for text in faults], coordinator_deaths=deaths)
    if result.outcome != "lost":
        assert course(result)[:2] == course(healthy)[:2]


POINTS = ("evaluate", "backward")
