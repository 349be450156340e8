"""Jobs that a real Slurm runs on several nodes of which some are gone before the job is done."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys

import psutil
import pytest
from tests.dist.conftest import JOBS, LOOP_SCRIPT, check_executed
from tests.slurm import needs_slurm, slurm
from tests.waiting import LIMIT_S, until

from holdfast import parse_job
from holdfast.config.load import dump_job
from holdfast.telemetry.events import Checkpointed, Detected, JobStarted, StepOps, WorkerReady
from holdfast.telemetry.story import read_story

pytestmark = [pytest.mark.dist, needs_slurm]

__all__ = ["slurm"]

LONGER = "train.steps=260"
"""Whoever is asked to come has come by then."""


class Launched:
    """A job that was launched on such a cluster."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        self.run_dir = folder / "runs" / "small"

    def launch(self, *words):
        """Submits it."""
        said = self.holdfast("launch", "--on", "slurm", "--dry-run", *words)
        (path,) = self.folder.glob("*.slurm.sh")
        assert said.endswith(f"submit it by: sbatch {path.name}\n")
        said = self.cluster_says("sbatch", path.name)
        self.number = re.fullmatch(r"Submitted batch job (\d+)\n", said)[1]

    def holdfast(self, *words):
        return self.cluster_says(sys.executable, "-m", "holdfast", *map(str, words))

    def cluster_says(self, *words):
        environment = {**self.cluster.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def events(self, kind):
        if not (self.run_dir / "events.jsonl").exists():
            return []
        return [event for _, event in read_story(self.run_dir) if isinstance(event, kind)]

    def until(self, condition):
        return until(condition, self.story)

    def ran(self, step):
        self.until(lambda: any(event.step >= step for event in self.events(StepOps)))

    def nodes(self):
        """Those that whoever leads knows."""
        status = json.loads(self.holdfast("status", self.run_dir, "--format", "json"))
        return {node["name"] for node in status["nodes"]}

    def lost(self, number):
        self.until(lambda: len({event.worker for event in self.events(Detected)}) >= number)

    def story(self):
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs) + self.cluster.said()

    def stands_by(self, *nodes, since=""):
        """Waits until a coordinator stands by on each of these nodes; ``since``: what is to be said there before."""
        for node in nodes:
            self.until(lambda node=node: re.search(f"(?s){since}.*a coordinator stands by at", self.said_by(node)))

    def said_by(self, node):
        return "".join(path.read_text() for path in self.folder.glob(f"*-{node}.0.log"))

    def said(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    @contextlib.contextmanager
    def held(self, *nodes):
        """One worker of these nodes is stopped meanwhile, so that the job does not end."""
        stopped = self.until(lambda: self._stopped(nodes))
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # what is wrong with that, what follows shows
                stopped.resume()

    def _stopped(self, nodes):
        for event in reversed(self.events(WorkerReady)):
            if event.node in nodes:
                with contextlib.suppress(psutil.NoSuchProcess):  # one that was on its way may have ended
                    process = psutil.Process(event.pid)
                    process.suspend()
                    return process
        return None

    def idle(self, *nodes):
        """Slurm has these nodes back, and no others."""
        self.until(lambda: {node for node, state in self.cluster.states().items() if state == "idle"} == {*nodes})

    def summary(self):
        """How the job has ended, once it has, and Slurm has its nodes back."""
        self.until((self.run_dir / "summary.json").exists)
        self.until(lambda: not self.cluster.job_states())
        return json.loads((self.run_dir / "summary.json").read_text())


@pytest.fixture
def launched(slurm, tmp_path):
    def make(nodes, *overrides):
        job = parse_job(JOBS["small"], (LONGER, "control.hang_s=200", "checkpoint.every=10", *overrides))
        (tmp_path / "small.yaml").write_text(dump_job(job))
        return Launched(slurm(nodes), tmp_path)

    return make


def test_nodes_fail_the_first_one_too(launched, runs):
    """Of three nodes and a spare one; the last two go on, though the script of the job is gone."""
    job = launched(4)
    job.launch("--slots", 2, "--spare-nodes", 1, "small.yaml")
    job.ran(3)
    used = {event.node for event in job.events(WorkerReady)}
    assert len(used) == 3
    second, *_ = sorted(used - {"n0"})
    others = sorted({"n1", "n2", "n3"} - {second})
    with job.held("n0"):
        job.cluster.kill_node(second)
        job.lost(2)
        job.stands_by(*others)
        job.cluster.kill_node("n0")
    job.lost(4)
    with job.held(*others):
        assert {*job.cluster.job_states().values()} == {"RUNNING"}
        job.until(lambda: job.nodes() == {*others})
    summary = job.summary()
    assert summary["weights_sha256"] == runs.healthy("small", (LONGER, "checkpoint.every=10")).weights_sha256
    job.idle(*others)
    check_executed(job.run_dir)


def test_a_notice_has_the_job_queued_again_and_processes_that_are_killed_come_back(launched, runs):
    job = launched(3)
    job.launch("--slots", 2, "small.yaml")
    job.ran(3)
    first = job.events(JobStarted)
    job.cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.until(lambda: job.events(JobStarted) not in ([], first))
    job.until(lambda: (job.run_dir / "attempts" / "0001" / "events.jsonl").exists())
    before = [event for _, event in read_story(job.run_dir / "attempts" / "0001")]
    assert any(isinstance(event, Checkpointed) for event in before)
    job.stands_by("n1", "n2", since="DUE TO JOB REQUEUE")
    job.until(lambda: job.events(StepOps))
    with job.held("n0"):
        _holdfast_on(job.cluster, "n0").kill()
    job.lost(2)
    leads = job.until(lambda: re.search(r"the coordinator on node (n[12]) leads now", job.said()))[1]
    other = {"n1": "n2", "n2": "n1"}[leads]
    with job.held(leads):
        job.until(lambda: "node n0 takes part in job small" in job.said())
        _holdfast_on(job.cluster, other).kill()
        job.lost(4)
        job.until(lambda: job.said().count(f"node {other} takes part in job small") >= 3)
    summary = job.summary()
    assert summary["weights_sha256"] == runs.healthy("small", (LONGER, "checkpoint.every=10")).weights_sha256
    assert "goes on from the checkpoint of step" in job.said()


def _holdfast_on(cluster, node):
    """The first process of the job on a node."""
    found = []
    for process in cluster.processes_of(node):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:3] == ["-m", "holdfast"]:
                found.append(process)
    return min(found, key=lambda process: process.create_time())


def test_a_job_that_is_cancelled_makes_a_checkpoint_first(launched):
    """All its processes are told to end, and killed a while later; nobody can be done without."""
    job = launched(2, "grid.pipelines=1", "grid.microbatches=18", "resilience.tolerate=0", "checkpoint.every=1000")
    job.launch("--slots", 1, "small.yaml")
    job.ran(3)
    job.cluster.ask("scancel", job.number)
    job.until(lambda: not job.cluster.job_states())
    made = max(event.step for event in job.events(Checkpointed))
    assert f"the checkpoint of step {made} is written; go on with" in job.said(), job.story()
    job.idle("n0", "n1")


def test_a_script_of_ones_own_runs_too(launched):
    job = launched(2)
    job.run_dir = job.folder / "runs" / "loop_script"
    words = ("--workers", 4, "--slots", 2, LOOP_SCRIPT, "--variant", "norm", "--steps", 20)
    job.launch(*words)
    summary = job.summary()
    alone = ("run", "--workers", 4, "--run-dir", job.folder / "alone", *words[4:])
    assert f"weights_sha256 {summary['weights_sha256']}" in job.holdfast(*alone)
    assert {event.node for event in job.events(WorkerReady)} == {"n0", "n1"}
