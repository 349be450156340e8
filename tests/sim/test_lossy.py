"""Lossy strategies in virtual time: a step ends without what the lost had of it, and all who are left agree on it."""

from __future__ import annotations

import os
import random

import pytest
from tests.sim.test_coming_and_going import healthy, of, run

from holdfast.telemetry.events import Agreed, StepOps

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
GRID, STEPS = (4, 1, 2), 12
OF = {f"{pipeline}.0": {2 * pipeline, 2 * pipeline + 1} for pipeline in range(4)}
"""The micro-batches of each worker."""
POINTS = ["start", "forward", "backward", "reduce", "update", "commit"]


def left_out(result):
    """Per step, what did not count in it."""
    return {event.step: set(event.left_out) for event in of(result, Agreed) if event.left_out}


def lossy(strategy, *faults, **options):
    result = run(GRID, *faults, strategy=strategy, **options)
    assert result.outcome == "done", result.detail
    assert sorted(result.fired) == sorted(faults)
    return result


@pytest.mark.parametrize("point", POINTS)
def test_only_what_the_lost_had_is_left_out(point):
    result = lossy("lossy-forward", f"kill:1.0@3:{point}")
    found = left_out(result)
    assert found.keys() <= {3, 4}
    assert all(numbers <= OF["1.0"] for numbers in found.values())
    assert not any(event.redone or event.regenerated for event in of(result, Agreed)), "nothing is run again"
    assert {event.step for event in of(result, StepOps)} == set(range(STEPS))
    assert bool(found) == (result.digest != healthy(GRID, STEPS).digest), "one sees it in the weights"


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_a_step_that_is_skipped_has_nothing(point):
    result = lossy("skip", f"kill:2.0@5:{point}")
    assert left_out(result) == {5: set(range(8))}
    assert {event.step for event in of(result, StepOps)} == set(range(STEPS))


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_a_mini_batch_that_is_run_once_more_is_a_step_more(point):
    result = lossy("rollback", f"kill:2.0@5:{point}")
    assert left_out(result) == {5: set(range(8))}
    assert {event.step for event in of(result, StepOps)} == set(range(STEPS + 1))


def test_what_is_left_out_does_not_depend_on_what_was_simulated_before(monkeypatch):
    """The same two are lost, one behind the other: the later one had what the earlier one did, too."""
    runs = [("kill:0.0@2:forward", "kill:1.0@11:forward"), ("kill:1.0@2:forward", "kill:0.0@11:forward")]
    alone = []
    for faults in runs:
        monkeypatch.setattr("holdfast.testing.virtual_coordinator._ANSWERS", {})
        alone.append(left_out(lossy("lossy-forward", *faults)))
    assert [left_out(lossy("lossy-forward", *faults)) for faults in reversed(runs)] == alone[::-1]
    assert alone[0] != alone[1]


@pytest.mark.parametrize("strategy", ["lossy-forward", "skip", "rollback"])
def test_at_random(strategy):
    """Two are lost, in one step or in two, anywhere in them; the coordinator may be lost between."""
    for seed in range(SEEDS):
        chosen = random.Random(seed)
        victims = chosen.sample(sorted(OF), 2)
        faults = [f"kill:{worker}@{chosen.randint(2, 6)}:{chosen.choice(POINTS)}" for worker in victims]
        coordinator = {"coordinator_deaths": ((chosen.uniform(0.5, 2.5), 0.3),)} if seed % 3 == 0 else {}
        result = run(GRID, *faults, strategy=strategy, seed=seed, **coordinator)
        assert result.outcome == "done", (seed, faults, result.detail)
        assert set(faults) <= set(result.fired), (seed, faults)
        lost = set().union(*(OF[worker] for worker in victims))
        if strategy == "lossy-forward":
            assert all(numbers <= lost for numbers in left_out(result).values()), (seed, faults)
        again = run(GRID, *faults, strategy=strategy, seed=seed, **coordinator)
        assert again.digest == result.digest, f"seed {seed} twice"
