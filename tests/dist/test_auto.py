"""`auto` on real processes, with a profile: other pipelines, the best way where layers have no owner, the same bits."""

from __future__ import annotations

import pytest

from holdfast.config.profiles import save_profile
from holdfast.core.profile import uniform_profile
from holdfast.telemetry.events import HandingOver, Held, Installed, Predicted, WorkerReady, read_events

pytestmark = pytest.mark.dist

LINE = ("grid.pipelines=1", "grid.stages=3", "grid.microbatches=4", "model.layers=6", "train.steps=12")
SAVED = ("checkpoint.every=3", "checkpoint.synchronous=true")


def events_of(summary, kind):
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kind)]


@pytest.fixture
def profiled(runs):
    """Keys of a job whose layers have a profile: these take so long that whatever is better is worth a handover."""
    layers = 6 + 2
    path = runs.folder() / "profile.json"
    save_profile(uniform_profile(layers, forward_s=1, backward_input_s=1, backward_weight_s=1), path)
    return (f"train.profile={path}", "resilience.failure_every_s=100000")


def test_where_a_layer_has_no_owner_ways_are_compared_and_the_best_one_is_taken(runs, profiled):
    healthy = runs.healthy("small", LINE)
    faults = ("kill:0.1@5:forward", "kill:0.0@8:backward")
    summary = runs.survives("small", *faults, overrides=(*LINE, *SAVED, *profiled), healthy=healthy)
    (told,) = events_of(summary, Predicted)
    assert len(told.steps) > 1
    assert max(told.steps, key=lambda way: way[1])[0] == told.chosen
    (held,) = events_of(summary, Held)
    assert held.chosen == told.chosen, "of one that is left nothing can be compared"
    assert [len(event.workers) for event in events_of(summary, Installed)][-1] == 1
    assert len(events_of(summary, WorkerReady)) == 3, "nobody was started anew"


def test_with_a_profile_other_pipelines_are_made_and_without_it_none(runs, profiled):
    job = ("grid.pipelines=2", "grid.stages=2", "grid.microbatches=4", "model.layers=6", "train.steps=16")
    healthy = runs.healthy("small", job)
    remade = runs.survives("small", "kill:1.1@2:backward", overrides=(*job, *profiled), healthy=healthy)
    assert events_of(remade, HandingOver)
    plain = runs.survives("small", "kill:1.1@2:backward", overrides=job, healthy=healthy)
    assert not events_of(plain, HandingOver)


def test_so_many_workers_begin_as_the_best_pipelines_of_them_with_the_same_bits(runs, profiled):
    job = ("grid.pipelines=2", "grid.stages=2", "grid.microbatches=3", "model.layers=6", "train.steps=4")
    healthy = runs.healthy("small", job)
    five = (*job, *profiled, "resilience.smallest_pipeline=2", "grid.workers=5")
    assert sorted(runs.job("small", five).grid.depths) == [2, 3]
    summary = runs.train("small", overrides=five)
    assert (summary.weights_sha256, summary.final_loss) == (healthy.weights_sha256, healthy.final_loss)
    assert len(events_of(summary, WorkerReady)) == 5
