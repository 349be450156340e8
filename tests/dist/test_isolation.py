"""Jobs whose nodes run in network namespaces of their own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.core.ids import WorkerId
from holdfast.runtime.agent import Agent
from holdfast.telemetry.events import Detected, Notice, WorkerReady, read_events

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip` (iproute2)"),
]

VICTIM = WorkerId(1, 2)
NODE = 6


def test_a_job_through_namespaces_ends_in_the_same_bits(runs, executed_as_ordered):
    run_dir = runs.folder()
    networks = {}

    def look(progress):
        for _, event in read_events(run_dir / "events.jsonl"):
            if isinstance(event, WorkerReady):
                networks[event.worker] = Path(f"/proc/{event.pid}/ns/net").readlink()

    outcome = Agent(job=runs.job("gpt"), run_dir=run_dir, isolate=True, on_progress=look).run()
    assert outcome.outcome == "done"
    executed_as_ordered(run_dir)
    assert outcome.weights_sha256 == runs.healthy("gpt").weights_sha256
    assert outcome.state_sha256 == runs.healthy("gpt").state_sha256
    assert len(networks) == 12
    assert len({*networks.values(), Path("/proc/self/ns/net").readlink()}) == 13, "each its own, none the host's"


@pytest.mark.parametrize("healed", [False, True], ids=["for good", "healed later"])
def test_a_worker_whose_link_is_cut_ends_itself_and_the_others_go_on(runs, executed_as_ordered, healed):
    """Nobody is killed and no connection is closed: packets are lost, and that is all that anyone gets to see."""
    run_dir = runs.folder()
    done = []

    def cut_and_heal(progress):
        if progress.step == 1 and not done:
            agent._cut(NODE)
            done.append("cut")
        if healed and progress.generation == 2 and done == ["cut"]:
            agent._heal(NODE)
            done.append("healed")

    job = runs.job("gpt", ("control.reattach_s=1",))
    agent = Agent(job=job, run_dir=run_dir, isolate=True, on_progress=cut_and_heal)
    outcome = agent.run()
    assert done == ["cut", "healed"][: 1 + healed]
    assert outcome.outcome == "done"
    assert outcome.generations == 2
    executed_as_ordered(run_dir)
    assert outcome.weights_sha256 == runs.healthy("gpt").weights_sha256
    assert outcome.state_sha256 == runs.healthy("gpt").state_sha256
    events = [event for _, event in read_events(run_dir / "events.jsonl")]
    told = [event.text for event in events if isinstance(event, Notice) and event.worker == str(VICTIM)]
    assert len(told) == 1
    assert told[0].startswith("ends itself: coordinator at 10.77.0.1:")
    assert [event.worker for event in events if isinstance(event, Detected)] == [str(VICTIM)]
