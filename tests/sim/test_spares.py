"""Workers that nobody asked for, in virtual time: they take the places of the lost, and the result is the same."""

import os
import random
from functools import cache

import pytest

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Installed, Notice, Reattached, Synced
from holdfast.telemetry.report import report
from holdfast.testing.scenario import Delays, Pause, Scenario, VirtualResult
from holdfast.testing.virtual import VirtualCluster

GRID, STEPS = (2, 2, 2), 24
LAYERS_PER_STAGE = 2
SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
CHUNK = 20
SPARE, OTHER = WorkerId(7, 0), WorkerId(8, 3)
KILL = "kill:1.1@3:backward"


def run(*faults, grid=GRID, seed=0, steps=STEPS, **options) -> VirtualResult:
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(LAYERS_PER_STAGE * stages, stages), microbatches)
    parsed = [Fault.parse(text) for text in faults]
    return VirtualCluster(Scenario(plan=plan, steps=steps, seed=seed, faults=parsed, **options)).run()


@cache
def healthy(grid=GRID, steps=STEPS) -> VirtualResult:
    """The run in which nothing happens."""
    return run(grid=grid, steps=steps)


def survives(*faults, grid=GRID, steps=STEPS, also=(), **options) -> VirtualResult:
    """Everything fires, and nobody can tell from the result."""
    result = run(*faults, grid=grid, steps=steps, **options)
    assert result.outcome == "done", result.detail
    deaths = [f"kill-coordinator#{at}" for at, _ in options.get("coordinator_deaths", ())]
    assert sorted(result.fired) == sorted([*(str(Fault.parse(text)) for text in faults), *deaths, *also])
    assert result.digest == healthy(grid, steps).digest
    return result


def of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def in_plans(result):
    """Everyone who was in any generation."""
    return {worker for event in of(result, Installed) for worker in event.workers}


def test_where_nobody_dies_it_stays_out_of_everything_and_ends_in_order():
    result = survives(spares=[(0.1, SPARE)])
    assert [event.worker for event in of(result, Notice)] == ["7.0"]
    assert in_plans(result) == {str(worker) for worker in healthy().layers}
    assert (result.layers[SPARE], result.lost, result.generations) == ((), (), 1)


