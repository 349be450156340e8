"""Both ends of slices, with the test in the place of the links."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import pytest
from tests.waiting import LIMIT_S

from holdfast.core.ids import WorkerId
from holdfast.runtime.transport.links.slices import SLICE_BYTES, NotGiven, Slices
from holdfast.runtime.transport.links.wire import BadFrame, Chunk, Kind, Label

A, B, C = WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)


class Wire:
    """Carries what workers say to each other, one message at a time, when it is told to."""

    def __init__(self):
        self.workers = {worker: Slices(partial(self._send, worker)) for worker in (A, B, C)}
        self.said = deque()
        self._told = threading.Semaphore(0)

    def _send(self, source, target, label, body):
        self.said.append((source, target, label, body))
        self._told.release()

    def wait_for(self, number):
        """Waits until so many more messages were said."""
        for _ in range(number):
            assert self._told.acquire(timeout=LIMIT_S)

    def deliver(self):
        """Delivers the oldest message."""
        source, target, label, body = self.said.popleft()
        return self.bring(source, target, label, body)

    def bring(self, source, target, label, body):
        """Delivers a message; returns whether anybody wanted it."""
        taker, chunk = self.workers[target], Chunk(label, len(body), 0, len(body))
        if (incoming := taker.begin(source, chunk)) is None:
            return False
        incoming.place(chunk)[:] = body
        taker.add(incoming, chunk)
        return True


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def reading(wire):
    """A reads from B, in a thread of its own; returns the source and the future."""
    with ThreadPoolExecutor(4) as pool:
        sources = []

        def begin(size, *, timeout_s=LIMIT_S, worker=B):
            sources.append(wire.workers[A].source(worker, "key", generation=3, timeout_s=timeout_s))
            return sources[-1], pool.submit(sources[-1].read, 7, 0, size)

        yield begin
        for source in sources:
            source.close()


def slice_label(number=0):
    return Label(3, 0, Kind.SLICE, place=number)


def test_what_is_kept_is_read_one_slice_after_another(wire, reading):
    data = bytes(range(256)) * (5 * SLICE_BYTES // 256) + b"end"
    wire.workers[B].keep("key", {7: data})
    _, result = reading(len(data))
    wire.wait_for(1)
    most, kinds = 0, []
    while not result.done():
        most, kinds = max(most, len(wire.said)), [*kinds, wire.said[0][2].kind]
        assert wire.deliver()
        if not wire.said:
            break
    assert bytes(result.result(LIMIT_S)) == data
    assert (most, kinds.count(Kind.ASK), kinds.count(Kind.SLICE)) == (1, 6, 6)


def test_what_is_kept_is_not_copied(wire):
    data = b"state"
    wire.workers[B].keep("key", {7: data})
    wire.bring(A, B, Label(3, 0, Kind.ASK, place=5), msgspec.msgpack.encode(("key", 7, 1, 3)))
    ((_, target, label, body),) = wire.said
    assert (target, label, bytes(body)) == (A, slice_label(5), b"tat")
    assert body.obj is data


def test_nothing_of_nothing_is_asked_for(wire, reading):
    _, result = reading(0)
    assert bytes(result.result(LIMIT_S)) == b""
    assert not wire.said


@pytest.mark.parametrize(
    "ask",
    [("key", 7, 4, 3), ("key", 7, -1, 3), ("key", 7, 0, -1), ("key", 8, 0, 1), ("other", 7, 0, 1)],
    ids=["beyond the end", "before the begin", "less than nothing", "another part", "another key"],
)
def test_what_is_not_there_is_answered_with_nothing(wire, ask):
    wire.workers[B].keep("key", {7: b"secret"})
    wire.bring(A, B, Label(3, 0, Kind.ASK), msgspec.msgpack.encode(ask))
    ((*_, body),) = wire.said
    assert bytes(body) == b""


def test_a_slice_is_never_longer_than_a_chunk(wire):
    wire.workers[B].keep("key", {7: bytes(SLICE_BYTES + 1)})
    for size in (SLICE_BYTES, SLICE_BYTES + 1):
        wire.bring(A, B, Label(3, 0, Kind.ASK), msgspec.msgpack.encode(("key", 7, 0, size)))
    assert [len(body) for *_, body in wire.said] == [SLICE_BYTES, 0]


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"",
        msgspec.msgpack.encode(("key", 7, 0)),
        msgspec.msgpack.encode(("key", 7, 0, 1, 1)),
        b"\x94\xa1\xff\x07\x00\x01",
    ],
    ids=["no message", "empty", "too little", "too much", "no text"],
)
def test_a_senseless_question_is_none(wire, body):
    with pytest.raises(BadFrame, match="ask of generation 3"):
        wire.bring(A, B, Label(3, 0, Kind.ASK), body)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(Label(3, 0, Kind.ASK), 257, 0, 257),
        Chunk(slice_label(), SLICE_BYTES + 1, 0, SLICE_BYTES + 1),
        Chunk(slice_label(), 10, 5, 5),
    ],
    ids=["a long question", "a long slice", "the end of a slice"],
)
def test_what_is_no_slice_is_not_taken(wire, chunk):
    with pytest.raises(BadFrame):
        wire.workers[A].begin(B, chunk)


def test_only_what_was_asked_for_has_a_place(wire, reading):
    source, result = reading(4)
    wire.wait_for(1)
    ((_, _, label, _),) = wire.said
    asked = label._replace(kind=Kind.SLICE)
    assert not wire.bring(B, A, asked._replace(place=asked.place + 1), b"evil"), "another number"
    assert not wire.bring(C, A, asked, b"evil"), "another worker"
    assert wire.bring(B, A, asked, b"good")
    assert not wire.bring(B, A, asked, b"evil"), "once more"
    assert bytes(result.result(LIMIT_S)) == b"good"
    source.close()


@pytest.mark.parametrize(("body", "told"), [(b"good!", "gave 5 bytes instead of 4"), (b"", "has no such bytes")])
def test_a_slice_of_another_size_ends_it_and_has_no_place(wire, reading, body, told):
    _, result = reading(4)
    wire.wait_for(1)
    assert not wire.bring(B, A, slice_label(wire.said[0][2].place), body)
    assert str(result.exception(LIMIT_S)) == told


def test_what_was_given_up_has_no_place(wire, reading):
    source, result = reading(4)
    wire.wait_for(1)
    source.close()
    assert isinstance(result.exception(LIMIT_S), NotGiven)
    assert not wire.bring(B, A, slice_label(wire.said[0][2].place), b"late")
    with pytest.raises(NotGiven, match="nobody reads it any more"):
        source.read(7, 0, 4)
    assert len(wire.said) == 1, "and nothing more is asked for"


def test_who_gives_nothing_for_too_long_is_left(wire, reading):
    _, result = reading(2 * SLICE_BYTES, timeout_s=0.05)
    wire.wait_for(1)
    wire.bring(B, A, slice_label(wire.said[0][2].place), bytes(SLICE_BYTES))
    assert str(result.exception(LIMIT_S)) == "gave nothing for 0.05 s"


def test_a_broken_link_ends_what_is_read_from_that_worker(wire, reading):
    (_, lost), (_, other) = reading(4), reading(4, worker=C)
    wire.wait_for(2)
    wire.workers[A].lose(B, "it closed its connection")
    assert str(lost.exception(LIMIT_S)) == "it closed its connection"
    assert not other.done()
    wire.workers[A].fail(ValueError("oh"))
    assert str(other.exception(LIMIT_S)) == "the links have ended: ValueError('oh')"
