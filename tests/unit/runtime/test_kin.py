"""What a process has started is found by its parents and by its session, and nobody else is signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.waiting import until

from holdfast.runtime.node import kin
from holdfast.runtime.node.kin import below, end_all, in_session, look_at, send, stop_below

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "3600"])
print(child.pid, flush=True)
sys.stdin.read()
"""

FORKING = """
import mmap, os, signal, sys, threading
from holdfast.parent import end_with
memory = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[::mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)  # so that a fork takes its time
def fork():
    parent = os.getpid()
    while True:
        child = os.fork()
        if not child:
            end_with(parent)
            threading.Event().wait()
        os.kill(child, signal.SIGKILL)
        os.wait()
threading.Thread(target=fork).start()
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def family():
    """A process that leads a session, and its child; their numbers."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True, **pipes)
    child = int(parent.stdout.readline())
    yield parent, child
    os.killpg(parent.pid, signal.SIGKILL)
    parent.communicate()


def states(pid):
    return [each.state for each in below(os.getpid()) if each.pid == pid]


def test_who_descends_from_whom(family):
    parent, child = family
    assert [each.pid for each in below(parent.pid)] == [child]
    assert {each.pid for each in in_session(parent.pid)} == {parent.pid, child}
    mine = [each.pid for each in below(os.getpid())]
    assert mine.index(parent.pid) < mine.index(child)


def test_what_is_left_of_a_session_is_ended(family):
    parent, child = family
    (left,) = [each for each in in_session(parent.pid) if each.pid == child]
    assert end_all(lambda: [each for each in in_session(parent.pid) if each.pid == child]) == ()
    assert left not in below(parent.pid)
    assert parent.poll() is None


def test_a_process_that_has_another_ones_number_is_not_signalled(family):
    parent, child = family
    (now,) = below(parent.pid)
    send(replace(now, started=now.started + 1), signal.SIGKILL)
    assert [each.pid for each in below(parent.pid)] == [child]
    send(now, signal.SIGKILL)
    until(lambda: not below(parent.pid))


def test_who_was_stopped_before_is_not_among_those_that_are_to_go_on(family):
    parent, child = family
    os.kill(child, signal.SIGSTOP)
    until(lambda: states(child) == ["T"])
    stopped = stop_below(parent.pid)
    assert [each.pid for each in stopped] == [parent.pid]
    until(lambda: states(parent.pid) == ["T"])
    for each in stopped:
        send(each, signal.SIGCONT)
    until(lambda: states(parent.pid) == ["S"])
    assert states(child) == ["T"]


def test_who_was_forked_while_all_were_looked_at_is_stopped_too(family, monkeypatch):
    """The first list in which its parent has stopped was begun before it was there."""
    parent, child = family
    everybody, seen = kin._everybody, []

    def listed():
        before = bool(seen)
        for each in everybody():
            if each.pid == parent.pid and each.state == "T":
                seen.append(each)
            if each.pid != child or before:
                yield each

    monkeypatch.setattr(kin, "_everybody", listed)
    stopped = stop_below(parent.pid)
    assert sorted(each.pid for each in stopped) == sorted([parent.pid, child])
    until(lambda: states(child) == ["T"])


def test_who_is_forked_by_a_thread_of_one_that_seems_to_have_stopped_is_stopped_too():
    """The state of a process is that of its first thread, while another is in the middle of a fork."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FORKING], **pipes) as parent:
        try:
            parent.stdout.readline()
            for _ in range(10):
                stopped = stop_below(parent.pid)
                until(lambda: all(state(thread) == "T" for thread in Path(f"/proc/{parent.pid}/task").iterdir()))
                assert {each.state for each in below(parent.pid)} <= {"T"}
                for each in stopped:
                    send(each, signal.SIGCONT)
        finally:
            left = below(parent.pid)
            parent.kill()
            for each in left:
                send(each, signal.SIGKILL)


def state(thread):
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def test_who_has_been_ended_runs_nothing_any_more_before_that_is_noted():
    assert not look_at(os.getpid()).ending
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not look_at(child.pid).ending
        child.kill()
        until(lambda: look_at(child.pid).gone)
        assert look_at(child.pid).ending
    finally:
        child.kill()
        child.communicate()
    assert look_at(child.pid) is None
