"""What a script starts: as in plain Python while its worker lives, and gone with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.processes import lives
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("starting_script.py")


def command(tmp_path, what, *more):
    options = ["--workers", "2", "--run-dir", tmp_path / "run", *more, SCRIPT, tmp_path, what]
    return [sys.executable, "-m", "holdfast", "run", *map(str, options)]


def living(pids):
    """Those that are neither gone nor dead."""
    return [pid for pid in pids if lives(pid)]


def test_what_a_script_forks_is_as_in_plain_python_and_holds_nothing_of_its_worker(tmp_path):
    ran = subprocess.run(command(tmp_path, "look"), capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "told").read_text().splitlines() == [
        "0 sockets, 0 logs, handlers [True, True], []",
        "28 loaded, None chosen, True sockets here",
    ]
    assert "fork" not in ran.stderr.replace(str(tmp_path), ""), "nor does anybody speak of it"


def test_what_a_script_has_started_ends_with_its_worker_or_else_with_the_job(tmp_path):
    job = subprocess.Popen(command(tmp_path, "start"), stderr=subprocess.PIPE, text=True)
    pids = []
    try:
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 5, "their start")
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        until(lambda: len(living(pids)) <= 1, "the end, with the worker, of all but the one with a session of its own")
        assert job.poll() is None, "that was not the job's end"
        (tmp_path / "go").touch()
        _, errors = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, errors
        assert "holdfast: worker 1.0 is lost" in errors
        assert living(pids) == []
    finally:
        job.kill()
        for pid in living(pids):  # before the end of what is told is waited for: they may hold its pipe
            psutil.Process(pid).kill()
        job.communicate()


def test_a_signal_to_the_whole_group_lets_loaders_be_and_makes_a_checkpoint(tmp_path):
    """Before, it ended the processes of a data loader, and by that the worker."""
    more = ("--set", "checkpoint.every=1000")
    job = subprocess.Popen(command(tmp_path, "load", *more), stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until((tmp_path / "loads").exists, "a first batch")
        family = psutil.Process(job.pid).children(recursive=True)
        os.killpg(job.pid, signal.SIGTERM)
        _, errors = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 143, errors
        assert "is written; go on with" in errors
        assert "is lost" not in errors
        until(lambda: not living(each.pid for each in family), "the end of all")  # the agent's own end with it
    finally:
        job.kill()
        job.communicate()


def test_ctrl_z_stops_all_of_a_job_and_it_goes_on(tmp_path):
    job = subprocess.Popen(command(tmp_path, "load"), stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until((tmp_path / "loads").exists, "a first batch")
        job.send_signal(signal.SIGTSTP)
        me = psutil.Process(job.pid)
        until(lambda: me.status() == psutil.STATUS_STOPPED, "its stop")
        family = [each for each in me.children(recursive=True) if "resource_tracker" not in " ".join(cmdline_of(each))]
        assert len(family) >= 4, "fork server, coordinator, two workers"
        until(lambda: all(stopped_or_dead(each) for each in family), "the stop of all")
        job.send_signal(signal.SIGCONT)
        until(lambda: not any(stopped_or_dead(each) for each in family[:1]), "that the fork server goes on")
        job.terminate()
        _, errors = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 143, errors
        assert "is lost" not in errors
    finally:
        job.kill()
        job.communicate()


def cmdline_of(process):
    """Of one that has just ended, and that nobody can wait for as its parent is stopped, nothing."""
    try:
        return process.cmdline()
    except psutil.ZombieProcess:
        return []


def stopped_or_dead(process):
    return not process.is_running() or process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


def test_a_job_goes_on_when_whoever_reads_what_it_prints_goes_away(tmp_path):
    job = subprocess.Popen(command(tmp_path, "say"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert job.stdout.readline()
        job.stdout.close()  # long before any worker prints
        assert job.wait(LIMIT_S) == 0
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["failures"] == []
    finally:
        job.kill()
        job.wait()
