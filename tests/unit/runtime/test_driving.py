"""The main thread answers signals while it waits, whichever thread the kernel hands them to."""

from __future__ import annotations

import signal
import threading

import pytest
from tests.waiting import until

from holdfast.runtime.loop.turns import Turns
from holdfast.runtime.main.driving import drive

LIMIT_S = 30.0


@pytest.fixture
def heard():
    """Says that the handler of a signal has run, which is handed to another thread than the main one."""
    assert threading.current_thread() is threading.main_thread()
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    yield heard
    signal.signal(signal.SIGUSR1, before)


def strike_elsewhere(heard, then, waits):
    """Once the main thread waits, has this one take the signal; ``then`` ends the wait, whether it was heard or not."""

    def strike():
        until(waits)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        told.append(heard.wait(LIMIT_S))
        then()

    told = []
    threading.Thread(target=strike, daemon=True).start()
    return told


class Waiting:
    """A driver that waits."""

    def __init__(self):
        self.begun, self.released = threading.Event(), threading.Event()

    def run(self):
        yield self.begun.set
        yield self.released.wait


def test_while_a_driver_runs(heard):
    driver = Waiting()
    told = strike_elsewhere(heard, driver.released.set, driver.begun.is_set)
    drive(driver)
    assert told == [True]


def test_while_a_loop_waits_for_its_next_step(heard):
    turns = Turns()
    told = strike_elsewhere(heard, turns.end, lambda: turns._asks)
    assert turns.next_step() is None
    assert told == [True]
