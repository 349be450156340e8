"""Long runs: through real faults of all kinds at random points, and through nothing but load.

HOLDFAST_SOAK_FAULTS sets how many faults (six at least), HOLDFAST_SOAK_SEED which: those of the first seed from
there on that have every kind; HOLDFAST_HEALTHY_STEPS how many steps without any. ``make soak`` takes many.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from functools import partial

import psutil
import pytest

from holdfast.core.faults import FaultKind
from holdfast.telemetry.events import Detected, Installed, StepOps, Suspected, read_events
from holdfast.testing.fault_plans import LOSSES, random_faults

pytestmark = pytest.mark.dist

COUNT = int(os.environ.get("HOLDFAST_SOAK_FAULTS", "8"))
SEED = int(os.environ.get("HOLDFAST_SOAK_SEED", "1"))
HEALTHY_STEPS = int(os.environ.get("HOLDFAST_HEALTHY_STEPS", "500"))
EVERY_S = 1.0
SETTLE_S = 3.0
"""In time of steps; hangs and recoveries add to it, so that faults come every one to two seconds."""
ALONE = ("grid.pipelines=1", "grid.stages=1", "grid.microbatches=6")
"""The same global batch on one worker ends in the same bits, in a fraction of the time."""


@pytest.mark.alone
@pytest.mark.timeout(120 + 10 * COUNT)
def test_many_random_faults_and_nobody_can_tell(runs):
    rate = runs.healthy("small").steps_per_s
    draw = partial(
        random_faults,
        pipelines=3,
        stages=2,
        count=COUNT,
        every_steps=math.ceil(EVERY_S * rate),
        settle_steps=math.ceil(SETTLE_S * rate),
        workers_per_node=2,
    )
    drawn = ((seed, draw(seed)) for seed in itertools.count(SEED))
    seed, faults = next(each for each in drawn if {fault.kind for fault in each[1]} == {*LOSSES, FaultKind.JOIN})
    steps = faults[-1].step + math.ceil(SETTLE_S * rate)
    overrides = ("grid.workers_per_node=2", f"train.steps={steps}")
    alone = runs.healthy("small", (*ALONE, overrides[1]))
    folder = runs.folder() / "run"
    try:
        summary = runs.survives("small", *map(str, faults), overrides=overrides, run_dir=folder, healthy=alone)
    except BaseException as error:
        scheduled = " ".join(f"--fault {fault}" for fault in faults)
        error.add_note(f"repeat (seed {seed}): holdfast train {folder / 'job.yaml'} {scheduled}")
        raise
    assert summary.steps == steps


@pytest.fixture
def load():
    """Two processes that never rest."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield [psutil.Process(each.pid) for each in spinning]
    for each in spinning:
        each.kill()
        each.wait()


@pytest.mark.alone
@pytest.mark.timeout(120 + HEALTHY_STEPS)
def test_no_false_alarm_on_a_loaded_machine(runs, load):
    tiny = ("grid.pipelines=2", "grid.microbatches=1", "model.layers=1", "control.hang_s=2", "train.audit_every=10")
    summary = runs.train("small", overrides=(*tiny, f"train.steps={HEALTHY_STEPS}"))
    for process in load:
        assert process.status() == psutil.STATUS_RUNNING, "the machine was not loaded"
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    alarms = [
        event
        for event in events
        if isinstance(event, Detected | Suspected) or (isinstance(event, Installed) and event.generation > 1)
    ]
    assert alarms == []
    audits = [kind for event in events if isinstance(event, StepOps) for kind, *_ in event.besides if kind == "audit"]
    assert len(audits) == HEALTHY_STEPS // 10
    assert (summary.steps, summary.generations) == (HEALTHY_STEPS, 1)
