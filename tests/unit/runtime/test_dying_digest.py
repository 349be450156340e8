"""The process that computes the hashes fails when all is trained and saved: nothing of that is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.launch import ending
from holdfast.runtime.launch.ending import JobOutcome, with_hashes
from holdfast.runtime.node.entries import EntryPoint
from holdfast.runtime.node.local import LocalProcesses
from holdfast.runtime.node.signals import Signals
from holdfast.runtime.node.telling import Teller


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """A function from what stands in for the digest process to how a job that was done ends."""

    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # the processes import it, too

    def end(main, start_s=300.0, on_event=lambda event: None):
        monkeypatch.setattr(ending, "DIGEST", EntryPoint("digest", f"dying_digest:{main}"))
        done = JobOutcome(outcome="done", detail="", step=1, directory=str(tmp_path), generations=1)
        local = LocalProcesses(start_s=start_s, signals=Signals(), teller=Teller(on_event=on_event))
        local.start_server()
        return with_hashes(done, local, emulated=False)

    return end


def test_one_that_dies_is_started_again(hashed, tmp_path):
    outcome = hashed("die_the_first_time")
    assert (tmp_path / "died").exists(), "it did die"
    assert (outcome.weights_sha256, outcome.state_sha256, outcome.no_hashes) == ("weights", "state", "")


def test_one_that_dies_again_costs_the_hashes_and_it_is_said_where_the_layers_are(hashed, tmp_path):
    outcome = hashed("die_every_time")
    assert (tmp_path / "deaths").read_text() == "died\n" * 2
    assert (outcome.outcome, outcome.weights_sha256, outcome.state_sha256) == ("done", None, None)
    assert outcome.no_hashes == (
        "they could not be computed, in two tries: the digest ended without an answer: signal 9; "
        f"the layers are in {tmp_path}"
    )


def test_one_that_raises_is_tried_once_more_and_its_error_told(hashed, tmp_path):
    outcome = hashed("raise_every_time")
    assert (tmp_path / "deaths").read_text() == "raised\n" * 2
    assert (outcome.outcome, outcome.weights_sha256) == ("done", None)
    assert outcome.no_hashes.startswith(
        "they could not be computed, in two tries: OSError: [Errno 5] Input/output error"
    )
    assert outcome.no_hashes.endswith(f"; the layers are in {tmp_path}")
    assert "\n" not in outcome.no_hashes


def test_one_that_hangs_is_given_up_in_limited_time(hashed, tmp_path):
    told = []
    outcome = hashed("hang_every_time", start_s=1.5, on_event=told.append)
    pids = [int(pid) for pid in (tmp_path / "deaths").read_text().split()]
    assert len(pids) == 2, "it was tried once more"
    assert "the digest gave no answer within 2 s" in outcome.no_hashes
    texts = [event.text for event in told]
    assert "computing the hashes of what was trained" in texts, "whoever waits is told what for"
    assert any(text.endswith("they are computed once more") for text in texts)


def test_one_that_cannot_be_started_costs_the_hashes(hashed, tmp_path):
    """What all processes are forked from is gone, and so is the one that replaces it."""
    outcome = hashed("kill_the_server")
    assert (tmp_path / "deaths").read_text() == "killed\n" * 2
    assert "the fork server ended (signal 9)" in outcome.no_hashes
    assert outcome.no_hashes.endswith(f"; the layers are in {tmp_path}")
