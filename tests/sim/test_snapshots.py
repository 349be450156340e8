"""Strategy `snapshots`: survivors go back to copies in their own memory, joiners join, and the bits are the same."""

from __future__ import annotations

import itertools
import os
import random
from functools import cache

import pytest

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.protocol import snapshots
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Agreed, Detected, Installed, Notice, StepOps, Synced
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6")) // 5
STEPS = 12
EVERY = 3
GRID = (2, 3, 2)
POINTS = ["start", "forward", "backward", "reduce", "verdict", "update", "commit"]


def run(*faults, grid=GRID, **options):
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(2 * stages, stages), microbatches)
    options = {"steps": STEPS, "strategy": "snapshots", "snapshot_every": EVERY, **options}
    parsed = [Fault.parse(text) for text in faults]
    return VirtualCluster(Scenario(plan=plan, faults=parsed, **options)).run()


@cache
def undisturbed(grid, steps):
    return run(grid=grid, steps=steps, strategy="adaptive", snapshot_every=0)


def healthy(grid=GRID, steps=STEPS):
    return undisturbed(grid, steps).digest


def length(grid=GRID, steps=STEPS):
    return undisturbed(grid, steps).events[-1][0]


def killed(deaths):
    """What is told of deaths of the coordinator."""
    return {f"kill-coordinator#{at}" for at, _ in deaths}


def of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def check(result, *faults, grid=GRID, steps=STEPS, also=()):
    assert result.outcome == "done", result.detail
    assert set(result.fired) == {str(Fault.parse(text)) for text in faults} | {*also}
    assert result.digest == healthy(grid, steps)


def steps_gone_back_to(result):
    """Of every recovery, in order; the first generation has none."""
    return [event.step for event in of(result, Agreed)][1:]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_each_point_of_a_step(point):
    fault = f"kill:1.1@4:{point}"
    result = run(fault)
    check(result, fault)
    assert steps_gone_back_to(result) == [3], "step 3 is run again, too, though every layer had an owner"
    assert [event.strategy for event in of(result, Installed)][1] == "snapshots"
    ran = [event.step for event in of(result, StepOps) if event.worker == "0.0"]
    again = ran.index(3, ran.index(3) + 1)
    assert ran[again:] == list(range(3, STEPS))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("step", [EVERY - 1, EVERY])
def test_a_kill_around_a_snapshot_when_some_have_taken_it_and_some_have_not(step, point):
    """Whoever is ahead goes back further than the rest; nobody goes beyond the newest that all hold."""
    fault = f"kill:1.1@{step}:{point}"
    gone_back = set()
    for seed in range(6):
        result = run(fault, seed=seed)
        check(result, fault)
        gone_back |= set(steps_gone_back_to(result))
    assert gone_back <= {0, EVERY}
    if step < EVERY and point in POINTS[:5]:
        assert gone_back == {0}
    if step == EVERY and point in POINTS[1:]:
        assert EVERY in gone_back


def test_both_snapshots_are_needed():
    """Some survivors have taken the newest snapshot, others cannot: the one before it serves, unless it is gone."""
    fault = "kill:1.1@5:verdict"
    with pytest.MonkeyPatch.context() as patch:
        for kept, expected in ((2, 4), (1, 5)):
            patch.setattr(snapshots, "KEPT", kept)
            result = run(fault, snapshot_every=2)
            check(result, fault)
            assert steps_gone_back_to(result) == [expected]


@pytest.mark.parametrize("every", [1, 2, 5, 50])
def test_any_interval(every):
    fault = "kill:0.1@7:backward"
    result = run(fault, snapshot_every=every)
    check(result, fault)
    assert steps_gone_back_to(result) == [7 - 7 % every]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_kill_at_any_effect(seed):
    victim = WorkerId(seed % 2, seed % 3)
    count = random.Random(seed).randint(20, run().effects[victim])
    result = run(kill_at_effect=[(victim, count)], seed=seed)
    assert result.outcome == "done", result.detail
    assert result.digest == healthy()
    assert result.fired == (f"kill:{victim}#{count}",)
    assert len(of(result, Detected)) == 1


@pytest.mark.parametrize("hang", ["hang:0.2@4:forward", "stall:0.2@4:forward"])
def test_a_hang(hang):
    result = run(hang)
    check(result, hang)
    assert steps_gone_back_to(result) == [3]


@pytest.mark.parametrize("point", ["detect", "install", "replay"])
def test_another_dies_during_the_recovery(point):
    """Also when some have gone back already, by more steps than could be taken back, and some have not."""
    again = 3 if point == "replay" else 5
    faults = ["kill:1.1@5:backward", f"kill:0.0@{again}:{point}"]
    for seed in range(10):
        result = run(*faults, seed=seed)
        check(result, *faults)
        assert set(steps_gone_back_to(result)) == {3}


def test_two_at_once_and_two_after_another():
    for faults in (["kill:0.0@5", "kill:1.1@5:forward"], ["kill:0.0@4:update", "kill:1.2@8:reduce"]):
        for seed in range(6):
            check(run(*faults, seed=seed), *faults)


