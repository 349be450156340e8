"""Whether what an earlier attempt left says that it was done."""

import contextlib
import json
from pathlib import Path

import pytest

from holdfast.runtime.launch.ending import JobOutcome
from holdfast.runtime.summary import done_before, events_of, summarise, write_summary
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
    found = done_before(tmp_path, pytest.fail)
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
    summary = summarise(tmp_path, done_before(tmp_path, pytest.fail), (), done_before=True)
    assert (summary.weights_sha256, summary.reasons["weights_sha256"], summary.reasons["state_sha256"]) == (
        None,
        why,
        why,
    )


DAMAGED = {
    "cut": b'{"steps": 8, "gener',
    "empty": b"",
    "of others": b'{"steps": "many"}',
    "no text": b'{"steps": 8, "more": "\xff", "\xff',
    "nested": b'{"more": ' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_summary_is_one_line_and_made_again(tmp_path, data):
    path, told = tmp_path / "summary.json", []
    path.write_bytes(data)
    assert done_before(tmp_path, told.append) is None
    (line,) = (event.text for event in told)
    assert line.startswith(f"{path}: cannot be read, what it tells is made again: ")
    assert "\n" not in line


@pytest.mark.parametrize("spoil", [lambda log: log.write_bytes(b"\xff\n" + b"[" * 5000 + b"\n"), Path.mkdir, None])
def test_the_damaged_log_of_an_attempt_is_as_none(tmp_path, spoil):
    if spoil is not None:
        spoil(tmp_path / "events.jsonl")
    assert events_of(tmp_path) == []


def test_a_log_that_is_nested_too_deeply_is_as_none(tmp_path):
    line = b'{"time":0.0,"data":{"event":"job_ended","outcome":"done","step":1},"more":' + b"[" * 5000 + b"]" * 5000
    (tmp_path / "events.jsonl").write_bytes(line + b"}\n")
    assert events_of(tmp_path) == []


def test_a_summary_that_does_not_fit_the_disk_is_one_line_and_leaves_no_part(tmp_path, make_disk):
    disk, told = make_disk("64k"), []
    with contextlib.suppress(OSError):
        (disk / "filler").write_bytes(b"x" * 70000)
    done = JobOutcome(outcome="done", detail="", step=1, directory=str(tmp_path), generations=1)
    path = disk / "summary.json"
    write_summary(summarise(disk, done, ()), told.append)
    assert [event.text for event in told] == [f"{path}: cannot be written: No space left on device"]
    assert not path.exists()
    (disk / "filler").unlink()
    write_summary(summarise(disk, done, ()), pytest.fail)
    assert json.loads(path.read_bytes())["steps"] == 1
