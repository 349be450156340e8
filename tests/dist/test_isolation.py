"""Jobs whose nodes run in network namespaces of their own."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from tests.soak import some
from tests.waiting import until

from holdfast.core.ids import WorkerId
from holdfast.runtime.isolation import Networks
from holdfast.runtime.launch import launcher
from holdfast.runtime.launch.launcher import Launcher
from holdfast.runtime.launch.request import RunRequest
from holdfast.telemetry.events import Detected, Notice, Suspected, WorkerReady, read_events

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip` (iproute2)"),
]

LONG = ("train.steps=24",)
"""Steps enough that the job is not over when its launcher has heard of the first ones and does something about it."""
VICTIM = WorkerId(1, 2)
NODE = 6


def test_a_job_through_namespaces_ends_in_the_same_bits(runs, executed_as_ordered):
    run_dir = runs.folder()
    networks = {}

    def look(progress):
        for _, event in read_events(run_dir / "events.jsonl"):
            if isinstance(event, WorkerReady):
                networks[event.worker] = Path(f"/proc/{event.pid}/ns/net").readlink()

    request = RunRequest(job=runs.job("gpt"), run_dir=run_dir, isolate=True)
    outcome = Launcher(request=request, on_progress=look).run()
    assert outcome.outcome == "done"
    executed_as_ordered(run_dir)
    assert outcome.weights_sha256 == runs.healthy("gpt").weights_sha256
    assert outcome.state_sha256 == runs.healthy("gpt").state_sha256
    assert len(networks) == 12
    assert len({*networks.values(), Path("/proc/self/ns/net").readlink()}) == 13, "each its own, none the host's"


@pytest.fixture
def made(monkeypatch):
    """The networks that are made meanwhile."""
    networks = []

    def make(num_nodes):
        networks.append(Networks(num_nodes))
        return networks[-1]

    monkeypatch.setattr(launcher, "Networks", make)
    return networks


@pytest.mark.parametrize("healed", [False, True], ids=["for good", "healed later"])
def test_a_worker_whose_link_is_cut_ends_itself_and_the_others_go_on(runs, made, executed_as_ordered, healed):
    """Nobody is killed and no connection is closed: packets are lost, and that is all that anyone gets to see."""
    run_dir = runs.folder()
    job = runs.job("gpt", ("control.fence_grace_s=60", "control.reattach_s=1", *LONG))
    healthy = runs.healthy("gpt", LONG)
    done = []

    def told():
        events = [event for _, event in read_events(run_dir / "events.jsonl")]
        return [event.text for event in events if isinstance(event, Notice) and event.worker == str(VICTIM)]

    def cut_and_heal(progress):
        """Called by the launcher's thread, so the job ends only when it has returned from the last step."""
        if progress.step == 1 and not done:
            made[0].cut(NODE)
            done.append("cut")
        if healed and progress.alive < job.num_workers and done == ["cut"]:
            made[0].heal(NODE)
            done.append("healed")
        if progress.step == job.train.steps - 1:
            until(told)

    request = RunRequest(job=job, run_dir=run_dir, isolate=True)
    outcome = Launcher(request=request, on_progress=cut_and_heal).run()
    assert done == ["cut", "healed"][: 1 + healed]
    assert outcome.outcome == "done"
    executed_as_ordered(run_dir)
    assert outcome.weights_sha256 == healthy.weights_sha256
    assert outcome.state_sha256 == healthy.state_sha256
    events = [event for _, event in read_events(run_dir / "events.jsonl")]
    assert len(told()) == 1
    assert told()[0].startswith("ends itself: ")
    (lost,) = (event for event in events if isinstance(event, Detected))
    assert lost.worker == str(VICTIM)
    # The kernel forgets who has the worker's address, and closes the connection, if it was to look that up just then:
    # the job waits then for the worker to attach again.
    seen = r"no sign of life for \d\.\d s(, and others cannot reach it)?|connection closed for \d s"
    assert re.fullmatch(seen, lost.how), "others cannot, if they sent to it"
    assert outcome.generations == 2


def test_two_nodes_that_cannot_reach_each_other_go_on_without_one_of_them(runs, made, executed_as_ordered):
    """All others reach both, and so does the coordinator: nobody is dead, hung or cut off."""
    run_dir, done = runs.folder(), []

    def part(progress):
        if progress.step == 1 and not done:
            made[0].part(NODE, NODE - 1)
            done.append("parted")

    healthy, request = runs.healthy("gpt", LONG), RunRequest(job=runs.job("gpt", LONG), run_dir=run_dir, isolate=True)
    outcome = Launcher(request=request, on_progress=part).run()
    assert done == ["parted"]
    assert outcome.outcome == "done"
    executed_as_ordered(run_dir)
    assert outcome.weights_sha256 == healthy.weights_sha256
    assert outcome.state_sha256 == healthy.state_sha256
    events = [event for _, event in read_events(run_dir / "events.jsonl")]
    (lost,) = (event for event in events if isinstance(event, Detected))
    ends = {"1.1": "its node node-5 and node-6", "1.2": "its node node-6 and node-5"}
    assert lost.how == f"{ends[lost.worker]} cannot reach each other"
    assert {"1.1", "1.2"} == {
        end for event in events if isinstance(event, Suspected) for end in (event.worker, event.peer)
    }


SCHEDULED = [("forward", "1f1b"), ("reduce", "staggered"), ("update", "staggered"), ("commit", "1f1b")]


@pytest.mark.parametrize(("point", "technique"), some(SCHEDULED, SCHEDULED[1:3]))
def test_a_partition_scheduled_for_a_point_of_a_step(runs, point, technique):
    overrides = (f"train.technique={technique}",)
    summary = runs.survives("gpt", f"partition:1.2@2:{point}", overrides=overrides, healthy=runs.healthy("gpt"))
    assert summary.generations == 2


def test_a_whole_node_is_cut_off(runs):
    """Nodes of two workers: 1.2 and 1.3 go together."""
    overrides = ("grid.workers_per_node=2",)
    summary = runs.train("gpt", "partition:1.2@2:backward", overrides=overrides)
    assert summary.unfired == ()
    assert sorted(failure.worker for failure in summary.report.failures) == ["1.2", "1.3"]
    assert summary.weights_sha256 == runs.healthy("gpt").weights_sha256
    assert summary.state_sha256 == runs.healthy("gpt").state_sha256
