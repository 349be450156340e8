"""Messages that travel: they come when they would, hold nobody up, and give way to an abort."""

import threading
import time

import pytest
import torch
from tests.memory_transport import MemoryHub, MemoryTransport
from tests.waiting import LIMIT_S

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload, Reduction
from holdfast.core.profile import Link
from holdfast.core.summing import plain
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import StaleGeneration
from holdfast.runtime.transport.delayed import DelayedTransport
from holdfast.runtime.transport.port import MessageKey, SumKey

A, B = WorkerId(0, 0), WorkerId(0, 1)
SPEC = TensorSpec(shape=(2,), dtype="int64")
WORDS = torch.tensor([7, -7])
SIZES = {Payload.ACTIVATION: 1_000_000, Payload.GRADIENT: 100_000}


def key(payload=Payload.ACTIVATION, microbatch=0):
    return MessageKey(generation=1, step=0, payload=payload, microbatch=microbatch)


class Now:
    """A clock that stands until it is set."""

    def __init__(self):
        self._now = 0.0

    def __call__(self):
        return self._now

    def set(self, now):
        self._now = now


def pair(link, clock=time.monotonic):
    hub = MemoryHub()
    ends = [
        DelayedTransport(MemoryTransport(worker, hub), link, lambda key: SIZES.get(key.payload, 0), clock)
        for worker in (A, B)
    ]
    threads = [threading.Thread(target=end.build, args=(1, ((A, B),))) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@pytest.mark.parametrize(
    ("payload", "seconds"), [(Payload.ACTIVATION, 0.11), (Payload.GRADIENT, 0.02), (Payload.VOTE, 0.010_001_6)]
)
def test_a_message_takes_what_its_emulated_size_takes_and_its_sender_is_not_held_up(payload, seconds):
    times = iter([0.0, seconds - 1e-6, seconds + 1e-6])  # at which it is sent, is not there yet, and is there
    a, b = pair(Link(latency_s=0.01, bytes_per_s=1e7), times.__next__)
    a.send(key(payload), B, WORDS)
    assert torch.equal(b.receive(key(payload), A, SPEC).wait(), WORDS)
    assert list(times) == []


def test_it_is_waited_for_until_it_would_have_come():
    a, b = pair(Link(latency_s=0.2, bytes_per_s=1e12))
    start = time.monotonic()
    a.send(key(), B, WORDS)
    assert torch.equal(b.receive(key(), A, SPEC).wait(), WORDS)
    assert time.monotonic() - start >= 0.2


def test_messages_travel_at_the_same_time_and_while_nobody_waits():
    now = Now()
    a, b = pair(Link(latency_s=0.2, bytes_per_s=1e12), now)
    for microbatch in range(5):
        a.send(key(microbatch=microbatch), B, WORDS)
    handles = [b.receive(key(microbatch=microbatch), A, SPEC) for microbatch in range(5)]
    now.set(0.201)
    assert all(torch.equal(handle.wait(), WORDS) for handle in handles), "not one after another"


def test_a_message_that_came_long_ago_is_there_at_once():
    now = Now()
    a, b = pair(Link(latency_s=50.0, bytes_per_s=1e9), now)
    a.send(key(), B, WORDS)
    now.set(51.0)
    assert torch.equal(b.receive(key(), A, SPEC).wait(), WORDS)


def test_an_abort_ends_the_wait_for_a_message_under_way():
    a, b = pair(Link(latency_s=3600.0, bytes_per_s=1e9))
    a.send(key(), B, WORDS)
    handle = b.receive(key(), A, SPEC)
    ended = []

    def wait():
        try:
            handle.wait()
        except StaleGeneration as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    b.abort(1)
    waiting.join(LIMIT_S)
    assert len(ended) == 1


def test_reductions_are_not_delayed():
    a, b = pair(Link(latency_s=3600.0, bytes_per_s=1.0))
    handles = [end.all_reduce(SumKey(1, 0, Reduction((0,), (A, B))), plain(WORDS)) for end in (a, b)]
    assert all(torch.equal(handle.wait().total, 2 * WORDS) for handle in handles)
