"""Records on a connection whose other end is in this process, too."""

import os
import random
import select
import socket
from contextlib import contextmanager

import pytest

from holdfast.runtime.transport.links import sealing
from holdfast.runtime.transport.links.sealing import RECORD_BYTES, Seal, Share
from holdfast.runtime.transport.links.wire import BadFrame

KEY = bytes(range(32))


@contextmanager
def ends(buffer_bytes=1 << 22):
    """Both ends of a sealed connection, and the one that nobody unseals."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        yield Seal(KEY).sending(ours), Seal(KEY).receiving(theirs), theirs


def send(sender, parts, stuck=lambda: None):
    """Sends all of it, as an outbox does; what cannot go yet waits for ``stuck``."""
    parts = [memoryview(part) for part in parts]
    while parts:
        try:
            size = sender.sendmsg(parts)
        except BlockingIOError:
            stuck()
            continue
        while parts and size >= len(parts[0]):
            size -= len(parts.pop(0))
        if size:
            parts[0] = parts[0][size:]


def drain(reader, into, sizes):
    """Reads as a link does: until there is less than there is room for."""
    for size in sizes:
        place = memoryview(bytearray(size))
        try:
            came = reader.recv_into(place)
        except BlockingIOError:
            return
        into += place[:came]
        if came < size:
            return


LENGTHS = [0, 1, 64, 1000, 16 << 10, (16 << 10) + 1, 100_000, RECORD_BYTES, RECORD_BYTES + 1, 1 << 20]


@pytest.mark.parametrize("seed", range(8))
def test_what_comes_is_what_was_sent_however_it_is_cut(seed):
    draw = random.Random(seed)
    sent = b"".join(parts := [draw.randbytes(draw.choice(LENGTHS)) for _ in range(40)])
    came = bytearray()
    sizes = iter(lambda: draw.choice([1, 64, 65_536, 1 << 20]), None)
    with ends(draw.choice([4096, 1 << 18, 1 << 22])) as (sender, reader, _):
        while parts:
            count = draw.randrange(1, 9)
            send(sender, parts[:count], lambda: drain(reader, came, sizes))
            parts = parts[count:]
        while len(came) < len(sent):
            drain(reader, came, sizes)
    assert came == sent


@pytest.mark.parametrize("seed", range(8))
def test_nothing_stays_that_nobody_is_told_of(seed):
    """However its bytes come, to who reads whenever there are any until there is less than it has room for."""
    draw = random.Random(seed)
    parts = [draw.randbytes(draw.choice(LENGTHS[:-1])) for _ in range(30)]
    came = bytearray()
    sizes = iter(lambda: draw.choice([10, 64, 65_536, 1 << 20]), None)
    ours, theirs = socket.socketpair()
    with ours, theirs, ends() as (sender, _, raw):
        theirs.setblocking(False)
        reader = Seal(KEY).receiving(theirs)
        for part in parts:
            send(sender, [part])
            sealed = b"".join(iter(lambda: raw.recv(1 << 20) if select.select([raw], [], [], 0)[0] else b"", b""))
            while sealed:
                size = draw.choice([1, 3, 4, 19, 100, 16_500, 60_000])
                ours.sendall(sealed[:size])
                sealed = sealed[size:]
                while select.select([theirs], [], [], 0)[0]:
                    drain(reader, came, sizes)
    assert came == b"".join(parts)


def test_a_long_part_is_opened_in_its_place():
    """A header, and then what it announces, go at once; neither is copied on its way to where it belongs."""
    header, body = os.urandom(64), os.urandom(1 << 20)
    with ends() as (sender, reader, _):
        send(sender, [header, body])
        place = memoryview(bytearray(65_536))
        assert reader.recv_into(place) == 64
        assert place[:64] == header
        place, filled = memoryview(bytearray(1 << 20)), 0
        while filled < len(place):
            filled += reader.recv_into(place[filled:])
        assert place == body
        assert reader._room == b"", "where what has no place is opened"


def test_short_parts_share_a_record():
    with ends() as (sender, _, raw):
        send(sender, [b"a" * 64, b"b" * 100, b"c" * 64])
        sealed = raw.recv(1 << 16)
    assert len(sealed) == 4 + 228 + 16
    assert int.from_bytes(sealed[:4], "big") == 228 + 16


def test_every_so_many_records_another_key_is_used(monkeypatch):
    monkeypatch.setattr(sealing, "_RECORDS", 3)
    with ends() as (sender, reader, _):
        keys = set()
        for number in range(10):
            send(sender, [bytes([number])])
            place = memoryview(bytearray(10))
            assert reader.recv_into(place) == 1
            assert place[0] == number
            assert sender._seal._key == reader._seal._key
            keys.add(sender._seal._key)
        assert len(keys) == 4


@pytest.fixture
def line():
    """Where somebody on the line says something, and whoever reads it unsealed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        yield ours, Seal(KEY).receiving(theirs)


def sealed(data, key=KEY, number=1):
    """The record that is sent with this number."""
    seal = Seal(key)
    for _ in range(number):
        record = memoryview(bytearray(len(data) + 16))
        seal.close(data, record)
    return len(record).to_bytes(4, "big") + bytes(record)


@pytest.mark.parametrize(
    "said",
    [
        sealed(b"hello", bytes(32)),
        sealed(b"hello", number=2),
        sealed(b"hello") + sealed(b"hello"),
        sealed(b"hello")[:-1] + bytes(1),
        bytes([0, 0, 0, 21]) + b"hello" + bytes(16),
    ],
    ids=["another key", "without the one before it", "twice", "changed", "in the clear"],
)
def test_what_was_not_sent_here_and_now_cannot_be_opened(line, said):
    theirs, reader = line
    theirs.sendall(said)
    with pytest.raises(BadFrame, match="not the one that was sent"):
        reader.recv_into(memoryview(bytearray(100)))


@pytest.mark.parametrize("size", [0, 16, RECORD_BYTES + 17, (1 << 32) - 1])
def test_a_record_that_nobody_sends_is_not_waited_for(line, size):
    theirs, reader = line
    theirs.sendall(size.to_bytes(4, "big"))
    with pytest.raises(BadFrame, match=f"a sealed record of {size} bytes"):
        reader.recv_into(memoryview(bytearray(100)))
    assert len(reader._came) <= 16 << 10, "nothing is allocated for it"


def test_where_a_record_is_cut_off_nothing_of_it_comes(line):
    theirs, reader = line
    theirs.sendall(sealed(b"whole") + sealed(b"cut off", number=2)[:-1])
    theirs.close()
    place = memoryview(bytearray(100))
    assert reader.recv_into(place) == 5
    assert place[:5] == b"whole"
    assert reader.recv_into(place) == 0


def test_both_ends_agree_on_a_key_and_nobody_else_does():
    pair, said = b"the key of the pair", b"what both have said"
    ours, theirs, other = Share(), Share(), Share()
    key = ours.agree(theirs.public, pair, said)._key
    assert key == theirs.agree(ours.public, pair, said)._key
    assert len(key) == 32
    others = [
        other.agree(theirs.public, pair, said),
        ours.agree(theirs.public, b"of another pair", said),
        ours.agree(theirs.public, pair, b"something else"),
    ]
    assert key not in {each._key for each in others}


def test_of_what_is_no_key_none_is_made():
    with pytest.raises(BadFrame, match="of which none can be made"):
        Share().agree(bytes(32), b"pair", b"said")
