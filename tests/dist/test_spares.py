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
CHECKPOINTED = ("checkpoint.every=4", "checkpoint.synchronous=true", "checkpoint.keep=20")


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
    faults = [PACE, "kill:1.1@2:backward", "kill:3.0@40:forward"]
    summary = runs.survives("small", *faults, overrides=("train.steps=80", "resilience.spares=2"))
    assert replaced(summary) == {"1.1": "3.0", "3.0": "3.1"}
    assert all(failure.replaced_s > failure.resumed_s for failure in summary.report.failures)
    assert len(events_of(summary.run_dir, WorkerReady)) == 8, "no process was started in the run"
    assert computed_last(summary) == {"0.0", "0.1", "1.0", "2.0", "2.1", "3.1"}


def test_a_whole_node_is_replaced_by_the_spares_of_another(runs):
    """That of 2.0 and 2.1 had room for two spares, which are lost with it; the other two have a node of their own."""
    overrides = ("resilience.spares=4", "grid.workers_per_node=4", "train.technique=staggered")
    summary = runs.survives("small", "slow:0.0@3:6x", "kill-node:1@20:update", overrides=overrides)
    assert replaced(summary) == {"2.0": "3.2", "2.1": "3.3", "3.0": None, "3.1": None}


def test_a_layer_that_nobody_holds_any_more_is_brought_by_spares_and_a_resumed_run_has_them_again(runs):
    """All go back to the last checkpoint in the whole grid, though nobody is waited for."""
    healthy = runs.healthy("small")
    faults = [PACE, *(f"kill:{pipeline}.1@30:forward" for pipeline in range(3))]
    summary = runs.survives("small", *faults, overrides=(*CHECKPOINTED, "resilience.spares=3"), healthy=healthy)
    assert set(replaced(summary).values()) == {"3.0", "3.1", "3.2"}
    assert not [event for event in events_of(summary.run_dir, Notice) if "shrinks" in event.text]
    faults, options = ["slow:2.0@28:6x", "kill:1.1@29:backward"], {"resume": f"{summary.run_dir}@28"}
    again = runs.survives("small", *faults, overrides=("resilience.spares=1",), healthy=healthy, **options)
    assert (again.resumed_from, replaced(again)) == (28, {"1.1": "3.0"})


def test_those_that_die_or_go_while_they_wait_cost_nothing_and_another_outlives_the_coordinator(runs):
    run_dir, struck = runs.folder() / "run", {"3.1": signal.SIGKILL, "3.2": signal.SIGTERM}

    def strike(progress):
        there = {event.worker for event in events_of(run_dir, Notice) if "is here as a spare" in event.text}
        for event in events_of(run_dir, WorkerReady):
            if event.worker in struck.keys() & there:
                os.kill(event.pid, struck.pop(event.worker))

    faults = [PACE, "kill-coordinator@20:start", "kill:1.1@25:backward"]
    options = {"run_dir": run_dir, "on_progress": strike}
    summary, healthy = (
        runs.train("small", *faults, overrides=("resilience.spares=3",), **options),
        runs.healthy("small"),
    )
    assert (struck, summary.unfired) == ({}, ())
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert replaced(summary) == {"3.1": None, "1.1": "3.0"}
    assert [(event.worker, event.spare) for event in events_of(run_dir, Detected)] == [("3.1", True), ("1.1", False)]
    assert [event.worker for event in events_of(run_dir, Parted)] == ["3.2"]
    assert [event.generation for event in events_of(run_dir, CoordinatorReady)] == [0, 1], "nobody had recovered"
    assert [event.strategy for event in events_of(run_dir, Installed)][:2] == ["", "adaptive"]
