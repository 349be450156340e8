"""Pipelines of different length side by side, with different numbers of micro-batches: the bits of one worker alone."""

from __future__ import annotations

import pytest

from holdfast.control.chain.opening import plans_in
from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import Synced, read_events

pytestmark = pytest.mark.dist

ALONE = "grid.layout=[{stages: [6], microbatches: 8}]"
"""One worker, which has all layers and all micro-batches."""
TALL = (
    "grid.layout=[{stages: [2, 3, 1], microbatches: 3}, {stages: [1, 1, 4], microbatches: 2}, "
    "{stages: [1, 2, 1, 2], microbatches: 3}]"
)


@pytest.mark.parametrize(
    "faults",
    [
        ("kill:0.0@1:backward",),
        ("hang:1.1@1:forward",),
        ("leave:0.1@1:forward",),
        ("kill:0.0@1:forward", "kill:1.2@2:backward"),
    ],
    ids=["kill", "hang", "leave", "two losses"],
)
def test_whoever_is_lost_the_others_hold_its_layers_in_parts(runs, faults):
    runs.survives("unlike", *faults, overrides=("control.hang_s=2",), healthy=runs.healthy("unlike", (ALONE,)))


def test_one_comes_back_whose_layers_nobody_holds_just_so(runs):
    steps = "train.steps=16"
    alone = runs.healthy("unlike", (ALONE, steps))
    summary = runs.survives("unlike", "kill:1.1@1:backward", "join:1.1@3", overrides=(steps,), healthy=alone)
    synced = [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, Synced)]
    assert [event.worker for event in synced] == ["1.1"]
    assert list(plans_in(summary.run_dir / "control.db").values())[-1].orders.of(WorkerId(1, 1)), "it computes again"


@pytest.mark.parametrize("technique", ["1f1b", "staggered"])
def test_three_pipelines_of_three_three_and_four_stages(runs, technique):
    faults = ("kill:2.1@1:backward", "kill:0.2@2:forward")
    overrides = (TALL, f"train.technique={technique}")
    runs.survives("unlike", *faults, overrides=overrides, healthy=runs.healthy("unlike", (ALONE,)))


def test_it_goes_on_in_another_shape(runs):
    """From unlike pipelines to one worker, and from that to others that are unlike, of which one is lost."""
    alone = runs.healthy("unlike", (ALONE,))
    begun = runs.train("unlike", overrides=runs.EVERY_STEP)
    one = runs.train("unlike", overrides=(ALONE, *runs.EVERY_STEP), resume=f"{begun.run_dir}@2")
    other = runs.train("unlike", "kill:2.2@3:backward", overrides=(TALL,), resume=f"{one.run_dir}@3")
    assert other.unfired == ()
    assert {each.weights_sha256 for each in (begun, one, other)} == {alone.weights_sha256}
    assert {each.state_sha256 for each in (begun, one, other)} == {alone.state_sha256}
