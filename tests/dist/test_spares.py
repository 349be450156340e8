"""Real processes that wait for a place: they take those of lost workers, and nobody can tell from the result."""

from __future__ import annotations

import os
import signal

import pytest

from holdfast.telemetry.events import (
    CoordinatorReady,
    Detected,
    Installed,
    Notice,
    Parted,
    StepOps,
    WorkerReady,
    read_events,
)

pytestmark = pytest.mark.dist

PACE = "slow:2.0@3:6x"
"""From step 3 on most of each step is waiting, so that all is done long before the last step."""
CHECKPOINTED = ("train.steps=40", "checkpoint.every=4")


def events_of(run_dir, kind):
    return [event for _, event in read_events(run_dir / "events.jsonl") if isinstance(event, kind)]


def replaced(summary):
    """Who has computed in whose place."""
    return {failure.worker: failure.replaced_by for failure in summary.report.failures}


def computed_last(summary):
    """Who computed in the last step."""
    last = [e for e in events_of(summary.run_dir, StepOps) if e.step == summary.steps - 1]
    return {event.worker for event in last if event.ops}


def test_spares_take_the_places_of_the_lost_also_that_of_a_spare(runs):
    faults = [PACE, "kill:1.1@2:backward", "kill:3.0@30:forward"]
    summary = runs.survives("small", *faults, overrides=("resilience.spares=2",))
    assert replaced(summary) == {"1.1": "3.0", "3.0": "3.1"}
    assert all(failure.replaced_s > failure.resumed_s for failure in summary.report.failures)
    assert len(events_of(summary.run_dir, WorkerReady)) == 8, "no process was started in the run"
    assert computed_last(summary) == {"0.0", "0.1", "1.0", "2.0", "2.1", "3.1"}


def test_a_whole_node_is_replaced_by_the_spares_of_another(runs):
    """Those of the node that has three workers of the grid and a spare, by those of the node that has spares only."""
    overrides = ("resilience.spares=5", "grid.workers_per_node=4", "train.technique=staggered")
    summary = runs.survives("small", PACE, "kill-node:1@5:update", overrides=overrides)
    assert replaced(summary) == {"2.0": "3.2", "2.1": "3.3", "3.0": None, "3.1": None}


def test_a_spare_brings_a_layer_that_nobody_holds_any_more_also_to_a_job_that_was_resumed(runs):
    """All go back to the last checkpoint in the whole grid, though nobody is waited for."""
    faults = [f"kill:{pipeline}.1@10:forward" for pipeline in range(3)]
    healthy = runs.healthy("small", CHECKPOINTED)
    summary = runs.survives("small", *faults, overrides=(*CHECKPOINTED, "resilience.spares=3"), healthy=healthy)
    assert set(replaced(summary).values()) == {"3.0", "3.1", "3.2"}
    assert not [event for event in events_of(summary.run_dir, Notice) if "shrinks" in event.text]
    faults = [PACE.replace("@3", "@29"), "kill:1.1@29:backward"]
    overrides, resume = (*CHECKPOINTED, "resilience.spares=1"), f"{summary.run_dir}@28"
    again = runs.survives("small", *faults, overrides=overrides, healthy=healthy, resume=resume)
    assert (again.resumed_from, replaced(again)) == (28, {"1.1": "3.0"})


def test_spares_that_die_and_go_while_they_wait_cost_nothing_and_another_outlives_the_coordinator(runs):
    run_dir, struck = runs.folder() / "run", {4: ("3.1", signal.SIGKILL), 6: ("3.2", signal.SIGTERM)}

    def strike(progress):
        if progress.step in struck:
            worker, number = struck.pop(progress.step)
            (pid,) = [event.pid for event in events_of(run_dir, WorkerReady) if event.worker == worker]
            os.kill(pid, number)

    faults = [PACE, "kill-coordinator@12:start", "kill:1.1@20:backward"]
    summary = runs.train("small", *faults, overrides=("resilience.spares=3",), run_dir=run_dir, on_progress=strike)
    healthy = runs.healthy("small")
    assert (struck, summary.unfired) == ({}, ())
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert replaced(summary) == {"3.1": None, "1.1": "3.0"}
    assert [(event.worker, event.spare) for event in events_of(run_dir, Detected)] == [("3.1", True), ("1.1", False)]
    assert [event.worker for event in events_of(run_dir, Parted)] == ["3.2"]
    assert [event.generation for event in events_of(run_dir, CoordinatorReady)] == [0, 1], "nobody had recovered"
    assert [event.strategy for event in events_of(run_dir, Installed)][:2] == ["", "adaptive"]
