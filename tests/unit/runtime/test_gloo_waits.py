"""A wait of Gloo's that nothing ends is left behind, with its thread; no other ever is."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.core.ids import WorkerId
from holdfast.errors import PeerLost, StaleGeneration
from holdfast.runtime.transport import gloo
from holdfast.runtime.transport.gloo import GlooTransport

PEER = WorkerId(0, 0)


class Work:
    """What Gloo gives for a receive.

    Args:
        transport: it is of; an abort of that ends the wait, unless the work is forgotten.
    """

    def __init__(self, *, forgotten=False, error=None):
        self.waits, self.over = threading.Event(), threading.Event()
        self.thread = None
        self.forgotten = forgotten
        self._error = error

    def wait(self):
        self.thread = threading.current_thread()
        self.waits.set()
        assert self.over.wait(20)
        if self._error is not None:
            raise self._error

    def end(self):
        if not self.forgotten:
            self.over.set()


@pytest.fixture
def noted():
    return []


@pytest.fixture
def transport(noted):
    made = GlooTransport(WorkerId(0, 1), None, note=noted.append)
    made._generation = 1
    yield made
    made.close()


@pytest.fixture
def waiting(transport):
    """Waits for a work, in a thread of its own; returns what becomes of that."""
    with ThreadPoolExecutor() as pool:
        yield lambda work: pool.submit(transport.await_, work, PEER)


def test_a_wait_that_gloo_forgets_is_left_behind_soon_after_an_abort(transport, waiting, noted):
    forgotten = Work(forgotten=True)
    transport._groups = kept = {(PEER, WorkerId(0, 1)): object()}
    found = waiting(forgotten)
    assert forgotten.waits.wait(10)
    began = time.monotonic()
    transport.abort(1)
    assert isinstance(found.exception(10), StaleGeneration)
    assert gloo._STUCK_S <= time.monotonic() - began < 5
    assert len(noted) == 1
    assert transport._groups == {}
    assert any(groups is kept for groups, _ in gloo._abandoned), "dropping them would wait for the thread"

    transport._generation, following = 2, Work()
    following.over.set()
    assert waiting(following).result(10) is None
    assert following.thread is not forgotten.thread
    forgotten.over.set()
    forgotten.thread.join(10)
    assert not forgotten.thread.is_alive(), "should it ever wake, it ends"


def test_a_wait_that_an_abort_ends_is_not_left_behind(transport, waiting, noted):
    work = Work(error=RuntimeError("Connection closed by peer"))
    found = waiting(work)
    assert work.waits.wait(10)
    transport.abort(1)
    work.end()
    assert isinstance(found.exception(10), StaleGeneration)
    transport._generation, following = 2, Work()
    following.end()
    waiting(following).result(10)
    assert following.thread is work.thread
    assert noted == []


def test_an_abort_just_before_a_wait_is_not_missed(transport, waiting):
    """Nothing comes after the abort that found nobody waiting, so the wait itself must look again."""
    transport.abort(1)
    work = Work(forgotten=True)
    assert isinstance(waiting(work).exception(10), StaleGeneration)
    assert not work.waits.is_set()


def test_an_abort_of_an_older_generation_ends_no_wait(transport, waiting, noted):
    transport._generation, work = 2, Work()
    found = waiting(work)
    assert work.waits.wait(10)
    transport.abort(1)
    with pytest.raises(TimeoutError):
        found.result(3 * gloo._STUCK_S)
    work.end()
    assert found.result(10) is None
    assert noted == []


def test_a_peer_that_is_gone_is_told(transport, waiting):
    work = Work(error=RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    work.end()
    error = waiting(work).exception(10)
    assert isinstance(error, PeerLost)
    assert error.worker == str(PEER)
