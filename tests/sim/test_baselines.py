"""Strategies that go back to a checkpoint after any loss: all places are filled anew, and the bits are the same."""

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
from holdfast.telemetry.events import Agreed, Checkpointed, Detected, Installed, Notice, StepOps
from holdfast.testing.scenario import Delays, Scenario
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "20")) // 10
STEPS = 9
EVERY = 3
GRID = (2, 3, 2)
BASELINES = {
    "checkpoint-restart": {"strategy": "checkpoint-restart", "synchronous": True},
    "checkfreq": {"strategy": "checkfreq"},
}
POINTS = ["start", "forward", "backward", "reduce", "verdict", "update", "commit"]
SLOW_STORE = Delays(store=(0.5, 0.6))
"""Far longer than three steps take."""


def run(*faults, **options):
    pipelines, stages, microbatches = GRID
    plan = regular_plan(pipelines, split_evenly(2 * stages, stages), microbatches)
    options = {"checkpoint_every": EVERY, "steps": STEPS, "wait_for_replacement": 60.0, **options}
    parsed = [Fault.parse(text) for text in faults]
    return VirtualCluster(Scenario(plan=plan, faults=parsed, **options)).run()


@cache
def healthy():
    return run(checkpoint_every=0, wait_for_replacement=0.0).digest


def of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def check(result, *faults):
    assert result.outcome == "done", result.detail
    assert set(result.fired) == {str(Fault.parse(text)) for text in faults}
    assert result.digest == healthy()


def check_whole(result, name, *faults):
    """It ended as the healthy run, on the whole grid, after going back to a checkpoint."""
    check(result, *faults)
    last = of(result, Installed)[-1]
    assert (last.strategy, len(last.workers)) == (name, GRID[0] * GRID[1])
    assert all(event.step % EVERY == 0 for event in of(result, Agreed))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", BASELINES)
def test_a_kill_at_each_point_of_a_step(name, point):
    fault = f"kill:1.1@5:{point}"
    result = run(fault, **BASELINES[name])
    check_whole(result, name, fault)
    assert of(result, Agreed)[-1].step == 3, "steps 3 and 4 are run again, though every layer had an owner"


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", BASELINES)
def test_a_kill_at_any_effect(name, seed):
    victim = WorkerId(seed % 2, seed % 3)
    count = random.Random(seed).randint(20, run(**BASELINES[name]).effects[victim])
    result = run(kill_at_effect=[(victim, count)], seed=seed, **BASELINES[name])
    assert result.outcome == "done", result.detail
    assert result.digest == healthy()
    assert result.fired == (f"kill:{victim}#{count}",)
    assert len(of(result, Detected)) == 1
    assert of(result, Installed)[-1].strategy == name


@pytest.mark.parametrize("hang", ["hang:0.2@4:forward", "stall:0.2@4:forward"])
@pytest.mark.parametrize("name", BASELINES)
def test_a_hang(name, hang):
    check_whole(run(hang, **BASELINES[name]), name, hang)


@pytest.mark.parametrize("name", BASELINES)
def test_all_owners_of_a_layer_at_once(name):
    faults = ["kill:0.1@4:forward", "kill:1.1@4:forward"]
    check_whole(run(*faults, **BASELINES[name]), name, *faults)


@pytest.mark.parametrize("point", ["detect", "install", "replay"])
@pytest.mark.parametrize("name", BASELINES)
def test_another_dies_during_the_recovery(name, point):
    faults = ["kill:1.1@5:backward", f"kill:0.0@{3 if point == 'replay' else 5}:{point}"]
    for seed in range(4):
        check_whole(run(*faults, seed=seed, **BASELINES[name]), name, *faults)


@pytest.mark.parametrize("name", BASELINES)
def test_a_writer_dies_between_two_shards(name):
    fault = "kill:0.0@3:checkpoint"
    result = run(fault, **BASELINES[name])
    check_whole(result, name, fault)
    assert of(result, Agreed)[-1].step in (0, 3)


