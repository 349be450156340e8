"""The last owner of a layer is killed: the processes that live go on from the last checkpoint, without a restart."""

from __future__ import annotations

import pytest

from holdfast.telemetry.events import Agreed, Installed, JobStarted, Notice, WorkerReady, read_events

pytestmark = pytest.mark.dist

EVERY_3 = ("checkpoint.every=3", "checkpoint.synchronous=true", "train.steps=9")
"""However slow the disk is, none is left out."""
STAGE_GONE = ["kill:0.1@4:start", "kill:1.1@5:forward", "kill:2.1@6:backward"]


def ends_like_the_healthy_run(runs, name, *faults, overrides, technique="1f1b", **options):
    summary = runs.train(name, *faults, overrides=(*overrides, f"train.technique={technique}"), **options)
    healthy = runs.healthy(name, overrides)
    assert summary.unfired == ()
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert (summary.final_loss, summary.steps) == (healthy.final_loss, healthy.steps)
    return summary


def events_of(summary, kind):
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kind)]


@pytest.mark.parametrize(("name", "technique"), [("gpt", "1f1b"), ("convnet", "1f1b"), ("gpt", "staggered")])
def test_nine_go_on_as_a_smaller_grid_in_place(runs, name, technique):
    overrides = EVERY_3
    summary = ends_like_the_healthy_run(runs, name, *STAGE_GONE, overrides=overrides, technique=technique)
    last = events_of(summary, Installed)[-1]
    assert last.strategy == "fallback"
    assert len(last.workers) <= 9
    assert events_of(summary, Agreed)[-1].step in (3, 6)
    started = events_of(summary, JobStarted)[0].workers
    assert len(events_of(summary, WorkerReady)) == started, "no process was started again"


def test_a_replacement_is_waited_for(runs):
    overrides = (*EVERY_3, "resilience.wait_for_replacement=300")
    summary = ends_like_the_healthy_run(runs, "gpt", *STAGE_GONE, "join:2.1@6", overrides=overrides)
    last = events_of(summary, Installed)[-1]
    assert "2.1" in last.workers
    assert len(last.workers) == 10


def test_a_damaged_checkpoint_gives_way_to_the_one_before(runs):
    """The newest is damaged, by the test, after it was committed and before anybody needs it."""
    run_dir, damaged = runs.folder(), []

    def damage(progress):
        if progress.step == 7 and not damaged:
            for path in run_dir.glob("checkpoints/step-00000006/layer-0002-*"):
                path.write_bytes(path.read_bytes()[:-1] + b"?")
                damaged.append(path)

    faults = ["kill:0.1@1:start", "kill:1.1@2:start", "kill:2.1@8:backward"]
    overrides = EVERY_3
    options = {"overrides": overrides, "on_progress": damage, "run_dir": run_dir}
    summary = ends_like_the_healthy_run(runs, "gpt", *faults, **options)
    assert len(damaged) == 1
    assert events_of(summary, Agreed)[-1].step == 3
    texts = [event.text for event in events_of(summary, Notice)]
    assert any("checkpoint of step 6 cannot be used" in text for text in texts)
