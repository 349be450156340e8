"""Whether what an earlier attempt left says that it was done."""

import json

import pytest

from holdfast.runtime.train import _done_before, _summarise
from holdfast.telemetry.events import EventLog, JobEnded

HASHED = {"steps": 8, "generations": 2, "weights_sha256": "a", "state_sha256": "b"}
UNHASHED = {**HASHED, "weights_sha256": None, "state_sha256": None}


@pytest.mark.parametrize(
    ("summary", "outcome", "done"),
    [
        (HASHED, "done", True),
        (HASHED, None, True),
        (UNHASHED, "done", True),
        (UNHASHED, "lost", False),
        (UNHASHED, None, False),
        (None, "done", False),
    ],
)
def test_its_hashes_say_so_or_its_last_event(tmp_path, summary, outcome, done):
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps({**summary, "more": 1}))
    if outcome is not None:
        log = EventLog(tmp_path / "events.jsonl")
        log.write(0.0, JobEnded(outcome=outcome, step=8))
        log.close()
    found = _done_before(tmp_path)
    assert (found is not None) == done
    if found is not None:
        assert (found.step, found.generations, found.weights_sha256) == (8, 2, (summary or {})["weights_sha256"])


def test_why_it_has_no_hashes_is_still_told(tmp_path):
    why = "they could not be computed"
    reasons = {"weights_sha256": why, "state_sha256": why, "steps_per_s": "events are missing"}
    (tmp_path / "summary.json").write_text(json.dumps({**UNHASHED, "reasons": reasons}))
    log = EventLog(tmp_path / "events.jsonl")
    log.write(0.0, JobEnded(outcome="done", step=8))
    log.close()
    summary = _summarise(tmp_path, _done_before(tmp_path), (), done_before=True)
    assert (summary.weights_sha256, summary.reasons["weights_sha256"], summary.reasons["state_sha256"]) == (
        None,
        why,
        why,
    )


def test_a_summary_that_was_being_written_is_made_again(tmp_path):
    (tmp_path / "summary.json").write_text('{"steps": 8, "gener')
    assert _done_before(tmp_path) is None
