"""Whoever connects to the ports of a generation without being one of its members."""

import contextlib
import resource
import socket
from pathlib import Path

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.lower import Payload
from holdfast.runtime.transport import MessageKey

A, B, C = WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)
MANY, LIMIT = 1100, 1024
SLOTS = 48
LISTENS = "0A"


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
    ids = [peer.worker for peer in peers]
    pairs = {(a, b) for a in ids for b in ids if a < b}
    groups = tuple(sorted(pairs | {tuple(ids)}))
    for call in [peer.call("build", generation, groups) for peer in peers]:
        call.result()


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
    peers = [gloo.start(worker) for worker in (A, B, C)]
    build(peers, 1)
    seen = {port for peer in peers for port in ports(peer)}
    with strangers(sorted(seen), 3 * SLOTS) as let_in:
        for number, each in enumerate(let_in):
            each.setblocking(True)
            each.sendall((number // 3).to_bytes(8, "little"))
        assert works(peers, 1)
        for generation in (2, 3):
            for peer in peers:
                peer.abort(generation - 1)
            build(peers, generation)
            assert works(peers, generation)
            assert not seen & {port for peer in peers for port in ports(peer)}, "each generation has ports of its own"
            seen |= {port for peer in peers for port in ports(peer)}