@pytest.mark.parametrize("seed", range(6))
def test_a_new_process_comes_into_the_place_of_the_lost_one(seed):
    fault = "kill:1.1@5:backward"
    result = run(fault, seed=seed, steps=40)
    check(result, fault, steps=40)
    (synced,) = of(result, Synced)
    assert synced.worker == "1.1"
    assert (result.lost, len(of(result, Installed)[-1].workers)) == ((), 6)
    assert [event for event in of(result, StepOps) if event.worker == "1.1"][-1].ops, "it computes again"


@pytest.mark.parametrize("effect", [1, 4, 6, 8, 15, 25, 45, 70])
def test_the_new_process_dies_too_whatever_it_does(effect):
    fault = "kill:1.1@5:backward"
    for seed in range(3):
        result = run(fault, seed=seed, steps=40, kill_joiner_at_effect=(WorkerId(1, 1), effect))
        assert result.outcome == "done", result.detail
        assert result.digest == healthy(steps=40)
        assert f"kill:1.1#{effect}" in result.fired


@pytest.mark.parametrize("step", range(5, 20))
def test_a_loss_at_any_step_around_a_joiner(step):
    """It has no snapshot, or one that others do not have, until all have taken the same one."""
    faults = ["kill:1.1@4:backward", f"kill:0.2@{step}:forward"]
    gone_back = []
    for seed in range(3):
        result = run(*faults, seed=seed, steps=40, snapshot_every=4)
        check(result, *faults, steps=40)
        gone_back += steps_gone_back_to(result)[1:]
    assert all(step - 4 <= back <= step for back in gone_back)


def test_where_no_snapshot_is_held_by_all_nobody_loses_more_than_the_interrupted_step():
    """A joiner computes before the first snapshot after it: with none in common, all stay at the lowest step."""
    faults = ["kill:1.1@1:backward", "kill:0.2@25:forward"]
    result = run(*faults, steps=40, snapshot_every=30)
    check(result, *faults, steps=40)
    assert of(result, Synced)[0].step < 25
    assert steps_gone_back_to(result) == [0, 25]


def test_after_that_all_hold_one_again():
    """Whoever begins anew takes a snapshot where all begin."""
    faults = ["kill:1.1@1:backward", "kill:0.2@25:forward", "kill:0.1@26:forward"]
    result = run(*faults, grid=(3, 3, 2), steps=40, snapshot_every=30)
    check(result, *faults, grid=(3, 3, 2), steps=40)
    assert steps_gone_back_to(result) == [0, 25, 25]


def test_who_leaves_in_order_makes_nobody_go_back():
    fault = "leave:1.1@4:forward"
    result = run(fault)
    check(result, fault)
    assert steps_gone_back_to(result) == []
    assert of(result, Installed)[-1].strategy == "boundary"


def test_without_an_owner_the_last_checkpoint_is_loaded_by_a_smaller_grid_which_takes_snapshots_too():
    faults = ["kill:0.1@5:forward", "kill:1.1@5:forward", "kill:0.0@10:forward"]
    result = run(*faults, checkpoint_every=4, steps=30, seed=1)  # the second dies before the first is missed
    check(result, *faults, steps=30)
    assert [event.strategy for event in of(result, Installed)].count("fallback") >= 1
    assert steps_gone_back_to(result)[-1] in (4, 9)


def test_without_an_owner_and_a_checkpoint_what_lives_is_saved():
    result = run("kill:0.1@5:forward", "kill:1.1@5:forward")
    assert len(result.fired) == 2
    assert (result.outcome, result.step) == ("lost", 5)
    assert not [event for event in of(result, Notice) if "cannot" in event.text]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_with_a_coordinator_that_dies(seed):
    """What it must know is in what the workers say; a process that it was about to start is started by the next."""
    draw, end = random.Random(seed), length(steps=60)
    deaths = [(draw.uniform(0.2, end / 3), 0.3), (draw.uniform(end / 3 + 0.4, end), 0.1)]
    fault = "kill:1.1@5:backward"
    result = run(fault, seed=seed, steps=60, coordinator_deaths=deaths)
    check(result, fault, steps=60, also=killed(deaths))
    assert "1.1" in of(result, Installed)[-1].workers, "that it has caught up may have been told to the one that died"
    assert result.lost == ()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_deaths_anywhere(seed):
    """Two die wherever they are, the coordinator with them."""
    one, other = [WorkerId(p, s) for p, s in itertools.product(range(3), range(2))][seed % 6], WorkerId(seed % 3, 0)
    victims = (one, other) if other != one else (one,)
    yielded = run(grid=(3, 2, 2), steps=30).effects
    kills = [(victim, 15 + 31 * seed % (yielded[victim] - 15)) for victim in victims]
    deaths = [(random.Random(seed).uniform(0.0, length((3, 2, 2), 30)), 0.2)] if seed % 2 else []
    result = run(grid=(3, 2, 2), seed=seed, steps=30, kill_at_effect=kills, coordinator_deaths=deaths)
    assert result.outcome == "done", result.detail
    assert result.digest == healthy((3, 2, 2), 30)
    assert set(result.fired) == {*(f"kill:{victim}#{count}" for victim, count in kills), *killed(deaths)}
