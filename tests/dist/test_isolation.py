"""Jobs whose nodes run in network namespaces of their own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.runtime.agent import Agent
from holdfast.telemetry.events import WorkerReady, read_events

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip` (iproute2)"),
]


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
