"""What one worker has yet to send to another: the most urgent message first, in chunks."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.runtime.transport.links.wire import BACKGROUND, CHUNK_BYTES, URGENCY, Chunk, Kind, Label, after

__all__ = ["Outbox"]

_NOTHING = memoryview(b"")
_MOST_AT_ONCE = 8
"""So many chunks go in one call at most."""
_MOST_BACKGROUND = 16
"""So many messages of the background may wait: whoever asks for slices and takes none makes us hold no more of them."""


@dataclass(slots=True)
class _Message:
    label: Label
    body: memoryview
    lent: bool = False
    sent: int = 0
    total: int = 0
    """How long a body is that goes by another way."""
    carry: Callable[[], None] | None = None


@dataclass(slots=True)
class Outbox:
    """Messages that wait to go on one connection; knows no socket and no lock.

    What was begun is finished chunk by chunk, but between two chunks something more urgent may go.
    """

    _waiting: list[tuple[int, int, _Message]] = field(default_factory=list)
    _count: int = 0
    _rest: list[memoryview] = field(default_factory=list)
    _number: int = 0
    _owed: bool = False
    """Whether the rest is, in part at least, of a step."""

    @property
    def empty(self) -> bool:
        """Whether nothing is left to send; in this order, as what waits becomes the rest, in another thread too."""
        return not self._waiting and not self._rest

    @property
    def owes(self) -> bool:
        """Whether something of a step is left to send."""
        waiting = any(message.label.kind not in BACKGROUND for _, _, message in list(self._waiting))
        return waiting or (bool(self._rest) and self._owed)

    def put(self, label: Label, body: memoryview, *, lent: bool = False) -> None:
        """Adds a message; nobody changes its bytes any more, or, if they are ``lent``, not before ``give_back``.

        One of the background that is too many is forgotten, unless nobody would ask for it again.
        """
        asked = label.kind in BACKGROUND and label.kind is not Kind.CARRIER
        if not asked or self._in_background() < _MOST_BACKGROUND:
            self._add(_Message(label, body, lent))

    def announce(self, label: Label, total: int, carry: Callable[[], None]) -> None:
        """Adds a message whose header alone goes here: ``carry`` is called with that, and carries its body.

        It raises ConnectionError if it cannot, and the connection is of no use.
        """
        self._add(_Message(label, _NOTHING, total=total, carry=carry))

    def _add(self, message: _Message) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (URGENCY[message.label.kind], self._count, message))

    def _in_background(self) -> int:
        return sum(message.label.kind in BACKGROUND for _, _, message in self._waiting)

    def give_back(self) -> None:
        """Copies what is lent and not sent yet."""
        self._rest = [memoryview(bytes(part)) for part in self._rest]
        for _, _, message in self._waiting:
            if message.lent:
                message.body, message.lent = memoryview(bytes(message.body)), False

    def next(self) -> list[memoryview]:
        """Returns the bytes that go next, which stay the next ones until they were ``took``; nothing if all is sent.

        They are a chunk, and before it others that are together shorter than one.
        """
        if not self._rest:
            self._owed, left = False, CHUNK_BYTES
            while self._waiting and left > 0 and len(self._rest) < 2 * _MOST_AT_ONCE:
                left -= self._begin()
        return self._rest

    def _begin(self) -> int:
        """Adds the next chunk to what goes next; returns its size."""
        message = self._waiting[0][2]
        if message.carry is not None:
            return self._begin_carried(message, message.carry)
        size = min(CHUNK_BYTES, len(message.body) - message.sent)
        header = Chunk(message.label, len(message.body), message.sent, size, self._number).pack()
        self._number = after(self._number)
        self._owed |= message.label.kind not in BACKGROUND
        self._rest += [memoryview(header), message.body[message.sent : message.sent + size]]
        message.sent += size
        if message.sent == len(message.body):
            heapq.heappop(self._waiting)
        return size

    def _begin_carried(self, message: _Message, carry: Callable[[], None]) -> int:
        carry()  # before anybody hears of it, as it may not be possible
        header = Chunk(message.label, message.total, 0, 0, self._number, carried=True).pack()
        self._number, self._owed = after(self._number), True
        self._rest.append(memoryview(header))
        heapq.heappop(self._waiting)
        return len(header)

    def took(self, size: int) -> None:
        """So many of the next bytes are sent."""
        while self._rest and size >= len(self._rest[0]):
            size -= len(self._rest.pop(0))
        if size:
            self._rest[0] = self._rest[0][size:]

    def drop(self, generation: int) -> None:
        """Forgets all messages of ``generation`` and before; a chunk that has begun is finished all the same."""
        self._waiting = [each for each in self._waiting if each[2].label.generation > generation]
        heapq.heapify(self._waiting)
