"""The clock of the time in which a process ran: as a value, in a process that is stopped, and in one that is forked."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import LIMIT_S

from holdfast.control.awake import LATE_S, SLEEP_S, AwakeClock, AwakeTime

START = AwakeTime(awake_s=0.0, woke_at=100.0)


def test_time_between_wake_ups_that_come_in_time_counts():
    time_ = START
    for now in (100.1, 100.21, 100.4):
        time_ = time_.wake(now)
    assert time_.awake_s == pytest.approx(0.4)
    assert time_.at(100.5) == pytest.approx(0.5)


def test_a_pause_does_not_count_before_the_sleeper_has_woken_nor_after():
    """Of two threads that go on after a pause, the one that reads may be the first."""
    paused = START.wake(100.1)
    assert paused.at(107.0) == pytest.approx(0.1 + SLEEP_S + LATE_S)
    woken = paused.wake(107.0)
    assert woken.awake_s == paused.at(107.0)
    assert woken.at(107.05) == pytest.approx(woken.awake_s + 0.05)


def test_a_clock_that_is_read_before_the_value_does_not_go_back():
    assert START.at(99.0) == START.awake_s


steps = st.lists(st.tuples(st.booleans(), st.floats(0.0, 30.0)), max_size=40)


@given(steps)
def test_it_never_goes_back_and_never_faster_than_the_clock(steps):
    """Readings and wake-ups in any order, whatever the pauses in between; a value that is old may still be read."""
    now, value, stale, last = 100.0, START, START, 0.0
    for wakes, passed in steps:
        now += passed
        last, before = value.at(now), last
        assert before <= last <= before + passed + 1e-9
        assert stale.at(now) <= last
        if wakes:
            stale, value = value, value.wake(now)


@contextlib.contextmanager
def running(code):
    """A process that answers each line with what it reads of its clock."""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        yield it
        it.stdin.close()


READER = """
import sys, time
from holdfast.control.awake import AwakeClock
clock = AwakeClock()
clock()
for _ in sys.stdin:
    print(time.monotonic(), clock(), flush=True)
"""


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return tuple(map(float, process.stdout.readline().split()))


def test_a_process_that_is_stopped_does_not_count_that():
    with running(READER) as process:
        before, awake_before = ask(process)
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            pass
        stopped_at = time.monotonic()
        time.sleep(1.5)
        stopped_s = time.monotonic() - stopped_at
        process.send_signal(signal.SIGCONT)
        after, awake_after = ask(process)
    assert awake_after - awake_before <= after - before - stopped_s + SLEEP_S + LATE_S


def test_waiting_and_computing_count_alike():
    """A stall must show: whatever else the process does or does not, the sleeper sleeps."""
    with contextlib.closing(AwakeClock()) as clock:
        start, before = clock(), time.monotonic()
        while clock() - start < 0.5:
            threading.Event().wait(0.01)
            assert time.monotonic() - before < LIMIT_S


FORKED = """
import os, sys, time
from holdfast.control.awake import AwakeClock
clock = AwakeClock()
clock()
if child := os.fork():
    os.waitpid(child, 0)
    os._exit(0)
start, until = clock(), time.monotonic() + float(sys.argv[1])
while clock() - start < 1.0 and time.monotonic() < until:
    time.sleep(0.01)
print("moved" if clock() - start >= 1.0 else "stood", flush=True)
"""


def test_it_goes_on_in_a_forked_process():
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(LIMIT_S)]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "moved\n"


def test_a_closed_one_leaves_no_thread():
    clock = AwakeClock()
    clock()
    (sleeper,) = clock._sleepers.values()
    assert sleeper.is_alive()
    clock.close()
    sleeper.join(LIMIT_S)
    assert not sleeper.is_alive()
