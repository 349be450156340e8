"""Bodies that a process group carries: when it is built, what becomes of it, and of what is under way with it."""

import os
import signal
from random import Random

import pytest
from tests.waiting import until

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.errors import PeerLost, StaleGeneration
from holdfast.runtime.transport.port import MessageKey

from .conftest import CarriedCluster, DeviceCluster

A, B, C = WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)


@pytest.fixture(params=[CarriedCluster, DeviceCluster], ids=["host", "device"])
def carried(request):
    made = request.param()
    yield made
    made.end()


def key(step, generation=1):
    return MessageKey(generation=generation, step=step, payload=Payload.ACTIVATION, microbatch=0, boundary=0)


def build(peers, generation):
    ids = tuple(peer.worker for peer in peers)
    groups = tuple(sorted({(a, b) for a in ids for b in ids if a < b} | {ids}))
    for call in [peer.call("build", generation, groups) for peer in peers]:
        call.result()


def passes(a, b, step, generation=1):
    """A message of one to the other, with what nobody else would send."""
    value = [float(step), float(generation)]
    b.do("post", "in", key(step, generation), a.worker, "float32", (2,))
    a.do("send", key(step, generation), b.worker, "float32", value)
    assert b.do("wait", "in") == ("float32", value)


def promoted(a, b, generation=1):
    """Sends until bodies are carried in both directions; returns the next step."""
    step = 0

    def both() -> bool:
        nonlocal step
        before = [peer.do("carried") for peer in (a, b)]  # to others, too
        for one, other in ((a, b), (b, a)):
            passes(one, other, step, generation)
        step += 1
        return all(peer.do("carried") > was for peer, was in zip((a, b), before, strict=True))

    until(both)
    return step


def test_a_group_is_built_while_messages_go_and_then_carries_them(carried):
    a, b = carried.start(A), carried.start(B)
    build((a, b), 1)
    step = promoted(a, b)
    before = a.do("carried")
    passes(a, b, step)
    assert a.do("carried") == before + 8


def test_sums_are_carried_and_have_the_same_bits(carried):
    peers = [carried.start(worker) for worker in (A, B, C)]
    build(peers, 1)
    members = tuple(peer.worker for peer in peers)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        promoted(peers[first], peers[second])
    before = [peer.do("carried") for peer in peers]
    size = 300_000  # which each adds a share of
    for peer, items in zip(peers, ((0, 3), (1, 4), (2, 5)), strict=True):
        peer.do("reduce_gradients", "sum", members, size, 6, items)
    found = [peer.do("wait", "sum") for peer in peers]
    assert found[0] == found[1] == found[2]
    assert all(peer.do("carried") > was for peer, was in zip(peers, before, strict=True))


def test_a_group_outlives_generations(carried):
    """What is under way when one is aborted comes to its end, and nobody gets it."""
    a, b = carried.start(A), carried.start(B)
    build((a, b), 1)
    step = promoted(a, b)
    for generation in range(2, 8):
        for number in range(5):
            a.do("send", key(step + number, generation - 1), B, "float32", [1.0] * 1000)
        for peer in (a, b):
            peer.abort(generation - 1)
        build((a, b), generation)
        before = a.do("carried")
        passes(a, b, step, generation)
        passes(b, a, step, generation)
        assert a.do("carried") > before


def test_a_peer_that_dies_with_a_body_under_way_is_lost(carried):
    a, b = carried.start(A), carried.start(B)
    build((a, b), 1)
    step = promoted(a, b)
    b.do("post", "in", key(step), A, "float32", (2,))
    waiting = b.call("wait", "in")
    assert waiting.is_blocked()
    carried.kill(A)
    assert isinstance(waiting.error(), PeerLost)


def test_a_peer_that_is_stopped_holds_nobody_up_whose_generation_is_over(carried):
    """It is stopped with bodies under way to it and from it: the others go on without it."""
    peers = a, b, c = [carried.start(worker) for worker in (A, B, C)]
    build(peers, 1)
    step = promoted(a, b)
    os.kill(b.pid, signal.SIGSTOP)
    try:
        for number in range(20):
            a.do("send", key(step + number), B, "float32", [1.0] * 300_000)
        a.do("post", "in", key(step), B, "float32", (2,))
        waiting = a.call("wait", "in")
        assert waiting.is_blocked()
        for peer in (a, c):
            peer.abort(1)
        assert isinstance(waiting.error(), StaleGeneration)
        build((a, c), 2)
        passes(a, c, step, 2)
        passes(c, a, step, 2)
    finally:
        os.kill(b.pid, signal.SIGCONT)


