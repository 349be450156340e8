"""The process that computes the hashes dies when all is trained and saved: nothing of that is lost."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from holdfast import parse_job
from holdfast.runtime import agent as agents
from holdfast.runtime.agent import Agent, Outcome
from holdfast.runtime.forks import SERVER

TREE = {
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 1, "stages": 2, "microbatches": 1},
    "train": {"steps": 1},
}


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """A function from what stands in for the digest process to how a job that was done ends."""

    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # the processes import it, too

    def end(main):
        monkeypatch.setattr(agents, "digest_main", getattr(importlib.import_module("dying_digest"), main))
        done = Outcome(outcome="done", detail="", step=1, directory=str(tmp_path), generations=1)
        SERVER.start()
        agent = Agent(job=parse_job(TREE), run_dir=tmp_path)
        agent._server = SERVER.pid
        return agent._with_hashes(done)

    return end


def test_one_that_dies_is_started_again(hashed, tmp_path):
    outcome = hashed("die_the_first_time")
    assert (tmp_path / "died").exists(), "it did die"
    assert (outcome.weights_sha256, outcome.state_sha256, outcome.no_hashes) == ("weights", "state", "")


def test_one_that_dies_again_costs_the_hashes_and_it_is_said_where_the_layers_are(hashed, tmp_path):
    outcome = hashed("die_every_time")
    assert (tmp_path / "deaths").read_text() == "died\n" * 2
    assert (outcome.outcome, outcome.weights_sha256, outcome.state_sha256) == ("done", None, None)
    assert outcome.no_hashes == f"the process that computes them died twice; the layers are in {tmp_path}"
