"""However a job ends, no process of it is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.commands import holdfast
from tests.waiting import LIMIT_S, until

from holdfast.telemetry.events import CoordinatorReady, StepOps, WorkerReady, read_events

pytestmark = pytest.mark.dist

JOB = """
model: {kind: gpt, layers: 2, width: 8, heads: 2, context: 8}
data: {kind: text, path: stdlib}
grid: {pipelines: 2, stages: 2, microbatches: 2}
train: {steps: 100000}
control: {hang_s: 15}
"""


class Job:
    """A long job in a process of its own, and all processes below it."""

    def __init__(self, folder: Path, *arguments: str, job: str = JOB) -> None:
        self.run_dir = folder / "run"
        (folder / "job.yaml").write_text(job)
        command = [sys.executable, "-m", "holdfast", "train", str(folder / "job.yaml")]
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(self.run_dir), *arguments], stderr=subprocess.PIPE, text=True
        )

    def events(self) -> list:
        path = self.run_dir / "events.jsonl"
        return [event for _, event in read_events(path)] if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        until(lambda: any(isinstance(e, StepOps) and e.step >= step for e in self.events()), "a step", self.process)

    def worker_pids(self) -> list[int]:
        return [event.pid for event in self.events() if isinstance(event, WorkerReady)]

    def coordinator_pids(self) -> list[int]:
        return [event.pid for event in self.events() if isinstance(event, CoordinatorReady)]

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def start(tmp_path):
    jobs = []

    def make(*arguments):
        jobs.append(Job(tmp_path, *arguments))
        return jobs[-1]

    yield make
    for job in jobs:
        job.process.kill()
        job.process.communicate()


@pytest.fixture
def job(start):
    return start()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_process(start, number, code):
    job = start("--set", "resilience.spares=2")
    job.wait_for_step(1)
    family = job.family()
    assert len(family) >= 9, "agent, fork server, coordinator, four workers, two spares"
    job.process.send_signal(number)
    until(lambda: all(gone(p) for p in family), "the end of every process")
    returncode, errors = job.end()
    assert returncode == code
    assert "Traceback" not in errors
    assert "every process is ended" in errors


def test_nothing_is_left_when_the_agent_itself_is_killed(job):
    job.wait_for_step(1)
    family = job.family()
    stopped = psutil.Process(job.worker_pids()[0])
    stopped.suspend()  # even a worker that cannot run any more
    job.process.kill()
    until(lambda: all(gone(p) for p in family), "the end of every process")


def test_a_coordinator_killed_from_outside_is_started_again_and_one_that_cannot_live_ends_the_job(start):
    job = start("--set", "control.restart_window_s=900")
    job.wait_for_step(1)
    family = job.family()
    for number in range(1, 7):
        until(lambda number=number: len(job.coordinator_pids()) == number, "a coordinator")
        os.kill(job.coordinator_pids()[-1], signal.SIGKILL)
    until(lambda: all(gone(p) for p in family), "the end of every process")
    returncode, errors = job.end()
    assert returncode == 1
    assert "the coordinator died 6 times within 900 s, it is not started again; the last time: signal 9" in errors
    assert "Traceback" not in errors


def test_a_real_kill_from_outside_is_survived_and_what_happens_is_said_in_its_turn(tmp_path):
    job = Job(tmp_path, "--set", "train.steps=200", "--fault", "join:1.0@3", "--fault", "slow:0.0@4:3x")
    try:
        job.wait_for_step(3)
        victim = next(e for e in job.events() if isinstance(e, WorkerReady) and e.worker == "1.0")
        os.kill(victim.pid, signal.SIGKILL)
        returncode, errors = job.end()
        assert returncode == 0, errors
        summary = json.loads((job.run_dir / "summary.json").read_text())
        (failure,) = summary["failures"]
        assert (failure["worker"], failure["kind"]) == ("1.0", "death")
        assert failure["detected_s"] is None, "the time of a real death is not known"
        assert summary["generations"] == 4, "the loss, who comes enters, and has caught up"
        assert summary["steps"] == 200
        lines = iter(errors.splitlines())
        for begin in SAID:
            assert any(line.startswith(begin) for line in lines), f"{begin}, in its turn, in:\n{errors}"
    finally:
        job.process.kill()


SAID = (
    "loading PyTorch and trying out the model",
    "planning",
    "starting the coordinator",
    "starting workers",
    "waiting for the first step",
    "step 1/200 ",
    "holdfast: worker 1.0 is lost: process ended: signal 9",
    "holdfast: training goes on with 3 of 4 workers, ",
    "holdfast: worker 1.0 has come: it takes part from step ",
    "step 200/200 ",
)
"""How lines begin that come in this order, among others."""


def train(folder, *arguments):
    """The whole command, in this process."""
    (folder / "job.yaml").write_text(JOB)
    return holdfast("train", folder / "job.yaml", "--run-dir", folder / "run", *arguments)


def test_a_fault_that_never_fires_is_exit_code_4(tmp_path):
    """Worker 0.1 is dead before its second fault is due."""
    ended = train(tmp_path, "--set", "train.steps=5", "--fault", "kill:0.1@1", "--fault", "kill:0.1@3:update")
    assert ended.returncode == 4
    assert "kill:0.1@3:update" in ended.stderr


def test_no_owner_left_is_exit_code_3(tmp_path):
    ended = train(tmp_path, "--set", "train.steps=9", "--fault", "kill:0.1@1", "--fault", "kill:1.1@3")
    assert ended.returncode == 3
    assert "layer(s) 2, 3" in ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert sorted(p.name for p in (tmp_path / "run" / "final").iterdir()) == [
        "layer-0000.safetensors",
        "layer-0001.safetensors",
    ]
