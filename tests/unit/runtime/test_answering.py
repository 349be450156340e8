"""Signals are answered at once, whichever thread the kernel hands them to, and whatever the main one waits for."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT_S = 60
BEGIN = """
import os, signal, socket, sys, threading, time
from holdfast.runtime.main.answering import AnsweringThread

signals = AnsweringThread()
told = threading.Event()

def answer():
    print("told", flush=True)
    told.set()

signals.answer(signal.SIGTERM, answer)
"""


def run(script):
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_while_the_main_thread_waits_and_another_one_is_handed_it():
    script = """
def strike():
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    print("in time" if told.wait(20) else "never", flush=True)
    os._exit(0)

threading.Thread(target=strike).start()
threading.Event().wait()
"""
    assert run(script) == ["told", "in time"]


def test_once_for_each():
    script = """
for _ in range(3):
    told.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    assert told.wait(20)
"""
    assert run(script) == ["told"] * 3


def test_also_where_a_script_has_taken_the_descriptor():
    script = """
ours, theirs = socket.socketpair()
theirs.setblocking(False)
signal.set_wakeup_fd(theirs.fileno())
os.kill(os.getpid(), signal.SIGTERM)
assert told.wait(20)
assert ours.recv(1) == bytes([signal.SIGTERM])
assert signal.set_wakeup_fd(-1) == theirs.fileno(), "it keeps it"
"""
    assert run(script) == ["told"]


@pytest.mark.parametrize("handled", ["lambda *_: os._exit(3)", "signal.SIG_DFL"])
def test_what_is_forked_hears_for_itself_alone(handled):
    script = f"""
read, write = os.pipe()
if (child := os.fork()) == 0:
    signal.signal(signal.SIGTERM, {handled})
    os.write(write, b"x")
    while True:
        time.sleep(60)
os.read(read, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
assert told.wait(20)
"""
    assert run(script) == ["3" if "exit" in handled else str(-15), "told"]


def test_a_signal_that_nobody_answers_here_is_left_to_whom_it_is_for():
    script = """
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
assert told.wait(20)
assert heard == [1]
"""
    assert run(script) == ["told"]
