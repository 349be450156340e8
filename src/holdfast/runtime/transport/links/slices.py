"""Bytes that one worker keeps and others fetch while more urgent messages go first: both ends, without I/O.

Whoever fetches asks for one slice after another, and has a place for it before it can come. So there is never more than
one under way that something more urgent could have to wait for, and nobody can be made to hold what it did not ask for.
What is kept has a key and, under it, a number for each of its parts; they may have any length, and belong to no step.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import torch

from holdfast.core.ids import WorkerId
from holdfast.errors import HoldfastError
from holdfast.runtime.transport.links.inbox import Incoming
from holdfast.runtime.transport.links.wire import BadFrame, Chunk, Kind, Label

__all__ = ["SLICE_BYTES", "NotGiven", "SliceSource", "Slices"]

SLICE_BYTES = 256 << 10
"""The longest slice: one chunk, and a short one, as what is more urgent waits for it."""
_ASK_BYTES = 256
_NOTHING = memoryview(b"")


class NotGiven(HoldfastError):
    """A worker does not give what it was asked for; it need not be asked again."""


class _Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """These bytes of a part of what is kept under a key."""

    key: str
    part: int
    offset: int
    size: int


class Slices:
    """What a worker keeps for others, and what it is fetching from them; any thread may use it.

    Args:
        send: sends to another worker, and never waits.
    """

    def __init__(self, send: Callable[[WorkerId, Label, memoryview], None]) -> None:
        self._send = send
        # Under the lock: any thread keeps and asks, the links' thread serves and takes what comes. Parts are neither
        # copied nor sent under it.
        self._lock = threading.Lock()
        self._kept: dict[str, Mapping[int, bytes]] = {}
        self._numbers = itertools.count()
        self._awaited: dict[tuple[WorkerId, int], tuple[SliceSource, torch.Tensor]] = {}
        self._sources: dict[SliceSource, None] = {}

    def keep(self, key: str, parts: Mapping[int, bytes]) -> None:
        """Gives parts to whoever asks for them, until :meth:`let_go`; they are not copied, not even to be sent."""
        with self._lock:
            self._kept[key] = dict(parts)

    def let_go(self, key: str) -> None:
        """Keeps something no longer, if it was kept; whoever still asks for it is given nothing."""
        with self._lock:
            self._kept.pop(key, None)

    def source(self, worker: WorkerId, key: str, *, generation: int, timeout_s: float) -> SliceSource:
        """Returns what a worker keeps under a key, to be read and closed.

        Args:
            worker: who keeps it.
            key: under which.
            generation: ours; what it asks for is dropped when that is aborted.
            timeout_s: how long a slice may take.
        """
        source = SliceSource(self, worker, key, generation=generation, timeout_s=timeout_s)
        with self._lock:
            self._sources[source] = None
        return source

    # What sources do

    def ask(self, source: SliceSource, part: int, offset: int, place: torch.Tensor) -> None:
        """Asks for one slice, which goes to a place that nobody else uses."""
        with self._lock:
            if source not in self._sources:
                return
            number = next(self._numbers)
            self._awaited[source.worker, number] = source, place
        body = msgspec.msgpack.encode(_Ask(source.key, part, offset, place.numel()))
        self._send(source.worker, Label(source.generation, 0, Kind.ASK, place=number), memoryview(body))

    def forget(self, source: SliceSource) -> None:
        """What a source has asked for has no place any more, should it come."""
        with self._lock:
            self._sources.pop(source, None)
            self._awaited = {name: each for name, each in self._awaited.items() if each[0] is not source}

    # What the thread that reads does

    def begin(self, source: WorkerId, chunk: Chunk) -> Incoming | None:
        """Returns where a slice goes, or what is to be done with a question; None if nobody wants it any more.

        Raises:
            BadFrame: it is neither.
        """
        label = chunk.label
        if chunk.offset or chunk.total > (_ASK_BYTES if label.kind is Kind.ASK else SLICE_BYTES):
            raise BadFrame(f"{label} of {chunk.total} bytes")
        if label.kind is Kind.ASK:
            question = torch.empty(chunk.total, dtype=torch.uint8)
            return Incoming(data=question, then=lambda _: self._answer(source, label, question.numpy().data))
        with self._lock:
            awaited = self._awaited.pop((source, label.place), None)
        if awaited is None:
            return None
        reader, place = awaited
        if chunk.total != place.numel():
            reader.fail(f"gave {chunk.total} bytes instead of {place.numel()}" if chunk.total else "has no such bytes")
            return None
        return Incoming(data=place, then=lambda _: reader.came())

    def add(self, incoming: Incoming, chunk: Chunk) -> None:
        """A chunk has come whole, and all of its message with it."""
        if incoming.then is not None:
            incoming.then(incoming)

    def _answer(self, asker: WorkerId, label: Label, body: memoryview) -> None:
        try:
            ask = msgspec.msgpack.decode(body, type=_Ask)
        except ValueError as error:  # msgspec's, and that of text that is none
            raise BadFrame(f"{label}: {error}") from None
        self._send(asker, label._replace(kind=Kind.SLICE), self._slice(ask))

    def _slice(self, ask: _Ask) -> memoryview:
        """Nothing, if there is no such slice."""
        with self._lock:
            data = self._kept.get(ask.key, {}).get(ask.part, b"")
        if min(ask.offset, ask.size) < 0 or ask.offset + ask.size > len(data) or ask.size > SLICE_BYTES:
            return _NOTHING
        return memoryview(data)[ask.offset : ask.offset + ask.size]

    def lose(self, worker: WorkerId, reason: str) -> None:
        """A connection with a worker is broken: what it was asked for does not come."""
        for source in self._open():
            if source.worker == worker:
                source.fail(reason)

    def fail(self, error: BaseException) -> None:
        """Nothing comes any more, by a fault of ours."""
        for source in self._open():
            source.fail(f"the links have ended: {error!r}")

    def _open(self) -> list[SliceSource]:
        with self._lock:
            return list(self._sources)


class SliceSource:
    """What another worker keeps under a key; one thread reads it. See :meth:`Slices.source`."""

    def __init__(self, slices: Slices, worker: WorkerId, key: str, *, generation: int, timeout_s: float) -> None:
        self.worker, self.key, self.generation = worker, key, generation
        self._slices, self._timeout_s = slices, timeout_s
        # The reading thread has all but `_reason`, which any thread sets, once, under the lock. While it waits for
        # `_over` the links' thread fills `_data` and moves `_asked` and `_moved_at`.
        self._lock = threading.Lock()
        self._part = self._offset = self._asked = 0
        self._room = self._data = torch.empty(0, dtype=torch.uint8)
        self._moved_at = 0.0
        self._over = threading.Event()
        self._reason: str | None = None

    def read(self, part: int, offset: int, size: int) -> bytes:
        """Fetches some bytes of a part.

        Raises:
            NotGiven: the worker is gone, is too slow or does not have them, or this was closed meanwhile; for good.

        After failure: what comes all the same goes nowhere.
        """
        self._part, self._offset, self._asked, self._moved_at = part, offset, 0, time.monotonic()
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.uint8)
        self._data = self._room[:size]
        with self._lock:
            if self._reason is None:
                self._over.clear()
        self._ask()
        while not self._over.wait(max(0.0, self._moved_at + self._timeout_s - time.monotonic())):
            if time.monotonic() >= self._moved_at + self._timeout_s:
                self.fail(f"gave nothing for {self._timeout_s:g} s")
        if self._reason is not None:
            raise NotGiven(self._reason)
        return self._data.numpy().tobytes()

    def close(self) -> None:
        """Gives up what is being read, in another thread too."""
        self.fail("nobody reads it any more")

    def _ask(self) -> None:
        """Asks for the next slice; without one, all are there."""
        begin, self._asked = self._asked, min(self._asked + SLICE_BYTES, self._data.numel())
        if begin < self._asked:
            self._slices.ask(self, self._part, self._offset + begin, self._data[begin : self._asked])
        else:
            self._over.set()

    def came(self) -> None:
        """The slice that was asked for is in its place."""
        self._moved_at = time.monotonic()
        self._ask()

    def fail(self, reason: str) -> None:
        """Ends it, for the first reason that is told."""
        with self._lock:
            self._reason = self._reason or reason
        self._slices.forget(self)
        self._over.set()
