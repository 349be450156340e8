"""Hosts that cannot reach each other: noticed by what their kernels acknowledge, in real network namespaces."""

import contextlib
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.networks import inside, needs_networks
from tests.waiting import LIMIT_S, until

from holdfast.control.messages import Peer
from holdfast.control.token import pair_key
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import PeerLost
from holdfast.runtime.isolation import Networks
from holdfast.runtime.transport.links import sender
from holdfast.runtime.transport.links.silence import silence_s
from holdfast.runtime.transport.links.transport import LinkTransport
from holdfast.runtime.transport.port import MessageKey

pytestmark = needs_networks

A, B = WorkerId(0, 0), WorkerId(0, 1)
SILENT_S = 0.4
SPEC = TensorSpec(shape=(4,), dtype="float32")
FULL_S = 1.5
"""Several probes of a full window long."""


@pytest.fixture
def networks():
    with Networks(2) as made:
        yield made


@pytest.fixture
def ends(networks):
    """A connection from one node to another."""
    far, near = networks.node(0), networks.node(1)
    with inside(far, lambda: socket.create_server((far.host, 0))) as listener:
        address = listener.getsockname()
        with inside(near, lambda: socket.create_connection(address)) as calling, listener.accept()[0] as called:
            yield calling, called


def test_a_host_that_acknowledges_is_not_silent_though_nobody_reads(ends):
    calling, _ = ends
    calling.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while calling.send(bytes(1 << 16)):
            pass
    end = time.monotonic() + FULL_S
    while time.monotonic() < end:
        assert silence_s(calling) < SILENT_S, "what is on its way is acknowledged soon"
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["cut", "part"])
def test_a_host_that_cannot_be_reached_is_silent_once_it_should_acknowledge(networks, ends, how):
    calling, _ = ends
    calling.send(b"heard")
    until(lambda: silence_s(calling) == 0.0)
    if how == "cut":
        networks.cut(0)
    else:
        networks.part(1, 0)
    assert silence_s(calling) == 0.0
    calling.send(b"lost")
    until(lambda: silence_s(calling) > SILENT_S)


@pytest.fixture
def pair(networks):
    """Two workers on two nodes, who have come to their first generation."""
    places = {A: networks.node(0), B: networks.node(1)}
    made = {
        worker: inside(place, lambda w=worker, p=place: LinkTransport(w, host=p.host, silent_s=SILENT_S))
        for worker, place in places.items()
    }
    for worker, other in ((A, B), (B, A)):
        here, there = made[worker].here, made[other].here
        pair_of = pair_key("", (worker, here.nonce), (other, there.nonce))
        made[worker].meet([Peer(worker=other, here=there, key=pair_of)])
    build(made, 1)
    yield made
    for links in made.values():
        links.close()


def build(pair, generation):
    with ThreadPoolExecutor(len(pair)) as pool:
        for each in [pool.submit(links.build, generation, ((A, B),)) for links in pair.values()]:
            each.result(LIMIT_S)


def key(generation):
    return MessageKey(generation=generation, step=0, payload=Payload.ACTIVATION, microbatch=0)


def says_and_hears(pair, generation):
    pair[A].send(key(generation), B, torch.arange(4.0))
    assert torch.equal(pair[B].receive(key(generation), A, SPEC).wait(), torch.arange(4.0))


def test_who_sends_to_a_node_that_it_cannot_reach_is_told_and_calls_it_anew_in_the_next_generation(
    networks, pair, monkeypatch
):
    says_and_hears(pair, 1)
    networks.part(0, 1)
    pair[A].send(MessageKey(generation=1, step=1, payload=Payload.ACTIVATION, microbatch=0), B, torch.arange(4.0))
    with pytest.raises(PeerLost, match=rf"its host has acknowledged nothing for {SILENT_S:g} s"):
        pair[A].receive(key(1), B, SPEC).wait()

    with monkeypatch.context() as soon:
        soon.setattr(sender, "_UNANSWERED_S", SILENT_S)
        with pytest.raises(PeerLost, match=rf"its host has answered no call for {SILENT_S:g} s"):
            pair[A].build(2, ((A, B),))

    place = networks.node(0)
    back = ["ip", "route", "del", "blackhole", networks.node(1).host]
    inside(place, lambda: subprocess.run(back, check=True))
    build(pair, 3)
    says_and_hears(pair, 3)


def test_a_peer_that_is_stopped_is_no_silent_host(pair):
    """The thread that would read stands still, as all of a frozen process does; its kernel acknowledges."""
    held, stopped = threading.Event(), threading.Event()

    def stop():
        stopped.set()
        assert held.wait(LIMIT_S)

    pair[B]._connections._loop.do(stop)
    assert stopped.wait(LIMIT_S)
    large = torch.zeros(8 << 20)
    pair[A].send(key(1), B, large)
    looked = pair[A]._connections._senders[B]
    until(lambda: looked._blocked)
    end = time.monotonic() + 5 * SILENT_S
    while time.monotonic() < end:
        assert looked._connection is not None
        time.sleep(0.01)
    held.set()
    assert torch.equal(pair[B].receive(key(1), A, TensorSpec(shape=(8 << 20,), dtype="float32")).wait(), large)
