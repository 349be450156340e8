"""A layer loses its last owner: a smaller grid goes on from the last checkpoint, in place; the bits are the same."""

from __future__ import annotations

from functools import cache

import pytest

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Agreed, Installed, Notice
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

STEPS = 14
GRID = (2, 3, 2)
STAGE_GONE = ["kill:0.1@6:forward", "kill:1.1@7:backward"]


def run(*faults, grid=GRID, **options):
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(2 * stages, stages), microbatches)
    parsed = [Fault.parse(text) for text in faults]
    options = {"checkpoint_every": 3, "steps": STEPS, **options}
    return VirtualCluster(Scenario(plan=plan, faults=parsed, **options)).run()


@cache
def healthy(steps=STEPS):
    return run(steps=steps).digest


def check(result, *faults, steps=STEPS):
    assert result.outcome == "done", result.detail
    assert set(result.fired) == {str(Fault.parse(text)) for text in faults}
    assert result.digest == healthy(steps)


def of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


@pytest.mark.parametrize("seed", range(10))
def test_whoever_is_left_goes_on_as_a_smaller_grid(seed):
    result = run(*STAGE_GONE, seed=seed)
    check(result, *STAGE_GONE)
    assert of(result, Installed)[-1].strategy == "fallback"
    assert of(result, Agreed)[-1].step in (3, 6), "the last checkpoint"


def test_before_the_first_checkpoint_the_start_is_the_checkpoint():
    faults = ["kill:0.1@0:forward", "kill:1.1@1:forward"]
    result = run(*faults)
    check(result, *faults)
    assert of(result, Agreed)[-1].step == 0


def test_without_checkpoints_what_lives_is_saved():
    result = run(*STAGE_GONE, checkpoint_every=0)
    assert len(result.fired) == 2
    assert result.outcome == "lost"


@pytest.mark.parametrize("point", ["7:detect", "7:install", "6:replay", "8:start", "8:reduce", "8:commit"])
def test_the_smaller_grid_loses_workers_too(point):
    again = f"kill:0.0@{point}"
    check(run(*STAGE_GONE, again, seed=4), *STAGE_GONE, again)


def test_down_to_one_worker():
    faults = ["kill:0.0@4", "kill:0.1@5", "kill:0.2@6", "kill:1.0@8:reduce", "kill:1.2@10:commit"]
    result = run(*faults)
    check(result, *faults)
    assert of(result, Installed)[-1].workers == ("1.1",)


def test_a_replacement_is_waited_for():
    faults = [*STAGE_GONE, "join:1.1@2"]
    result = run(*faults, wait_for_replacement=30.0)
    check(result, *faults)
    assert len(of(result, Installed)[-1].workers) == 5, "all but the one that did not come back, in their places"


def test_who_waits_in_vain_shrinks():
    result = run(*STAGE_GONE, wait_for_replacement=5.0)
    check(result, *STAGE_GONE)
    last = of(result, Installed)[-1]
    assert (last.strategy, len(last.workers)) == ("fallback", 4)


def test_a_loss_while_waiting():
    faults = [*STAGE_GONE, "kill:0.0@7:detect", "join:1.1@2"]
    check(run(*faults, wait_for_replacement=30.0), *faults)


def test_a_worker_comes_back_into_the_smaller_grid():
    faults = [*STAGE_GONE, "kill:0.0@9:forward", "join:0.0@10"]
    result = run(*faults, steps=30)
    check(result, *faults, steps=30)
    assert WorkerId(0, 0) not in result.lost
    assert "0.0" in of(result, Installed)[-1].workers


def test_workers_without_a_place_end_and_say_so():
    faults = ["kill:0.1@6:forward", "kill:1.1@7:backward"]
    result = run(*faults, grid=(2, 3, 1), steps=STEPS)
    assert sorted(result.fired) == faults
    assert result.outcome == "done"
    used = of(result, Installed)[-1].workers
    told = [event.worker for event in of(result, Notice) if "shrinks" in event.text]
    assert len(used) + len(told) == 4
