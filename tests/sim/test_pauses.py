"""Pauses under a virtual clock: of everybody, of the workers, of the coordinator, and of some; at any moment."""

from __future__ import annotations

import os
import random
from functools import cache

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, StepOps
from holdfast.testing.scenario import Pause, Scenario, VirtualResult
from holdfast.testing.virtual import VirtualCluster
from holdfast.testing.virtual_worker import HANG_S

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6")) // 5
STEPS = 12
MARGIN_S = 0.5
PATIENCE_S = 15 * HANG_S
HEARD_S = 0.3
"""So long after a step was done everybody is known to have done it."""


@cache
def plan_of(pipelines, stages):
    return regular_plan(pipelines, split_evenly(stages + 1, stages), 2)


def cluster(grid, seed, *pauses) -> VirtualResult:
    return VirtualCluster(Scenario(plan=plan_of(*grid), steps=STEPS, seed=seed, pauses=pauses)).run()


def warm_at(result: VirtualResult) -> float:
    """When everyone is known to have done its first step."""
    return max(at for at, event in result.events if isinstance(event, StepOps) and event.step == 0) + HEARD_S


def end_at(result: VirtualResult) -> float:
    return result.events[-1][0]


class History:
    """One seed: its grid, and the run in which nothing is stopped."""

    def __init__(self, seed):
        self.seed, self.source = seed, random.Random(seed)
        self.grid = (self.source.randint(2, 3), self.source.randint(1, 3))
        self.workers = plan_of(*self.grid).workers
        self.calm = cluster(self.grid, seed)

    def check(self, lost, *pauses) -> VirtualResult:
        """Each pause held somebody up, unless the job was over; exactly those are lost, and the bits are right."""
        try:
            result = cluster(self.grid, self.seed, *pauses)
            assert result.lost == lost
            assert (result.outcome, result.step) == ("done", STEPS)
            assert result.digest == self.calm.digest
            over = end_at(result)  # the last that is told; processes end after it, and can be stopped as they do
            assert {str(pause) for pause in pauses if pause.at < over} <= set(result.fired)
            assert str(pauses[0]) in result.fired
        except BaseException as error:
            error.add_note(f"repeat: seed {self.seed}, grid {self.grid}, pauses {pauses}")
            raise
        return result

    def any_moment(self) -> float:
        return self.source.uniform(0.0, end_at(self.calm))

    def warm_moment(self) -> float:
        return self.source.uniform(warm_at(self.calm), end_at(self.calm) - HEARD_S)

    def some(self) -> tuple[WorkerId, ...]:
        """Workers of which every stage has one left."""
        pipelines, stages = self.grid
        return tuple(
            sorted(WorkerId(p, s) for s in range(stages) for p in self.source.sample(range(pipelines), pipelines - 1))
        )


def histories():
    return map(History, range(SEEDS))


@pytest.mark.parametrize("who", ["everybody", "workers", "coordinator"])
def test_a_pause_of_everybody_is_nobodys_fault(who):
    """At any moment, also before the first step and at the end; and again right afterwards."""
    for history in histories():
        source, pauses, at = history.source, [], history.any_moment()
        workers = history.workers if who != "coordinator" else ()
        for _ in range(source.randint(1, 3)):
            lasts_s = source.uniform(0.5, PATIENCE_S - HANG_S)
            pauses.append(Pause(at=at, lasts_s=lasts_s, workers=workers, coordinator=who != "workers"))
            at += lasts_s + source.uniform(0.5, 3.0)
        result = history.check((), *pauses)
        assert end_at(result) > pauses[0].at + pauses[0].lasts_s or who == "coordinator", "they were stopped so long"


def test_some_that_are_stopped_for_too_long_are_lost_and_nobody_else():
    for history in histories():
        victims = history.some()
        victims = victims if history.source.random() < 0.5 else victims[:1]
        lasts_s = history.source.uniform(HANG_S + MARGIN_S, PATIENCE_S)
        result = history.check(victims, Pause(at=history.warm_moment(), lasts_s=lasts_s, workers=victims))
        found = [event.how for _, event in result.events if isinstance(event, Detected)]
        assert all("no sign of life" in how for how in found)


def test_some_that_are_stopped_for_a_moment_are_not():
    for history in histories():
        lasts_s = history.source.uniform(0.1, HANG_S - MARGIN_S)
        history.check((), Pause(at=history.any_moment(), lasts_s=lasts_s, workers=history.some()))


def test_one_that_hangs_is_found_after_a_pause_of_everybody():
    """It is stopped with all others, and does not go on with them."""
    for history in histories():
        (victim,) = history.source.sample(history.workers, 1)
        at, lasts_s = history.warm_moment(), history.source.uniform(1.0, 10.0)
        everybody = Pause(at=at, lasts_s=lasts_s, workers=history.workers, coordinator=history.source.random() < 0.5)
        history.check((victim,), everybody, Pause(at=at, lasts_s=lasts_s + 10.0, workers=(victim,)))
