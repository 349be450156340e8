"""The process that tells trackers: it ends with its job, and whatever is wrong with it is said and harms nobody."""

from __future__ import annotations

import errno
import os

import pytest
from tests.waiting import until

from holdfast.runtime.launch import tracked as module
from holdfast.runtime.launch.tracked import SAID, tracked
from holdfast.telemetry.events import EventLog, JobEnded, JobStarted


def started():
    return JobStarted(name="j", workers=1, steps=1, samples_per_step=1, wall_time=1.0)


@pytest.fixture
def said():
    return []


@pytest.fixture
def processes(monkeypatch):
    """Those that are started meanwhile."""
    found, popen = [], module.subprocess.Popen

    def start(*args, **options):
        found.append(popen(*args, **options))
        return found[-1]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    return found


def test_no_tracker_no_process(tmp_path, said, processes):
    with tracked(tmp_path, (), said.append, lambda: said.append("waits")):
        pass
    assert (said, processes, list(tmp_path.iterdir())) == ([], [], [])


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("lost", 1)])
def test_they_are_waited_for_until_they_were_told_that_the_job_has_ended(tmp_path, said, processes, outcome, code):
    with tracked(tmp_path, ("csv",), said.append, lambda: said.append("waits")):
        log = EventLog(tmp_path / "events.jsonl")
        log.write(1.0, started())
        log.write(2.0, JobEnded(outcome=outcome, step=1))
        log.close()
    assert processes[0].returncode == code
    assert (tmp_path / "trackers" / "csv" / "steps.csv").is_file()
    assert [each for each in said if each != "waits"] == []


def test_one_that_cannot_be_loaded_is_told_while_the_job_goes_on(tmp_path, said):
    with tracked(tmp_path, ("nowhere.py:Mine",), said.append, lambda: None):
        until(lambda: said)
    assert len(said) == 1
    assert said[0].startswith("trackers: --to: nowhere.py: No such file; expected ")


def test_those_that_do_not_end_are_ended_in_a_while(tmp_path, said, processes, monkeypatch):
    monkeypatch.setattr(module, "_END_S", 0.1)
    with tracked(tmp_path, ("csv",), said.append, lambda: said.append("waits")):
        until(lambda: (tmp_path / SAID).read_text())  # the job never begins
    assert said == [
        "waits",
        f"trackers have not been told all within 0.1 s: `holdfast track {tmp_path}` goes on with them",
    ]
    assert processes[0].returncode == 143


def test_whoever_interrupts_waits_for_nobody(tmp_path, said, processes):
    with tracked(tmp_path, ("csv",), said.append, lambda: None, interrupted=lambda: True):
        until(lambda: (tmp_path / SAID).read_text())
    assert processes[0].returncode == 143


def test_trackers_that_cannot_be_started_harm_nobody(tmp_path, said, monkeypatch):
    def full(*args, **options):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(module.subprocess, "Popen", full)
    with tracked(tmp_path, ("csv",), said.append, lambda: None):
        said.append("trains")
    assert said == ["trackers: cannot be started: [Errno 11] Resource temporarily unavailable", "trains"]


def test_a_job_that_fails_waits_for_nobody(tmp_path, said, processes):
    def failing():
        with tracked(tmp_path, ("csv",), said.append, lambda: None):
            until(lambda: (tmp_path / SAID).read_text())
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        failing()
    assert said == []
    assert processes[0].returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(processes[0].pid, 0)
