"""What travels on a link: messages in chunks, each behind a header that says of which message it is a part."""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from holdfast.core.instructions import Payload
from holdfast.errors import HoldfastError
from holdfast.runtime.transport.port import MessageKey, SumKey

__all__ = [
    "BACKGROUND",
    "CARRIED",
    "CHUNK_BYTES",
    "HEADER_BYTES",
    "MESSAGES",
    "NO_STEP",
    "URGENCY",
    "BadFrame",
    "Chunk",
    "Kind",
    "Label",
    "after",
    "label_of",
    "label_of_sum",
]

CHUNK_BYTES = 1 << 20
"""The longest part of a message that is sent at a stretch: what is more urgent waits for no more than that."""
_HEADER = struct.Struct("<qqB?xxiQQQII")
HEADER_BYTES = _HEADER.size
_NUMBERS = 1 << 32
_EVERYTHING = 1 << 48
"""A size that no message has: beyond it, additions would no longer be exact, and nothing would fit."""


class BadFrame(HoldfastError):
    """What came on a link is no chunk of a message that could be expected there."""


NO_STEP = -1
"""Says ENTER where it is not known yet which step will be the first."""


class Kind(IntEnum):
    """What a message is, in the order in which messages of equal age are sent."""

    ENTER = 0
    """A worker has come to a generation."""
    VOTE = 1
    VERDICT = 2
    ACTIVATION = 3
    GRADIENT = 4
    PART = 5
    """One part of a contribution to a sum, or a share of it."""
    TOTAL = 6
    """A share of a sum."""
    ASK = 7
    """Asks for a slice of what another worker keeps."""
    SLICE = 8
    """A slice that was asked for."""
    SUM = 9
    """A sum that stands, for an owner that has not got it."""
    AUDIT = 10
    """What is to be computed a second time."""
    HEADER = 11
    """What somebody contributes to a sum: how many parts, and what is said beside them."""
    CARRIER = 12
    """What two workers tell each other to build a group that carries bodies."""


_KINDS = {
    Payload.VOTE: Kind.VOTE,
    Payload.VERDICT: Kind.VERDICT,
    Payload.ACTIVATION: Kind.ACTIVATION,
    Payload.GRADIENT: Kind.GRADIENT,
    Payload.SUM: Kind.SUM,
    Payload.AUDIT: Kind.AUDIT,
}
MESSAGES = frozenset(_KINDS.values()) - {Kind.SUM}
"""What goes from one worker to another; the rest is for sums, or for the links themselves."""
_KNOWN = {int(kind): kind for kind in Kind}
_EQUALS = {
    Kind.GRADIENT: Kind.ACTIVATION,
    Kind.TOTAL: Kind.PART,
    Kind.HEADER: Kind.PART,
    Kind.SUM: Kind.PART,
    Kind.AUDIT: Kind.PART,
    Kind.SLICE: Kind.ASK,
    Kind.CARRIER: Kind.ASK,
}
URGENCY = {kind: _EQUALS.get(kind, kind) for kind in Kind}
"""Of two messages that wait, the one with the smaller number goes first; with equal ones, the one that came first."""
CARRIED = frozenset((Kind.ACTIVATION, Kind.GRADIENT, Kind.PART, Kind.TOTAL))
"""Of what the body may come by another way."""
BACKGROUND = frozenset((Kind.ASK, Kind.SLICE, Kind.CARRIER))
"""What belongs to no step, and goes when nothing else does; its generation says only when to drop it."""


class Label(NamedTuple):
    """Which message it is, among all between two workers.

    Attributes:
        generation: the membership under which it was sent.
        step: the step that it belongs to.
        kind: what it is.
        microbatch: the number of the micro-batch, of a chain or of a part; else 0.
        place: how many layers lie before an activation or a gradient; of a sum or a slice what tells it from others;
            else 0.
    """

    generation: int
    step: int
    kind: Kind
    microbatch: int = 0
    place: int = 0

    def __str__(self) -> str:
        name = f"{self.kind.name.lower()} of generation {self.generation}, step {self.step}"
        return f"{name}, micro-batch {self.microbatch}" if Kind.ENTER < self.kind < Kind.PART else name


class Chunk(NamedTuple):
    """What a header says.

    Attributes:
        label: of which message this is a part.
        total: the size of the message in bytes.
        offset: how much of it came before.
        size: how much of it follows.
        number: how many chunks went before it on the same connection, modulo 2^32.
        carried: whether nothing follows, and all of the message comes by another way, as the next there.
    """

    label: Label
    total: int
    offset: int
    size: int
    number: int = 0
    carried: bool = False

    def pack(self) -> bytes:
        """Returns the header."""
        label = self.label
        what = (label.generation, label.step, label.kind, self.carried, label.microbatch, label.place)
        return _HEADER.pack(*what, self.total, self.offset, self.size, self.number)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, offset: int = 0) -> Chunk:
        """Reads a header.

        Raises:
            BadFrame: it is none: its parts contradict each other.
        """
        parts = _HEADER.unpack_from(data, offset)
        generation, step, code, carried, microbatch, place, total, begin, size, number = parts
        kind = _KNOWN.get(code)
        wanted = 0 if carried else min(CHUNK_BYTES, total - begin)
        alone = not carried or (kind in CARRIED and not begin)
        if kind is None or not begin <= total <= _EVERYTHING or size != wanted or not alone:
            raise BadFrame(f"kind {code}, {size} bytes from {begin} on of {total}: there is no such chunk")
        return cls(Label(generation, step, kind, microbatch, place), total, begin, size, number, carried)


def after(number: int) -> int:
    """Returns the number of the chunk that goes next."""
    return (number + 1) % _NUMBERS


def label_of(key: MessageKey) -> Label:
    """Returns what a message between two layers, or of a commit vote, goes by."""
    return Label(key.generation, key.step, _KINDS[key.payload], key.microbatch, key.boundary)


def label_of_sum(key: SumKey, kind: Kind, number: int = 0) -> Label:
    """Returns what belongs to a reduction goes by; ``number`` of the parts that one worker contributes."""
    return Label(key.generation, key.step, kind, number, _place_of(key.reduction.layers))


@cache
def _place_of(layers: tuple[int, ...]) -> int:
    """What tells a sum from all others of its step: a digest, as any number of layers may share a weight."""
    name = "+".join(map(str, layers)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
