"""What is said to be run again after a loss, against what engines have run twice."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from holdfast.core.faults import Fault
from holdfast.core.placement import split_evenly
from holdfast.runtime.engine.emulated import EmulatedStage
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Agreed
from holdfast.telemetry.report import report
from holdfast.testing.fault_plans import STEP_POINTS
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
GRIDS = [(2, 2, 3), (3, 2, 2), (2, 3, 3), (3, 1, 4)]
ANSWERS = {
    "going on": {},
    "a whole step again": {"step_log": False},
    "snapshots": {"strategy": "snapshots", "snapshot_every": 3},
    "a checkpoint": {
        "strategy": "checkpoint-restart",
        "synchronous": True,
        "checkpoint_every": 2,
        "wait_for_replacement": 60.0,
    },
}


COUNTS = ("recomputed_microbatches", "recomputed_at_most")


class Counted(EmulatedStage):
    """Counts its forward passes, per step, layer and micro-batch, with those of all others."""

    def __init__(self, ran, **options):
        super().__init__(**options)
        self.ran_forward = ran

    def forward(self, step, microbatch, activation, layers=None, *, adds=True):
        found = super().forward(step, microbatch, activation, layers, adds=adds)
        self.ran_forward.update((step, layer, microbatch) for layer in layers.indices)
        return found


def run(grid, fault, seed, **options):
    """A job with one loss: its result, and how many pairs were run more than once."""
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(2 * stages + (stages == 1), stages), microbatches)
    ran: Counter = Counter()
    whole = {"num_layers": plan.placement.num_layers, "num_microbatches": len(plan.routes.microbatches)}

    def stage(worker, plan):
        return Counted(ran, layers=plan.placement.layers_of(worker), **whole)

    faults = (Fault.parse(fault),)
    result = VirtualCluster(Scenario(plan=plan, steps=8, seed=seed, faults=faults, stage=stage, **options)).run()
    assert (result.outcome, len(result.fired)) == ("done", 1), result.detail
    return result, sum(times - 1 for times in ran.values())


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_run_again_is_as_told(answer):
    for seed in range(SEEDS // 3):
        source = random.Random(seed)
        grid = source.choice(GRIDS)
        worker = f"{source.randrange(grid[0])}.{source.randrange(grid[1])}"
        kind = source.choice(["kill", "hang", "stall"])
        fault = f"{kind}:{worker}@{source.randint(2, 5)}:{source.choice(STEP_POINTS)}"
        result, twice = run(grid, fault, seed, **ANSWERS[answer])
        (failure,) = report(result.events).failures
        told = [event for _, event in result.events if isinstance(event, Agreed)]
        known, at_most = (sum(getattr(each, name) for each in told) for name in COUNTS)
        where = f"repeat: seed {seed}, grid {grid}, {fault}"
        assert known <= twice <= at_most, where
        first = next(event for event in told if event.generation > 1)
        assert failure.recomputed_microbatches == first.recomputed_microbatches
        if kind == "stall":  # its heartbeats went on
            assert failure.recomputed_microbatches == failure.recomputed_at_most, where


def test_what_was_begun_of_the_step_behind_is_run_again_and_counts():
    """0.1 has the verdict over step 4 with all others, and dies: it alone has not updated, and nobody begins anew."""
    result, twice = run((2, 3, 3), "kill:0.1@4:verdict", 41, staggered=False, technique=None)
    (agreed,) = [event for _, event in result.events if isinstance(event, Agreed) and event.generation == 2]
    assert agreed.concluded
    assert agreed.recomputed_microbatches == agreed.dropped == twice > 0
