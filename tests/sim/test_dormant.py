"""Workers are told to compute nothing, and to compute again, in virtual time: the result is that of the run without."""

from __future__ import annotations

import os
import random

import pytest
from tests.sim.test_coming_and_going import of, run, survives

from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import Agreed, Installed, StepOps
from holdfast.telemetry.report import report

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
POINTS = ["start", "forward", "backward", "reduce", "update", "commit"]
IDLE = ["start", "reduce", "update", "commit"]
"""Points that are also reached by whoever computes nothing."""


def busy(result, worker):
    """The steps in which a worker has computed something."""
    return [event.step for event in of(result, StepOps) if event.worker == worker and event.ops]


@pytest.mark.parametrize("point", POINTS)
def test_whoever_is_suspended_takes_part_and_computes_nothing(point, staggered):
    result = survives((3, 2, 3), f"suspend:1.1@3:{point}", f"wake:1.1@7:{point if point in IDLE else 'start'}")
    steps = [event.step for event in of(result, StepOps) if event.worker == "1.1"]
    assert steps == list(range(12)), "it is in every step"
    idle = sorted(set(range(12)) - set(busy(result, "1.1")))
    assert idle, "it was told to rest"
    assert idle == list(range(idle[0], idle[-1] + 1)), "once"
    late = point in ("reduce", "update", "commit")  # nearly in the next step
    assert idle[0] <= 5 + late, "one more step at most, and it rests"
    assert idle[-1] <= 8 + late + staggered, "one more, and it works again; nobody waits for it ahead of the verdict"
    assert report(result.events).failures == ()
    assert len(of(result, Agreed)) == 1, "nobody gives anything up for it"
    members = {event.workers for event in of(result, Installed)}
    assert members == {tuple(f"{p}.{s}" for p in range(3) for s in range(2))}, "nobody connects anew"


def test_whoever_is_needed_works_though_it_was_suspended():
    result = survives((2, 2, 3), "suspend:0.1@2", "kill:1.1@6:forward")
    assert 5 not in busy(result, "0.1")
    assert {7, 8, 9, 10, 11} <= set(busy(result, "0.1")), "nobody else holds these layers"


def test_the_last_one_cannot_rest():
    result = survives((2, 2, 3), "suspend:0.1@2", "suspend:1.1@5")
    assert busy(result, "1.1") == list(range(12))
    assert 8 not in busy(result, "0.1"), "whoever rests is not woken by that"


def test_whoever_could_not_rest_does_once_somebody_else_works():
    result = survives((2, 2, 3), "suspend:0.1@2", "suspend:1.1@3", "wake:0.1@6")
    assert 5 not in busy(result, "0.1")
    assert 10 not in busy(result, "1.1")


def test_of_two_that_rest_only_the_one_that_is_needed_is_woken():
    result = survives((2, 2, 3), "suspend:0.1@2", "suspend:1.0@2", "kill:1.1@9:forward")
    assert {8, 10, 11}.isdisjoint(busy(result, "1.0"))
    assert 8 not in busy(result, "0.1")
    assert 11 in busy(result, "0.1")


@pytest.mark.parametrize("at", [0.9, 1.3, 1.7])
def test_a_coordinator_that_is_started_again_wakes_nobody(at):
    result = survives((3, 2, 3), "suspend:1.1@1", coordinator_deaths=((at, 0.3),))
    assert busy(result, "1.1")[-1] < 4


def test_whoever_is_told_before_the_first_step_rests_from_the_first_boundary_on():
    result = survives((3, 2, 3), "suspend:1.1@0")
    assert busy(result, "1.1")[-1] < 3


def test_whoever_dies_dormant_comes_back_to_work():
    result = survives((3, 2, 3), "suspend:1.1@1", "kill:1.1@4", "join:1.1@5")
    assert busy(result, "1.1")[-1] == 11
    assert 3 not in busy(result, "1.1"), "it rested"


def test_at_any_moment_with_deaths_of_others_and_of_the_coordinator():
    rested = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        sleeper, victim = rng.sample([WorkerId(p, s) for p in range(3) for s in range(2)], 2)
        at = rng.randrange(1, 5)
        faults = [
            f"suspend:{sleeper}@{at}:{rng.choice(POINTS)}",
            f"wake:{sleeper}@{at + rng.randrange(1, 4)}:{rng.choice(IDLE)}",
            f"kill:{victim}@{rng.randrange(1, 10)}:{rng.choice(POINTS)}",
        ]
        deaths = ((rng.uniform(0.1, 2.0), rng.uniform(0.0, 0.5)),) if seed % 3 == 0 else ()
        result = survives((3, 2, 3), *faults, seed=seed, coordinator_deaths=deaths)
        rested += len(busy(result, str(sleeper))) < 12
        assert busy(result, str(sleeper))[-1] == 11, f"seed {seed}: it works in the end"
    assert rested > SEEDS / 3


def test_a_grid_without_peers_has_nobody_who_could_rest():
    result = run((1, 3, 3), "suspend:0.1@2")
    assert result.outcome == "done"
    assert busy(result, "0.1") == list(range(12))