@pytest.mark.parametrize("comes_at", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_it_takes_the_place_of_a_lost_worker(comes_at, seed):
    """Whether it was there before, comes as the others recover, or afterwards."""
    result = survives(KILL, spares=[(comes_at, SPARE)], seed=seed)
    assert result.layers[SPARE] == healthy().layers[WorkerId(1, 1)]
    assert result.lost == (WorkerId(1, 1),)
    assert [event.worker for event in of(result, Synced)] == ["7.0"]
    assert [failure.worker for failure in report(result.events).failures] == ["1.1"]


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_workers_of_one_pipeline_die_at_any_effect_while_spares_are_there(start):
    """One pipeline only, so that every layer keeps an owner; each place is taken, unless the job ends before."""
    taken = 0
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        grid = (source.randint(2, 3), source.randint(1, 3), source.randint(1, 3))
        pipeline, most = source.randrange(grid[0]), min(healthy(grid).effects.values())
        victims = [WorkerId(pipeline, stage) for stage in range(grid[1]) if source.random() < 0.6]
        victims = victims or [WorkerId(pipeline, 0)]
        kills = [(victim, source.randint(10, most // 2)) for victim in victims]
        spares = [(source.uniform(0.0, 1.0), spare) for spare in (SPARE, OTHER)[: source.randint(1, 2)]]
        also = [f"kill:{victim}#{effect}" for victim, effect in kills]
        try:
            result = survives(grid=grid, seed=seed, kill_at_effect=kills, spares=spares, also=also)
            assert set(result.lost) == set(victims)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, grid {grid}, kills {kills}, spares {spares}")
            raise
        taken += any(result.layers[spare] for _, spare in spares)
    assert taken > CHUNK * 3 // 4


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_the_spare_dies_at_any_effect(start):
    """As it waits, enters or computes; then its place may be taken by the other one."""
    entered = taken = 0
    for seed in range(start, start + CHUNK):
        effect = random.Random(seed).randint(2, 120)
        options = {"kill_at_effect": [(SPARE, effect)], "spares": [(0.1, SPARE), (1.0, OTHER)]}
        try:
            result = survives(KILL, seed=seed, also=[f"kill:{SPARE}#{effect}"], **options)
            assert {event.worker for event in of(result, Detected)} == {"1.1", "7.0"}
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, effect {effect}")
            raise
        entered += "7.0" in in_plans(result)
        taken += bool(result.layers[OTHER])
    assert min(entered, taken) > CHUNK // 2


def test_a_spare_that_dies_while_it_waits_costs_nothing():
    result = survives(kill_at_effect=[(SPARE, 2)], spares=[(0.1, SPARE)], also=["kill:7.0#2"])
    assert [event.worker for event in of(result, Detected)] == ["7.0"]
    assert (result.generations, result.lost) == (1, (SPARE,))


def test_its_id_may_come_again():
    options = {"kill_at_effect": [(SPARE, 2)], "spares": [(0.1, SPARE), (1.0, SPARE)], "also": ["kill:7.0#2"]}
    result = survives(KILL, **options)
    assert result.layers[SPARE] == healthy().layers[WorkerId(1, 1)]


def test_a_lost_worker_whose_place_is_taken_comes_back_as_a_spare_and_takes_another():
    lost = WorkerId(1, 1)
    result = survives(KILL, "kill:0.0@12:forward", spares=[(0.1, SPARE), (1.5, lost)], steps=40)
    assert result.layers[SPARE] == healthy().layers[lost]
    assert result.layers[lost] == healthy().layers[WorkerId(0, 0)]
    assert result.lost == (WorkerId(0, 0),)


@pytest.mark.parametrize("strategy", ["checkpoint-restart", "snapshots"])
def test_no_process_is_started_where_a_spare_is_there(strategy):
    options = {"checkpoint_every": 4, "wait_for_replacement": 60.0, "snapshot_every": 4}
    result = survives(KILL, spares=[(0.1, SPARE)], strategy=strategy, **options)
    assert result.layers[SPARE] == healthy().layers[WorkerId(1, 1)]
    assert result.lost == (WorkerId(1, 1),), "nobody else came for it"


def test_while_all_wait_for_a_layer_it_brings_it():
    """Both owners are lost; the spare comes later, and all go back to the checkpoint with it."""
    faults = ["kill:0.1@5:forward", "kill:1.1@5:forward"]
    options = {"checkpoint_every": 2, "wait_for_replacement": 60.0, "spares": [(3.0, SPARE)]}
    result = survives(*faults, **options)
    assert result.layers[SPARE] == healthy().layers[WorkerId(1, 1)]


@pytest.mark.parametrize("seed", range(10))
def test_where_a_layer_has_lost_its_last_owner_it_is_used_rather_than_a_smaller_grid(seed):
    faults = ["kill:0.1@5:forward", "kill:1.1@5:forward"]
    result = survives(*faults, seed=seed, checkpoint_every=2, spares=[(0.1, SPARE), (0.2, OTHER)])
    assert {result.layers[SPARE], result.layers[OTHER]} == {healthy().layers[WorkerId(1, 1)]}
    assert not [event for event in of(result, Notice) if "shrinks" in event.text]


def test_where_the_whole_grid_is_lost_spares_go_on_alone():
    options = {"workers_per_node": 4, "checkpoint_every": 2, "spares": [(0.1, SPARE), (0.2, OTHER)]}
    result = survives("kill-node:0@5:forward", **options)
    assert sorted(result.layers) == [SPARE, OTHER]


def test_one_that_stops_while_it_waits_is_lost_and_nobody_recovers():
    pause = Pause(at=0.5, lasts_s=300.0, workers=(SPARE,))
    slow = {"delays": Delays(compute=(0.3, 0.9), start=(0.1, 0.3)), "steps": 24}
    result = survives(spares=[(0.1, SPARE)], pauses=[pause], also=[str(pause)], **slow)
    (lost,) = of(result, Detected)
    assert (lost.worker, lost.spare, result.generations) == ("7.0", True, 1)


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_the_coordinator_dies_while_a_spare_is_there(start):
    """It is stored, or attaches again; at whatever moment of its taking a place."""
    taken = reattached = 0
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        end = healthy().events[-1][0]
        deaths = [(source.uniform(0.0, end / 2), source.uniform(0.0, 0.3)), (source.uniform(0.6, 0.8) * end, 0.1)]
        spares = [(source.uniform(0.0, 1.0), SPARE)]
        try:
            result = survives(KILL, seed=seed, spares=spares, coordinator_deaths=deaths)
            assert result.lost in ((WorkerId(1, 1),), ())
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, deaths {deaths}, spares {spares}")
            raise
        taken += bool(result.layers[SPARE])
        reattached += bool(of(result, Reattached))
    assert min(taken, reattached) > CHUNK * 3 // 4


@pytest.mark.parametrize("point", ["copy", "start", "forward", "commit"])
@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_another_worker_is_lost_while_it_enters(kind, point):
    struck = 0
    for step in range(4, 8):
        faults = [KILL, f"{kind}:0.1@{step}:{point}"]
        result = run(*faults, grid=(3, 2, 2), seed=step, spares=[(0.1, SPARE), (0.2, OTHER)])
        assert (result.outcome, result.digest) == ("done", healthy((3, 2, 2)).digest), result.detail
        assert KILL in result.fired
        struck += faults[1] in result.fired
    assert struck


def test_told_to_end_with_a_spare_there():
    result = run(spares=[(0.1, SPARE)], preempted_at=1.0, checkpoint_every=4)
    assert result.outcome == "preempted"
    assert result.lost == ()


def test_one_seed_is_one_history():
    options = {"spares": [(0.1, SPARE)], "coordinator_deaths": [(0.8, 0.2)], "seed": 5}
    assert run(KILL, **options) == run(KILL, **options)
