"""The planner's plans on real processes: halves of the backward pass apart, and the bits of 1F1B without failures."""

from __future__ import annotations

import pytest

from holdfast.telemetry.events import Notice, StepOps, read_events

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
    assert [event for event in events if isinstance(event, Notice)] == []
