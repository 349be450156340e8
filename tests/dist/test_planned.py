"""The planner's plans on real processes: halves of the backward pass apart, and the bits of 1F1B without failures."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from holdfast.config.profiles import save_profile
from holdfast.core.profile import uniform_profile
from holdfast.telemetry.events import Notice, Scheduled, StepOps, read_events

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("name", "technique", "fault"),
    [
        ("gpt", "decoupled", "kill:1.2@2:backward"),
        ("gpt", "staggered", "kill:0.0@2:update"),
        ("convnet", "staggered", "kill:1.2@1:reduce"),
    ],
)
def test_a_kill_under_the_planners_plans(runs, name, technique, fault):
    survives_under_plans(runs, name, technique, fault, runs.healthy(name))


@pytest.mark.parametrize(
    ("technique", "fault"), [("decoupled", "kill:1.1@1:backward"), ("staggered", "kill:0.0@2:update")]
)
def test_a_kill_under_the_planners_plans_for_pipelines_that_are_not_alike(runs, technique, fault):
    """Two stages and five micro-batches beside three and three: the bits of one worker that has all of them."""
    alone = runs.healthy("unlike", ("grid.layout=[{stages: [6], microbatches: 8}]",))
    survives_under_plans(runs, "unlike", technique, fault, alone)


def survives_under_plans(runs, name, technique, fault, healthy):
    """The fault fires, the bits are those of the healthy run, and halves of the backward pass are apart throughout."""
    summary = runs.survives(name, fault, overrides=(f"train.technique={technique}",), healthy=healthy)
    ran: dict[int, set[str]] = {}
    for _, event in read_events(summary.run_dir / "events.jsonl"):
        if isinstance(event, StepOps):
            ran.setdefault(event.generation, set()).update(kind for kind, *_ in event.ops)
    assert len(ran) == 2
    assert all({"F", "I", "W"} <= kinds for kinds in ran.values()), "before the loss and after it"


def test_plans_are_made_ahead_while_training_runs(runs):
    """The library's process is of the least priority, and ends with the job; whoever dies, the bits are right."""
    overrides = ("train.technique=staggered", "train.steps=12", "resilience.tolerate=2")
    healthy = runs.healthy("gpt", ("train.steps=12",))
    summary = runs.survives("gpt", "kill:1.3@5:backward", "kill:0.2@9:forward", overrides=overrides, healthy=healthy)
    assert list((summary.run_dir / "plans").glob("*.plan"))
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    told = [(event.worker, event.text.partition(":")[0]) for event in events if isinstance(event, Notice)]
    assert told == [("probe", "sums")], "no library that failed"


ONE_BY_ONE = ("grid.pipelines=1", "grid.stages=2", "grid.microbatches=9")


@pytest.fixture
def known(tmp_path):
    """What changes a job of five layers to two workers that know what these cost."""
    path = tmp_path / "profile.json"
    seconds = (2.0, 2.0, 2.0, 3.0, 3.0)  # so that two stages take equally long
    rows = [uniform_profile(1, forward_s=each, backward_input_s=each, backward_weight_s=each) for each in seconds]
    save_profile(replace(rows[0], layers=tuple(row.layers[0] for row in rows)), path)
    return (*ONE_BY_ONE, f"train.profile={path}")


def scheduled(summary):
    """What is told of its technique, and the kinds of operations that were run."""
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    (told,) = [event for event in events if isinstance(event, Scheduled)]
    return told, {kind for event in events if isinstance(event, StepOps) for kind, *_ in event.ops}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there are no two processors, one for each worker")
def test_a_profile_chooses_how_steps_are_scheduled(runs, known):
    """The bits are those of 1F1B on another grid."""
    summary = runs.train("gpt", overrides=known)
    told, kinds = scheduled(summary)
    assert (told.technique, told.in_flight) == ("staggered", 4), "of a state of no size it may keep more"
    assert kinds >= {"F", "I", "W"}
    assert summary.weights_sha256 == runs.healthy("gpt").weights_sha256


def test_workers_that_share_a_processor_keep_to_1f1b(runs, known):
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        summary = runs.train("gpt", overrides=known)
    finally:
        os.sched_setaffinity(0, mine)
    told, kinds = scheduled(summary)
    assert (told.technique, kinds & {"I", "W"}) == ("1f1b", set())
    assert told.why.startswith("2 workers share 1 processor(s)")
    assert summary.weights_sha256 == runs.healthy("gpt").weights_sha256
