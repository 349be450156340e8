"""Runs of real processes, shared by the tests: each distinct failure-free run is made once per session."""

from __future__ import annotations

import copy
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast import Fault, Job, Summary, parse_job, train
from holdfast.control.store import StoredDecision
from holdfast.core.faults import FaultKind
from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import StepOps, read_events

JOBS = {
    "gpt": {
        "name": "gpt",
        "model": {"kind": "gpt", "layers": 3, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
        "data": {"kind": "text", "path": "stdlib"},
        "grid": {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 2},
        "optimizer": {"kind": "adamw", "lr": 1.0e-3, "weight_decay": 0.01},
        "train": {"steps": 4, "seed": 7},
    },
    "convnet": {
        "name": "convnet",
        "model": {"kind": "convnet", "width": 4},
        "data": {"kind": "digits"},
        "grid": {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 8},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "train": {"steps": 4, "seed": 3},
    },
}


class Runs:
    """Trains the small jobs, with and without faults, and compares."""

    def __init__(self, factory) -> None:
        self._factory = factory
        self._healthy: dict[tuple[str, ...], Summary] = {}

    def folder(self) -> Path:
        return self._factory.mktemp("run")

    def job(self, name: str, overrides: tuple[str, ...] = ()) -> Job:
        return parse_job(copy.deepcopy(JOBS[name]), overrides)

    def train(self, name: str, *faults: str, overrides: tuple[str, ...] = (), **options) -> Summary:
        """One run; what each worker executed is compared with its order."""
        planned = [Fault.parse(text) for text in faults]
        summary = train(self.job(name, overrides), run_dir=self.folder(), faults=planned, **options)
        check_executed(summary.run_dir)
        return summary

    def healthy(self, name: str, overrides: tuple[str, ...] = ()) -> Summary:
        """The run in which nothing fails."""
        key = (name, *overrides)
        if key not in self._healthy:
            self._healthy[key] = self.train(name, overrides=overrides)
        return self._healthy[key]

    def survives(
        self, name: str, *faults: str, overrides: tuple[str, ...] = (), healthy: tuple[str, ...] | None = None
    ) -> Summary:
        """One run with faults: each fired, each killed its target, and the bits are those of the healthy run.

        ``healthy``: overrides of the healthy run, where they need not be the same.
        """
        expected = self.healthy(name, overrides if healthy is None else healthy)
        parsed = [Fault.parse(text) for text in faults]
        summary = self.train(name, *faults, overrides=overrides)
        assert summary.unfired == ()
        assert sorted(summary.report.fired) == sorted(map(str, parsed))
        lost = sorted(str(fault.worker) for fault in parsed if fault.kind is FaultKind.KILL)
        assert sorted(failure.worker for failure in summary.report.failures) == lost
        assert summary.processes_restarted == len(parsed) - len(lost), "the coordinator's, and no worker's"
        assert summary.weights_sha256 == expected.weights_sha256
        assert summary.state_sha256 == expected.state_sha256
        assert summary.final_loss == expected.final_loss
        assert summary.steps == expected.steps
        return summary


def check_executed(run_dir: Path) -> None:
    """Every worker ran, in every step that it finished, exactly what the plan of that generation orders."""
    plans = stored_plans(run_dir)
    finished = [event for _, event in read_events(run_dir / "events.jsonl") if isinstance(event, StepOps)]
    assert finished
    for event in finished:
        order = plans[event.generation].orders.of(WorkerId.parse(event.worker))
        ran = [f"{kind}{pipeline}.{index}" for kind, pipeline, index, _, _ in event.ops]
        assert ran == [str(op) for op in order], f"{event.worker} in step {event.step}"


def stored_plans(run_dir: Path) -> dict:
    """The plans of all generations, as the coordinator stored them before it sent them."""
    with closing(sqlite3.connect(run_dir / "control.db")) as db:
        rows = db.execute("SELECT body FROM decisions").fetchall()
    decisions = [msgspec.json.decode(body, type=StoredDecision) for (body,) in rows]
    prepared = {each.upcoming.generation: each.upcoming.plan for each in decisions if each.upcoming is not None}
    return prepared | {decision.generation: decision.plan for decision in decisions}


@pytest.fixture(scope="session")
def executed_as_ordered():
    return check_executed


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory)
