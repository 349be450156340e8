"""Workers hang, leave, come and die in whole nodes, in virtual time: the result is that of the run without."""

from __future__ import annotations

import itertools
import os
import random
from functools import cache

import pytest

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import (
    Agreed,
    CoordinatorLost,
    Detected,
    FaultInjected,
    Installed,
    Parted,
    Reattached,
    StepOps,
    Synced,
)
from holdfast.telemetry.report import report
from holdfast.testing.scenario import Delays, Scenario
from holdfast.testing.virtual import VirtualCluster

LAYERS_PER_STAGE = 2
STEPS = 12
SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
POINTS = ["start", "forward", "backward", "reduce", "update", "commit"]


def run(grid, *faults, seed=0, steps=STEPS, **options):
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(LAYERS_PER_STAGE * stages, stages), microbatches)
    parsed = [Fault.parse(text) for text in faults]
    cluster = VirtualCluster(Scenario(plan=plan, steps=steps, seed=seed, faults=parsed, **options))
    return cluster.run()


@cache
def healthy(grid, steps):
    """The run in which nothing happens."""
    return run(grid, steps=steps)


def survives(grid, *faults, seed=0, steps=STEPS, **options):
    """Everything fires, and nobody can tell from the result."""
    result = run(grid, *faults, seed=seed, steps=steps, **options)
    assert result.outcome == "done", result.detail
    deaths = [f"kill-coordinator#{at}" for at, _ in options.get("coordinator_deaths", ())]
    assert sorted(result.fired) == sorted([*(str(Fault.parse(text)) for text in faults), *deaths])
    assert result.digest == healthy(grid, steps).digest
    return result


def of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


@pytest.mark.parametrize("point", POINTS)
def test_a_leave_notice_costs_nothing(point):
    result = survives((3, 3, 3), f"leave:1.1@3:{point}")
    assert [event.worker for event in of(result, Parted)] == ["1.1"]
    assert result.generations == 2
    assert len(of(result, Agreed)) == 1, "only the first generation had to agree on a state"
    assert report(result.events).failures == ()
    per_step = {(event.worker, event.step) for event in of(result, StepOps)}
    assert len(per_step) == len(of(result, StepOps)), "no worker ran any step twice"


def test_two_leave_at_once():
    result = survives((3, 2, 3), "leave:0.0@3:forward", "leave:1.1@3:backward")
    assert sorted(event.worker for event in of(result, Parted)) == ["0.0", "1.1"]
    assert report(result.events).failures == ()


def test_the_last_owner_stays_although_it_was_told_to_leave():
    result = survives((1, 2, 3), "leave:0.1@3")
    assert of(result, Parted) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_worker_comes_back(seed):
    result = survives((3, 3, 3), "kill:1.1@2:backward", "join:1.1@4", seed=seed, steps=25)
    last = of(result, StepOps)[-9:]
    assert {event.worker for event in last} >= {"1.1"}
    assert next(event.ops for event in reversed(of(result, StepOps)) if event.worker == "1.1"), "it computes again"
    assert result.lost == ()
    (synced,) = of(result, Synced)
    assert synced.worker == "1.1"
    assert 4 < synced.entered < synced.step < 25
    assert synced.bytes > 0


def test_a_new_worker_takes_the_place_that_needs_it_most():
    faults = ["kill:0.0@1", "kill:0.1@1", "kill:1.1@2", "join:new@4"]
    result = survives((3, 2, 3), *faults, steps=25)
    assert result.lost in ((WorkerId(0, 0), WorkerId(1, 1)), (WorkerId(0, 0), WorkerId(0, 1)))


def test_a_new_worker_waits_until_a_place_is_vacant():
    result = survives((2, 2, 2), "join:new@2", "kill:0.1@6:forward", steps=30)
    assert result.lost == ()


def test_the_node_dies_as_one():
    result = survives((3, 4, 3), "kill-node:2@3:backward", workers_per_node=2)
    assert result.generations == 2, "one event, one new generation"
    assert sorted(failure.worker for failure in report(result.events).failures) == ["1.0", "1.1"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["kill", "hang", "stall"])
def test_somebody_is_lost_while_another_comes(kind, point):
    for step in range(4, 8):
        faults = ["kill:1.1@2:forward", "join:1.1@3", f"{kind}:0.1@{step}:{point}"]
        survives((3, 2, 1), *faults, seed=step, steps=12)


@pytest.mark.parametrize("target", ["0.1", "2.1"])
@pytest.mark.parametrize("kind", ["kill", "hang", "stall"])
def test_a_holder_is_lost_in_the_middle_of_the_copy(kind, target):
    survives((3, 2, 1), "kill:1.1@2:forward", "join:1.1@4", f"{kind}:{target}@4:copy", steps=16)


def test_the_joiner_dies_at_each_of_its_effects():
    grid = (2, 2, 1)
    for effect in itertools.count(1):
        kill = (WorkerId(1, 1), effect)
        result = run(grid, "kill:1.1@2:forward", "join:1.1@3", kill_joiner_at_effect=kill, steps=12, seed=effect)
        assert (result.outcome, result.digest) == ("done", healthy(grid, 12).digest), (effect, result.detail)
        assert {"kill:1.1@2:forward", "join:1.1@3"} <= set(result.fired)
        if f"kill:1.1#{effect}" not in result.fired:
            break
    assert effect > 50, "the one that came lived to the end only after it had died at each of its effects"


def test_join_and_leave_in_one_instant():
    survives((3, 2, 2), "kill:1.1@1", "join:1.1@4", "leave:0.1@4:start", steps=30)


