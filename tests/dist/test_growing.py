"""Strategy `templates` on real processes: who leaves hands over first, who comes makes the grid grow, too few stop."""

from __future__ import annotations

import pytest

from holdfast.errors import TooFewWorkers
from holdfast.telemetry.events import Agreed, HandingOver, Installed, Notice, Parted, read_events

pytestmark = pytest.mark.dist

JOB = ("grid.microbatches=4", "train.steps=80")
TEMPLATES = (*JOB, "resilience.strategy=templates")


def events_of(summary, *kinds):
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kinds)]


def survived(runs, *faults, overrides=()):
    return runs.survives("small", *faults, overrides=(*TEMPLATES, *overrides), healthy=runs.healthy("small", JOB))


def told(summary):
    return [event.text for event in events_of(summary, Notice) if event.worker == "coordinator"]


def test_whoever_comes_for_no_place_makes_the_grid_grow(runs):
    summary = survived(runs, "join:new@3", "join:new@4")
    assert told(summary)[-1].startswith("8 workers become pipelines of 2 + 2 + 2 + 2: steps are ")
    assert {len(event.workers) for event in events_of(summary, Installed)} >= {6, 8}
    assert len(events_of(summary, Agreed)) == 1, "nothing is run again"


def test_whoever_leaves_hands_its_layers_over_first(runs):
    summary = survived(runs, "leave:1.1@3:forward", overrides=("resilience.smallest_pipeline=1",))
    kinds = [type(event) for event in events_of(summary, HandingOver, Parted)]
    assert kinds == [HandingOver, Parted]
    assert len(events_of(summary, Agreed)) == 1, "nothing is run again"


def test_one_comes_another_leaves_and_a_third_dies(runs):
    summary = survived(
        runs, "join:new@3", "leave:1.1@3", "kill:0.0@12:backward", overrides=("resilience.smallest_pipeline=1",)
    )
    assert len(events_of(summary, Parted)) == 1
    assert len(events_of(summary, Agreed)) == 2, "only the death has interrupted a step"


def test_with_too_few_left_all_is_saved_and_the_job_ends(runs):
    """Step 4, if somebody had not ended it as 1.1 was in the next one already: all go back to what everybody has."""
    tolerating = (*TEMPLATES, "resilience.tolerate=2")
    with pytest.raises(TooFewWorkers, match=r"5 workers are left, and 6 are needed .*; step [45] is saved in .*final"):
        runs.train("small", "kill:1.1@5:backward", overrides=tolerating)
    allowed = survived(runs, "kill:1.1@5:backward", overrides=("resilience.tolerate=2", "resilience.degraded=allow"))
    assert allowed.steps == 80
