"""Whole jobs on a device that computes late, in real processes: the CPU's bits, with and without losses.

Each process runs the operations of its device in an order of its own, and a race ends it: see tests/accelerator.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.soak import some

from holdfast.telemetry.events import Agreed, FaultInjected, Replaying, StepOps, Suspected, read_events

pytestmark = pytest.mark.dist
pytest.importorskip("torch", minversion="2.13", reason="the hook for devices written in Python is of torch 2.13")

LATE = f"train.device={Path(__file__).parents[1] / 'accelerator.py'}:Late"
CLIPPED, SCALED = "train.clip_norm=0.05", "train.loss_scale={}"
CHECKPOINTS = ("checkpoint.every=2", "checkpoint.synchronous=true")

SURVIVED = [
    ("gpt", ("kill:1.2@2:backward",), (CLIPPED,)),
    ("gpt", ("kill:1.1@1:forward", "kill:0.1@2:backward"), ("train.technique=staggered", SCALED)),
    ("convnet", ("kill:1.2@2:reduce",), ("train.technique=decoupled",)),
    ("gpt", ("kill:1.1@2:update", "join:1.1@3"), ()),
    ("gpt", ("kill:0.1@2:forward", "kill:1.1@2:forward", "kill:2.1@2:forward"), CHECKPOINTS),
    ("convnet", ("kill:1.0@2:commit",), ("train.audit_every=1",)),
]


@pytest.mark.parametrize(("name", "faults", "overrides"), some(SURVIVED, [SURVIVED[at] for at in (0, 3, 4)]))
def test_a_job_on_another_device_survives_with_the_bits_of_the_cpu(runs, name, faults, overrides):
    survived = runs.survives(name, *faults, overrides=(*overrides, LATE), healthy=runs.healthy(name, overrides))
    assert "accelerator.py:Late" in (survived.run_dir / "job.yaml").read_text()


STRAIGHT = ("control.carrier=device", "control.carry_from=64", "train.steps=40")
CARRIED = [
    ("gpt", ("kill:1.2@30:backward",), (CLIPPED,)),
    ("gpt", ("kill:1.1@20:forward", "kill:0.1@30:reduce"), ("train.technique=staggered",)),
    ("convnet", ("kill:1.2@30:update",), ("train.technique=decoupled",)),
    ("gpt", ("hang:1.2@30:backward",), ()),
    ("gpt", ("kill:1.2@20:commit", "join:1.2@24"), ("train.audit_every=8",)),
]


@pytest.mark.parametrize(("name", "faults", "overrides"), some(CARRIED, [CARRIED[at] for at in (0, 4)]))
def test_what_goes_from_device_to_device_has_the_bits_of_the_cpu(runs, name, faults, overrides):
    """Bodies that the host's memory never holds, before and behind losses."""
    healthy = runs.healthy(name, ("train.steps=40", *overrides))
    survived = runs.survives(name, *faults, overrides=(*STRAIGHT, *overrides, LATE), healthy=healthy)
    events = [event for _, event in read_events(survived.run_dir / "events.jsonl")]
    assert len({event.worker for event in events if isinstance(event, StepOps) and event.sent_carried}) >= 11
    faulty = {event.worker for event in events if isinstance(event, FaultInjected)}
    assert {event.peer for event in events if isinstance(event, Suspected)} <= faulty, "no group has failed by itself"


def test_layers_are_replayed_on_another_device(runs):
    grid = ("grid.pipelines=1", "grid.stages=4", "grid.microbatches=4", "train.steps=9", "checkpoint.every=5")
    overrides = (*grid, "checkpoint.synchronous=true")
    healthy = runs.healthy("gpt", overrides)
    survived = runs.train("gpt", "kill:0.2@7:backward", overrides=(*overrides, "logging.use=on", LATE))
    assert survived.unfired == ()
    assert (survived.weights_sha256, survived.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    events = [event for _, event in read_events(survived.run_dir / "events.jsonl")]
    assert any(isinstance(event, Replaying) for event in events)
    steps = [event.step for event in events if isinstance(event, Agreed)]
    assert steps == sorted(steps), "nobody but the lost went back"


def test_a_step_is_taken_back_on_another_device(runs):
    overrides = ("resilience.commit=undo", "resilience.step_log=false")
    healthy = runs.healthy("gpt")
    survived = runs.train("gpt", "kill:1.2@3:backward", overrides=(*overrides, LATE))
    assert survived.unfired == ()
    assert survived.generations == 2
    assert runs.distance(survived, healthy) <= 1e-6


LOOPS = [
    ("norm", ("kill:1.0@3:backward",)),
    ("scaled", ("kill:1.0@3:commit",)),
    ("tied", ("kill:0.0@2:forward", "kill:2.0@4:reduce")),
    ("own", ("kill:1.0@2:backward", "join:1.0@3")),
]


@pytest.mark.parametrize(("variant", "faults"), some(LOOPS, [LOOPS[0], LOOPS[3]]))
def test_a_loop_on_another_device_survives_with_the_bits_of_the_cpu(runs, variant, faults):
    name = f"loop-{variant}"
    survived = runs.survives(name, *faults, overrides=(LATE,), healthy=runs.healthy(name))
    assert "accelerator.py:Late" in (survived.run_dir / "job.yaml").read_text()
