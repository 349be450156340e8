"""``holdfast inspect`` of a run that is not over: how far it is, once or until it ends."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from tests.waiting import LIMIT_S

from holdfast.cli import following as at_following
from holdfast.cli.main import main
from holdfast.errors import StoreAway
from holdfast.runtime.rundir import RunDirLock, owner
from holdfast.telemetry.events import Detected, EventLog, FaultInjected, Installed, JobEnded, JobStarted, StepOps

NAMES = ("0.0", "1.0", "2.0")
DONE = JobEnded(outcome="done", step=10)


def step(worker, number, generation=1):
    return StepOps(worker=worker, generation=generation, step=number, loss=2.0, omitted=False, ops=())


@pytest.fixture
def run(tmp_path):
    """A job of three workers that has just done two of its ten steps; this process runs it."""
    with RunDirLock(tmp_path) as claim:
        claim.take()
        log, now = EventLog(tmp_path / "events.jsonl"), time.monotonic()
        log.write(now - 30, JobStarted(name="j", workers=3, steps=10, samples_per_step=8, wall_time=0.0))
        log.write(now - 29, Installed(generation=1, workers=NAMES, strategy=""))
        for number in range(2):
            for name in NAMES:
                log.write(now - 5 + number, step(name, number))
        yield tmp_path, log, claim
        log.close()


def lose_one(log):
    log.write(time.monotonic(), FaultInjected(worker="1.0", kind="kill", step=2, point="start", spec="kill:1.0@2"))
    log.write(time.monotonic(), Detected(worker="1.0", how="signal 9", generation=1))


@contextlib.contextmanager
def following(folder, stdout=subprocess.PIPE):
    command = [sys.executable, "-m", "holdfast", "inspect", str(folder), "--follow"]
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(lines, pattern):
    """What was read, as far as the first line with this pattern."""
    told = []
    for line in lines:
        told.append(line.rstrip("\n"))
        if re.search(pattern, line):
            return told
    raise AssertionError(f"ended without {pattern}: {told}")


def test_a_running_job_is_said_to_run_and_how_far_it_is(run, capsys):
    folder, log, _ = run
    lose_one(log)
    assert main(["inspect", str(folder)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert re.fullmatch(
        rf"running \(process {os.getpid()}\): 2 of 10 steps done, 0\.\d\d steps/s over the last minute, 0:00:\d\d left"
        r", 2 of 3 workers",
        line,
    )
    assert main(["inspect", str(folder), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)["running"]
    assert (told["process"], told["done"], told["steps"], told["alive"]) == (os.getpid(), 2, 10, 2)
    assert told["left_s"] == pytest.approx(8 / told["steps_per_s"])


@pytest.mark.parametrize("how", ["ended", "gone"])
def test_a_job_that_has_ended_or_has_no_process_does_not_run(run, capsys, how):
    folder, log, claim = run
    if how == "ended":
        log.write(time.monotonic(), JobEnded(outcome="done", step=10))
    else:
        claim.__exit__(None, None, None)
    assert main(["inspect", str(folder)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line == {"ended": "ended: done at step 10", "gone": "it has not ended, or was killed"}[how]


def test_a_directory_is_nobodys_once_its_process_is_another(tmp_path):
    assert owner(tmp_path) is None
    with RunDirLock(tmp_path) as claim:
        claim.take()
        assert owner(tmp_path) == os.getpid()
        claim.take()
    assert owner(tmp_path) is None
    (tmp_path / "lock").write_text(f"{os.getpid()}\n")  # left by a process whose number is ours now
    assert owner(tmp_path) is None


def test_what_happens_is_told_until_the_job_is_done(run):
    folder, log, _ = run
    with following(folder) as process:
        assert read_until(process.stdout, "running")[0].endswith("job j: 3 workers, 10 steps of 8 samples")
        lose_one(log)
        told = read_until(process.stdout, "is lost")
        assert re.fullmatch(r" +\d+\.\d{3} s  FAULT kill strikes worker 1\.0 in step 2 at start", told[-2])
        assert re.fullmatch(r" +\d+\.\d{3} s  worker 1\.0 is lost: signal 9", told[-1])
        log.write(time.monotonic(), JobEnded(outcome="done", step=10))
        assert read_until(process.stdout, "ended")[-1].endswith("ended: done at step 10")
        assert process.wait(LIMIT_S) == 0
        assert process.stdout.read() == ""


def test_an_outcome_that_is_not_done_is_no_success(run):
    folder, log, _ = run
    log.write(time.monotonic(), JobEnded(outcome="raised", step=2))
    assert main(["inspect", str(folder), "--follow"]) == 1


def test_a_job_that_is_killed_is_not_followed_for_ever(run):
    folder, _, claim = run
    with following(folder) as process:
        read_until(process.stdout, "running")
        claim.__exit__(None, None, None)
        assert read_until(process.stdout, "killed") == ["it has not ended, or was killed: no process runs it"]
        assert process.wait(LIMIT_S) == 1


def test_whoever_ends_a_job_elsewhere_may_do_so_before_it_is_written_down(run, monkeypatch, capsys):
    """What is decided is seen sooner than what agents write."""
    folder, log, claim = run
    claim.__exit__(None, None, None)
    monkeypatch.setattr(at_following.time, "sleep", lambda seconds: log.write(time.monotonic(), DONE))
    assert main(["inspect", str(folder), "--follow"]) == 0
    assert capsys.readouterr().out.endswith("ended: done at step 10\n")


def away(run_dir):
    raise StoreAway("etcd://h:1: no answer")


def test_a_store_that_is_away_hides_nothing(run, monkeypatch, capsys):
    folder, _, claim = run
    claim.__exit__(None, None, None)
    monkeypatch.setattr(at_following, "led_elsewhere", away)
    assert main(["inspect", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "job j: 3 workers, 10 steps of 8 samples" in told
    assert "whether its job goes on elsewhere is not known: etcd://h:1: no answer" in told


def test_a_job_that_was_led_elsewhere_is_followed_while_its_store_is_away(run, monkeypatch, capsys):
    folder, log, claim = run
    claim.__exit__(None, None, None)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        monkeypatch.setattr(at_following, "led_elsewhere", away)
        if len(slept) == 2:
            log.write(time.monotonic(), DONE)

    monkeypatch.setattr(at_following, "led_elsewhere", lambda run_dir: True)
    monkeypatch.setattr(at_following.time, "sleep", sleep)
    assert main(["inspect", str(folder), "--follow"]) == 0
    told = capsys.readouterr().out
    assert "running (led from another machine): 2 of 10 steps done" in told
    assert told.endswith("ended: done at step 10\n")


def test_ctrl_c_ends_the_following_and_nothing_else(run):
    folder, _, _ = run
    with following(folder) as process:
        read_until(process.stdout, "running")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
        assert process.stderr.read() == "", "no word of processes that are ended"


def test_on_a_terminal_one_line_is_replaced(run):
    folder, log, _ = run
    ours, theirs = pty.openpty()
    try:
        with following(folder, stdout=theirs) as process:
            seen = ""
            while seen.count("2 of 10 steps done") < 2:
                seen += os.read(ours, 1 << 16).decode()
            assert re.search(r"\r\x1b\[Krunning \(process \d+\): 2 of 10 steps done[^\n]*\r\x1b\[Krunning", seen)
            log.write(time.monotonic(), JobEnded(outcome="done", step=10))
            assert process.wait(LIMIT_S) == 0
            assert os.read(ours, 1 << 16).decode().endswith("ended: done at step 10\r\n")
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("more", [["--all"], ["--format", "svg"], ["--perfetto"], ["--step", "1"]])
def test_what_is_told_of_a_whole_run_is_not_followed(tmp_path, capsys, more):
    assert main(["inspect", str(tmp_path), "--follow", *more]) == 2
    assert capsys.readouterr().err.startswith("holdfast: --follow: tells what happens as it does")


@pytest.mark.parametrize("folder", [".", "nothing/here"])
def test_where_there_is_no_run_nothing_is_followed(tmp_path, capsys, folder):
    assert main(["inspect", str(tmp_path / folder), "--follow"]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_a_job_that_is_about_to_begin_is_waited_for(tmp_path, monkeypatch, capsys):
    """Its process has made the directory, but not said yet that it is its own, nor begun a log."""
    (tmp_path / "lock").touch()

    def begin(seconds):
        log = EventLog(tmp_path / "events.jsonl")
        log.write(time.monotonic(), JobEnded(outcome="done", step=10))
        log.close()

    monkeypatch.setattr(at_following.time, "sleep", begin)
    assert main(["inspect", str(tmp_path), "--follow"]) == 0
    assert capsys.readouterr().out.endswith("ended: done at step 10\n")
