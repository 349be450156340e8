from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.waiting import LIMIT_S

from holdfast.control.messages import Blob
from holdfast.core.ids import WorkerId
from holdfast.errors import StaleGeneration
from holdfast.runtime.transport.exchange import RelayExchange

A, B = WorkerId(0, 0), WorkerId(0, 1)


@pytest.fixture
def sent():
    return []


@pytest.fixture
def exchange(sent, announced):
    made = RelayExchange(A, sent.append)
    made._changed = announced
    return made


@pytest.fixture
def blocked(exchange):
    """Starts a ``get`` and returns once it waits."""
    with ThreadPoolExecutor(1) as pool:

        def start(generation, key):
            future = pool.submit(exchange.get, generation, key)
            assert exchange._changed.waiting.wait(LIMIT_S)
            assert not future.done()
            return future

        yield start
        exchange.end(2**62)


def test_put_is_for_ourselves_and_the_others(exchange, sent):
    exchange.put(1, "k", b"v", (B,))
    assert exchange.get(1, "k") == b"v"
    assert sent == [Blob(worker=A, generation=1, key="k", value=b"v", to=(B,))]


def test_deliver_is_for_ourselves(exchange, sent):
    exchange.deliver(1, "k", b"v")
    assert exchange.get(1, "k") == b"v"
    assert sent == []


@pytest.mark.parametrize("give", [lambda e: e.put(1, "k", b"v", (B,)), lambda e: e.deliver(1, "k", b"v")])
def test_get_is_woken_by_the_value(exchange, blocked, give):
    future = blocked(1, "k")
    give(exchange)
    assert future.result(LIMIT_S) == b"v"


def test_get_is_not_woken_by_another_value(exchange, blocked):
    future = blocked(2, "k")
    exchange._changed.waiting.clear()
    exchange.deliver(1, "k", b"old")
    assert exchange._changed.waiting.wait(LIMIT_S), "it looked, and waits again"
    assert not future.done()
    exchange.deliver(2, "k", b"new")
    assert future.result(LIMIT_S) == b"new"


@pytest.mark.parametrize("over", [1, 5])
def test_get_is_woken_by_the_end_of_its_generation(exchange, blocked, over):
    future = blocked(1, "k")
    exchange.end(over)
    with pytest.raises(StaleGeneration):
        future.result(LIMIT_S)


def test_the_end_of_an_older_generation_does_not_end_a_newer_one(exchange, blocked):
    future = blocked(3, "k")
    exchange._changed.waiting.clear()
    exchange.end(2)
    assert exchange._changed.waiting.wait(LIMIT_S)
    exchange.deliver(3, "k", b"v")
    assert future.result(LIMIT_S) == b"v"


def test_what_belongs_to_an_ended_generation_is_gone(exchange):
    exchange.deliver(1, "k", b"old")
    exchange.deliver(2, "k", b"new")
    exchange.end(1)
    with pytest.raises(StaleGeneration):
        exchange.get(1, "k")
    assert exchange.get(2, "k") == b"new"
