"""Strategy `templates` on real processes: re-routed at once, other pipelines while all train, the same bits."""

from __future__ import annotations

import pytest

from holdfast.telemetry.events import Agreed, HandingOver, Installed, Notice, WorkerReady, read_events

pytestmark = pytest.mark.dist

JOB = ("train.steps=24", "model.layers=6")
TEMPLATES = (*JOB, "resilience.strategy=templates", "resilience.smallest_pipeline=3")


def events_of(summary, kind):
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kind)]


def survived(runs, *faults, overrides=()):
    healthy = runs.healthy("gpt", JOB)
    summary = runs.survives("gpt", *faults, overrides=(*TEMPLATES, *overrides), healthy=healthy)
    assert events_of(summary, HandingOver), "layers have moved"
    assert len(events_of(summary, WorkerReady)) == 12, "nobody was started anew"
    return summary


@pytest.mark.parametrize(
    ("technique", "faults"),
    [
        ("1f1b", ["kill:1.2@2:backward"]),
        ("decoupled", ["kill:1.2@2:backward"]),
        ("staggered", ["kill:1.2@2:backward", "kill:0.2@3:update"]),
    ],
)
def test_a_pipeline_that_has_lost_a_worker_is_cut_anew(runs, technique, faults):
    """Where updates are staggered, one loss of twelve is hidden by re-routing alone; two of one stage are not."""
    summary = survived(runs, *faults, overrides=(f"train.technique={technique}",))
    told = [e.text for e in events_of(summary, Notice) if "pipelines of" in e.text]
    assert told[-1].startswith(f"{12 - len(faults)} workers become pipelines of ")
    assert len(events_of(summary, Agreed)) == 1 + len(faults), "to begin, and after losses: not to change pipelines"
    assert [event.strategy for event in events_of(summary, Installed)][1] == "templates"


def test_two_kills_a_hang_and_one_more_while_layers_move(runs):
    survived(runs, "kill:1.2@2:backward", "kill:1.1@5:reduce", "hang:0.3@9:forward")