@pytest.mark.parametrize("effect", [1, 2, 3])
@pytest.mark.parametrize("name", BASELINES)
def test_replacements_that_keep_dying_are_given_up_in_time(name, effect):
    """At their first words, or while the others are waited for: started anew until the limit, then a smaller grid."""
    fault = "kill:1.1@5:backward"
    joiner = (WorkerId(1, 1), effect)
    result = run(fault, wait_for_replacement=8.0, kill_joiner_at_effect=joiner, **BASELINES[name])
    assert result.outcome == "done", result.detail
    assert result.digest == healthy()
    assert result.fired.count(f"kill:1.1#{effect}") > 1, "it was started more than once"
    assert of(result, Installed)[-1].strategy == "fallback"


def test_who_leaves_in_order_makes_nobody_go_back():
    fault = "leave:1.1@4:forward"
    result = run(fault, **BASELINES["checkfreq"])
    check(result, fault)
    assert {event.step for event in of(result, Agreed)} == {0}
    assert of(result, Installed)[-1].strategy == "boundary"


def test_a_loss_after_a_leave_fills_both_places():
    faults = ["leave:1.1@3:forward", "kill:0.2@7:backward"]
    check_whole(run(*faults, **BASELINES["checkfreq"]), "checkfreq", *faults)


def test_training_stands_still_until_a_synchronous_checkpoint_is_written():
    """Until every shard is; without, training goes on meanwhile."""
    still = stood_still_s(run(strategy="checkpoint-restart", synchronous=True, delays=SLOW_STORE))
    assert min(still) > SLOW_STORE.store[0]
    assert max(stood_still_s(run(strategy="checkpoint-restart", delays=SLOW_STORE))) < SLOW_STORE.store[0]


def stood_still_s(result):
    """How much time each writer of each checkpoint let pass between the step before it and the one after it."""
    check(result)
    assert [event.step for event in of(result, Checkpointed)] == [EVERY, 2 * EVERY, STEPS]
    done = {(event.worker, event.step): at for at, event in result.events if isinstance(event, StepOps)}
    pins = {(str(pinned.worker), pinned.step) for pinned in result.pinned if pinned.step < STEPS}
    assert {step for _, step in pins} == {EVERY, 2 * EVERY}
    return [done[worker, step] - done[worker, step - 1] for worker, step in pins]


def test_before_the_first_checkpoint_they_begin_anew():
    fault = "kill:1.1@1:backward"
    result = run(fault, **BASELINES["checkpoint-restart"])
    check_whole(result, "checkpoint-restart", fault)
    assert not [event for event in of(result, Notice) if "cannot" in event.text]


LONG = {"strategy": "checkfreq", "steps": 40, "checkpoint_every": 3, "sets_interval": True}


@cache
def long_and_healthy():
    return run(steps=40, checkpoint_every=0, wait_for_replacement=0.0).digest


def intervals(result):
    steps = [0, *sorted({pinned.step for pinned in result.pinned})]
    return [after - before for before, after in itertools.pairwise(steps)]


def test_checkfreq_sets_its_own_interval():
    result = run(delays=SLOW_STORE, **LONG)
    assert (result.outcome, result.digest) == ("done", long_and_healthy())
    told = [event.text for event in of(result, Notice) if "one after every" in event.text]
    assert "steps now, not 3" in told[0]
    assert max(intervals(result)) > 3
    assert [event.strategy for event in of(result, Installed)][1:] == ["boundary"] * len(told)
    assert not of(result, Detected), "nobody was lost for it"


@pytest.mark.parametrize("start", range(0, SEEDS, 10))
def test_whoever_dies_while_the_interval_changes_the_bits_are_the_same(start):
    changed = 0
    for seed in range(start, start + 10):
        rng = random.Random(seed)
        victim = WorkerId(rng.randrange(GRID[0]), rng.randrange(GRID[1]))
        step = rng.randrange(3, 38)
        result = run(f"kill:{victim}@{step}:{rng.choice(POINTS)}", delays=SLOW_STORE, seed=seed, **LONG)
        assert (result.outcome, result.digest) == ("done", long_and_healthy()), f"seed {seed}"
        assert len(result.fired) == 1, f"seed {seed}"
        changed += max(intervals(result)) > 3
    assert changed > 5, "who dies early leaves too little time to learn what a checkpoint costs"
