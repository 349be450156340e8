"""Whoever connects to the ports of a generation without being one of its members."""

import contextlib
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.lower import Payload
from holdfast.errors import PeerLost, StaleGeneration
from holdfast.runtime.transport.port import MessageKey

A, B, C = WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)
MANY, LIMIT = 1100, 1024
SLOTS = 48
LISTENS = "0A"
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def room():
    """Enough descriptors for the stranger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ports(peer):
    """Where a process listens."""
    own = set()
    for link in Path(f"/proc/{peer.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(str(link.readlink()))
    rows = [line.split() for line in Path(f"/proc/{peer.pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own}


def build(peers, generation):
    for call in begin(peers, generation):
        call.result()


def begin(peers, generation):
    """Everyone builds; returns the calls."""
    ids = [peer.worker for peer in peers]
    pairs = {(a, b) for a in ids for b in ids if a < b}
    groups = tuple(sorted(pairs | {tuple(ids)}))
    return [peer.call("build", generation, groups) for peer in peers]


def listening(peers):
    """Where each of them listens, as soon as all do."""
    until = time.monotonic() + LIMIT_S
    while not all(found := [ports(peer) for peer in peers]):
        assert time.monotonic() < until
        time.sleep(0.01)
    return sorted(port for each in found for port in each)


def works(peers, generation):
    """Whether all can send to the next, and sum."""
    for peer, other in zip(peers, [*peers[1:], peers[0]], strict=True):
        key = MessageKey(generation=generation, step=0, payload=Payload.ACTIVATION, microbatch=peer.worker.stage)
        peer.do("send", key, other.worker, "int64", [generation])
        other.do("post", "in", key, peer.worker, "int64", (1,))
        assert other.do("wait", "in") == ("int64", [generation])
    for peer in peers:
        peer.do("reduce", "sum", tuple(each.worker for each in peers), "int64", [1])
    return [peer.do("wait", "sum") for peer in peers] == [("int64", [len(peers)])] * len(peers)


@contextlib.contextmanager
def strangers(targets, count):
    """So many attempts to connect; yields those that are let in: on loopback that is known at once."""
    with contextlib.ExitStack() as stack:
        attempts = []
        for number in range(count):
            attempt = stack.enter_context(socket.socket())
            attempt.setblocking(False)
            attempt.connect_ex(("127.0.0.1", targets[number % len(targets)]))
            attempts.append(attempt)
        yield [each for each in attempts if connected(each)]


def connected(attempt):
    try:
        attempt.getpeername()
    except OSError:
        return False
    return True


def test_more_idle_connections_than_descriptors_disturb_nobody(gloo):
    peers = [gloo.start(worker) for worker in (A, B, C)]
    for peer in peers:
        peer.do("limit_files", LIMIT)
    build(peers, 1)
    before = [peer.do("open_files") for peer in peers]
    found = [sorted(ports(peer)) for peer in peers]
    assert all(len(each) == 1 for each in found)
    for target in found:
        with strangers(target, MANY) as let_in:
            assert works(peers, 1)
            assert not let_in
            assert [peer.do("open_files") for peer in peers] == before


def test_strangers_who_take_every_slot_of_a_generation_harm_no_later_one(gloo):
    """They come while it is built, which does not end, as each member waits for another's address."""
    peers = [gloo.start(worker) for worker in (A, B, C)]
    gloo.held = {link: threading.Event() for link in ((B, A), (C, B), (A, C))}
    builds = begin(peers, 1)
    assert all(held.wait(LIMIT_S) for held in gloo.held.values())
    targets = listening(peers)
    with strangers(targets, 3 * SLOTS) as let_in:
        assert len(let_in) == 3 * SLOTS, "as nobody asks who they are"
        for number, each in enumerate(let_in):
            each.setblocking(True)
            each.sendall((number // 3).to_bytes(8, "little"))
        for peer in peers:
            peer.abort(1)
        for call in builds:
            assert isinstance(call.error(), StaleGeneration | PeerLost)
        gloo.held, seen = {}, set(targets)
        for generation in (2, 3):
            build(peers, generation)
            assert works(peers, generation)
            new = set(listening(peers)) - seen
            assert len(new) == len(peers), "each generation has ports of its own"
            seen |= new
            for peer in peers:
                peer.abort(generation)