@pytest.mark.parametrize("first", [0, 1], ids=["who begins it", "the other"])
def test_a_group_that_fails_is_a_link_that_is_broken_and_what_follows_goes_over_links(carried, first):
    peers = [carried.start(worker) for worker in (A, B)]
    build(peers, 1)
    step = promoted(*peers)
    one, other = peers[first], peers[1 - first]
    one.do("fail_groups")
    other.do("post", "in", key(step + 1), one.worker, "float32", (2,))
    waiting = other.call("wait", "in")
    assert waiting.is_blocked()
    one.do("send", key(step), other.worker, "float32", [1.0, 2.0])
    listening = one.call("receive", key(step), other.worker, "float32", (2,))
    assert isinstance(waiting.error(), PeerLost)
    assert isinstance(listening.error(), PeerLost)
    assert "its carrier has failed: told to fail" in str(listening.error())
    for peer in peers:
        peer.abort(1)
    build(peers, 2)
    before = [peer.do("carried") for peer in peers]
    for number in range(60):
        passes(one, other, number, 2)
        passes(other, one, number, 2)
    assert [peer.do("carried") for peer in peers] == before, "the next group is not built at once"


@pytest.mark.parametrize("lost", [0, 1], ids=["who begins it", "the other"])
def test_a_new_process_of_a_worker_gets_a_group_of_its_own(carried, lost):
    peers = [carried.start(worker) for worker in (A, B)]
    build(peers, 1)
    promoted(*peers)
    carried.kill(peers[lost].worker)
    assert carried.died(peers[lost].worker)
    peers[1 - lost].abort(1)
    peers[lost] = carried.start(peers[lost].worker)
    build(peers, 2)
    before = peers[1 - lost].do("carried")
    step = promoted(*peers, 2)
    passes(peers[1 - lost], peers[lost], step, 2)
    assert peers[1 - lost].do("carried") > before


def test_draining_waits_for_bodies_that_are_carried(carried):
    a, b = carried.start(A), carried.start(B)
    build((a, b), 1)
    step = promoted(a, b)
    os.kill(b.pid, signal.SIGSTOP)
    try:
        for number in range(40):
            a.do("send", key(step + number), B, "float32", [1.0] * 300_000)
        draining = a.call("drain")
        assert draining.is_blocked()
    finally:
        os.kill(b.pid, signal.SIGCONT)
    assert draining.error() is None


def test_bodies_of_one_that_has_died_before_their_headers_are_read_are_a_lost_peer(carried):
    """Whoever reads them is stopped meanwhile: its group knows of the death before its link does."""
    peers = a, b, c = [carried.start(worker) for worker in (A, B, C)]
    build(peers, 1)
    step = promoted(a, b)
    a.do("post", "in", key(step), B, "float32", (2,))
    waiting = a.call("wait", "in")
    assert waiting.is_blocked()
    os.kill(a.pid, signal.SIGSTOP)
    try:
        for number in range(20):
            b.do("send", key(step + number), A, "float32", [1.0, 2.0])
        carried.kill(B)
        assert carried.died(B)
    finally:
        os.kill(a.pid, signal.SIGCONT)
    assert waiting.error() is None or isinstance(waiting.error(), PeerLost), "the message may have come before"
    for peer in (a, c):
        peer.abort(1)
    build((a, c), 2)
    passes(a, c, step, 2)
    passes(c, a, step, 2)


KILLS = int(os.environ.get("HOLDFAST_CARRIER_KILLS", "20"))


def test_kills_at_any_moment_hold_nobody_up(carried):
    """The other end is killed before a group is built, while it is, and once it carries; the next one gets another."""
    random = Random(5)
    a = carried.start(A)
    at_work = 0
    for generation in range(1, KILLS + 1):
        b = carried.start(B)
        build((a, b), generation)
        before = a.do("carried")
        for step in range(random.choice((1, 2, 3, 8, 40))):
            passes(a, b, step, generation)
            passes(b, a, step, generation)
        at_work += a.do("carried") > before
        for step in range(100, 100 + random.randrange(4)):
            a.do("send", key(step, generation), B, "float32", [1.0] * random.choice((10, 100_000)))
        carried.kill(B)
        assert carried.died(B)
        a.abort(generation)
    assert KILLS // 8 < at_work < KILLS, "some were killed before a group carried anything, some behind that"