def _any_faults(source, grid, steps):
    """Random faults to the workers of one pipeline, most of whom come back later: every layer keeps an owner."""
    pipelines, stages, _ = grid
    victim = source.randrange(pipelines)
    faults = []
    for stage in range(stages):
        step = source.randrange(1, steps // 3)
        kind = source.choice(["kill", "hang", "stall", "leave", "partition"])
        point = source.choice(POINTS)
        faults.append(f"{kind}:{victim}.{stage}@{step}:{point}")
        if source.random() < 0.7:
            faults.append(f"join:{victim}.{stage}@{step + source.randrange(1, steps // 3)}")
    return faults


CHUNK = 20


def apart(deaths):
    """Of deaths of the coordinator, in order, those that do not come while it is dead anyway."""
    found = []
    for at, away_s in sorted(deaths):
        if not found or at > sum(found[-1]):
            found.append((at, away_s))
    return found


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_anything_at_any_time(start):
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        grid = (source.randint(2, 3), source.randint(1, 3), source.randint(1, 3))
        steps = 24
        faults = _any_faults(source, grid, steps)
        try:
            survives(grid, *faults, seed=seed, steps=steps)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, grid {grid}, faults {faults}")
            raise


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_anything_at_any_time_while_the_coordinator_dies_and_connections_break(start):
    """What is on its way is lost. That a late join is heard of before the job ends is not asked.

    A connection that is to break may just not be there.
    """
    broken = to_break = 0
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        grid = (source.randint(2, 3), source.randint(1, 3), source.randint(1, 3))
        steps = 24
        faults = _any_faults(source, grid, steps)
        workers = regular_plan(grid[0], split_evenly(LAYERS_PER_STAGE * grid[1], grid[1]), grid[2]).workers
        end = 0.7 * healthy(grid, steps).events[-1][0]  # other seeds take less time
        deaths = apart((source.uniform(0.0, end), source.uniform(0.0, 0.6)) for _ in range(source.randint(1, 4)))
        breaks = [(source.uniform(0.0, end), source.choice(workers)) for _ in range(source.randint(0, 4))]
        options = {"coordinator_deaths": deaths, "broken_streams": breaks}
        try:
            result = run(grid, *faults, seed=seed, steps=steps, **options)
            assert (result.outcome, result.digest) == ("done", healthy(grid, steps).digest), result.detail
            struck = {text for text in map(str, map(Fault.parse, faults)) if not text.startswith("join")}
            assert set(result.fired) >= struck | {f"kill-coordinator#{at}" for at, _ in deaths}
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, grid {grid}, faults {faults}, {options}")
            raise
        to_break += len(breaks)
        broken += sum(spec.startswith("break:") for spec in result.fired)
    assert broken >= to_break // 3 > 0, "the others come while nobody is connected, or behind the end"


@pytest.mark.parametrize("at", [0.5, 0.8, 1.1, 1.4, 1.7, 2.0, 2.3, 2.6])
def test_the_coordinator_dies_around_a_coming(at):
    deaths = [(at, 0.05)]
    result = survives((3, 2, 2), "kill:1.1@2:backward", "join:1.1@4", steps=60, coordinator_deaths=deaths)
    assert result.lost == (), "whoever was to come has come"
    assert of(result, Reattached)


@pytest.mark.parametrize("at", [0.4, 0.6, 0.8, 1.0, 1.2])
def test_the_coordinator_dies_around_a_leave(at):
    deaths = [(at, 0.3)]
    result = survives((3, 2, 2), "leave:1.1@4:forward", steps=40, coordinator_deaths=deaths)
    assert [event.worker for event in of(result, Parted)] == ["1.1"], "it went in order, whoever was there to hear"
    assert report(result.events).failures == ()


def moment(result, kind):
    """When the first such event was."""
    return next(at for at, event in result.events if isinstance(event, kind))


def test_a_node_dies_while_there_is_no_coordinator():
    """The coordinator dies an instant after the node, before it hears of anything."""
    fault, node = "kill-node:2@3:backward", {"workers_per_node": 2}
    struck = moment(survives((3, 4, 3), fault, **node), FaultInjected)
    result = survives((3, 4, 3), fault, **node, coordinator_deaths=[(struck + 1e-4, 1.0)])
    assert result.lost == (WorkerId(1, 0), WorkerId(1, 1))
    assert moment(result, FaultInjected) == struck < moment(result, CoordinatorLost) < moment(result, Detected)


@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.09])
def test_a_loss_is_told_though_the_coordinator_dies_before_it_knows_that_it_is_stored(after_s):
    fault, slow = "kill:1.1@3:backward", {"delays": Delays(put=(0.1, 0.1))}
    stored_s = moment(survives((3, 2, 3), fault, **slow), Detected)
    result = survives((3, 2, 3), fault, **slow, coordinator_deaths=[(stored_s - after_s, 1.0)])
    assert [event.worker for event in of(result, Detected)] == ["1.1"]
    assert [event.generation for event in of(result, Installed)] == [1, 2, 3]
    assert moment(result, CoordinatorLost) < moment(result, Detected) < moment(result, Reattached)


def test_a_node_is_to_die_while_there_is_no_coordinator():
    """The agent hears of it from the next one."""
    deaths = [(0.3, 1.0)]
    result = survives((3, 4, 3), "kill-node:2@3:backward", workers_per_node=2, coordinator_deaths=deaths)
    assert result.lost == (WorkerId(1, 0), WorkerId(1, 1))
    assert moment(result, FaultInjected) > 1.3


def test_one_seed_is_one_history():
    faults = ["hang:1.1@2:forward", "join:1.1@4", "leave:0.1@6"]
    runs = [run((3, 2, 2), *faults, seed=3, steps=30) for _ in range(2)]
    assert runs[0] == runs[1]
