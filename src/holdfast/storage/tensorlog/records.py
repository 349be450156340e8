"""What a log is made of: entries, marks that say what became of a step, and how both are written as bytes.

A chunk is a sequence of records. Each is a frame, a head (msgpack), and, of an entry, a body (the tensor's bytes,
little-endian, in row-major order). The frame holds the sizes of both and a CRC-32 over sizes and head; the head of an
entry holds the CRC-32 of its body. So a flipped bit costs one entry, or all that follow, and is never read as data.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

import msgspec

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError, CorruptBlob
from holdfast.parsing import parsing

__all__ = [
    "FORMAT",
    "Buffer",
    "ChunkEnd",
    "ChunkHeader",
    "Entry",
    "Key",
    "LogOf",
    "LoggedTensor",
    "StepMark",
    "Precision",
    "Record",
    "Scan",
    "What",
    "encode_record",
    "entry_of",
    "scan",
]

FORMAT = "holdfast-log-1"
Precision: TypeAlias = Literal["exact", "bfloat16", "float16"]
"""How float tensors are kept: as they were sent, or in fewer bits, and then a replay is not bitwise."""

_FRAME = struct.Struct("<4sIQI")
_SIZES = struct.Struct("<IQ")
_MAGIC = b"HFLR"
_HEAD_BYTES = 1 << 16
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Buffer: TypeAlias = bytes | bytearray | memoryview


class What(StrEnum):
    """What an entry holds."""

    ACTIVATION = "activation"
    """What a layer hands on, sent to the worker of the next one."""
    GRADIENT = "gradient"
    """The gradient of that, sent back."""
    TIED_SUM = "tied-sum"
    """Of a group of layers that share a weight: the sum of its gradients over all of them."""
    VOTE = "vote"
    """The complete commit vote over the step before: what was finite, and squared norms.

    How gradients are clipped follows from it, and by what losses are scaled next.
    """


_PER_MICROBATCH = (What.ACTIVATION, What.GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Names an entry.

    Attributes:
        step: 0-based step.
        what: what it holds.
        place: of an activation or its gradient the boundary, as the number of layers before it; of a sum of tied layers
            the number of their group; else None.
        microbatch: global number of the micro-batch; None where it is of the whole step.

    >>> str(Key(step=12, what=What.GRADIENT, place=3, microbatch=5))
    'step 12: gradient at boundary 3, micro-batch 5'
    """

    step: int
    what: What
    place: int | None = None
    microbatch: int | None = None

    def __post_init__(self) -> None:
        """Checks that it names what it must, and nothing else."""
        placed, numbered = self.what is not What.VOTE, self.what in _PER_MICROBATCH
        if (self.place is not None, self.microbatch is not None) != (placed, numbered):
            raise ConfigError(
                f"a log has no {self.what} with place {self.place} and micro-batch {self.microbatch}: expected "
                f"{'a' if placed else 'no'} place and {'a' if numbered else 'no'} micro-batch"
            )
        if min(self.step, self.place or 0, self.microbatch or 0) < 0:
            raise ConfigError(f"a log has no entry of {self}: expected numbers from 0")

    def __str__(self) -> str:
        place = f" of group {self.place}" if self.what is What.TIED_SUM else f" at boundary {self.place}"
        microbatch = "" if self.microbatch is None else f", micro-batch {self.microbatch}"
        return f"step {self.step}: {self.what}{'' if self.place is None else place}{microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOf:
    """Whose log it is.

    Attributes:
        job: name of the job, for people.
        job_id: tells this job from all others, of the same name too.
        worker: who sent what is in it, as text such as ``1.2``.
    """

    job: str
    job_id: str
    worker: str

    def __str__(self) -> str:
        return f"worker {self.worker} of job {self.job} ({self.job_id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTensor:
    """An entry as it is read back.

    Attributes:
        key: its name.
        spec: the tensor as it was sent.
        stored: the type of its elements in ``data``; another one than that of ``spec`` where precision was given up.
        data: its elements in row-major order, little-endian.
    """

    key: Key
    spec: TensorSpec
    stored: str
    data: bytes

    @property
    def bitwise(self) -> bool:
        """Whether this is what was sent, bit for bit."""
        return self.stored == self.spec.dtype


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="record"):
    """Base of the heads: immutable, closed."""


class ChunkHeader(_Head, frozen=True, tag="chunk", kw_only=True):
    """The first record of a chunk: whose log it is a part of, which part, and how exact its tensors are.

    ``process``: the number of the first chunk that its process wrote. What an earlier one left without a mark is void.
    """

    format: str
    job: str
    job_id: str
    worker: str
    number: Count
    precision: Precision
    process: Count

    @property
    def log(self) -> LogOf:
        """Whose log it is."""
        return LogOf(job=self.job, job_id=self.job_id, worker=self.worker)


class Entry(_Head, frozen=True, tag="entry", kw_only=True):
    """The head of an entry: its key, what its body is, and the body's CRC-32."""

    step: Count
    what: What
    place: Count | None
    microbatch: Count | None
    shape: tuple[Count, ...]
    dtype: str
    stored: str
    crc32: Count

    @property
    def key(self) -> Key:
        """The name of the entry."""
        return Key(step=self.step, what=self.what, place=self.place, microbatch=self.microbatch)


class StepMark(_Head, frozen=True, tag="mark", kw_only=True):
    """What became of a step: all of its ``entries`` are there, or, if it is not ``complete``, none counts, and why.

    An entry of that step behind it begins the step anew.
    """

    step: Count
    complete: bool
    entries: Count
    why: str = ""


class ChunkEnd(_Head, frozen=True, tag="end", kw_only=True):
    """The last record of a finished chunk, so that one that was cut off anywhere is known by that."""


Record: TypeAlias = ChunkHeader | Entry | StepMark | ChunkEnd

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHeader | Entry | StepMark | ChunkEnd)


def entry_of(key: Key, spec: TensorSpec, stored: str, body: Buffer) -> Entry:
    """Returns the head of an entry.

    Args:
        key: its name.
        spec: the tensor as it was sent.
        stored: the type of the elements of ``body``.
        body: the elements, contiguous.

    Cost: a CRC-32 of the body.
    """
    return Entry(
        step=key.step,
        what=key.what,
        place=key.place,
        microbatch=key.microbatch,
        shape=spec.shape,
        dtype=spec.dtype,
        stored=stored,
        crc32=zlib.crc32(body),
    )


def encode_record(record: Record, body_bytes: int = 0) -> bytes:
    """Returns a record's frame and head; its body, of so many bytes, is to follow."""
    head = _encoder.encode(record)
    check = zlib.crc32(head, zlib.crc32(_SIZES.pack(len(head), body_bytes)))
    return _FRAME.pack(_MAGIC, len(head), body_bytes, check) + head


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a chunk holds, bodies unread.

    Attributes:
        header: the chunk's first record.
        records: the entries and marks in order, each with where its body begins and ends.
        ended: whether the last record is the end of a finished chunk.
        end: where the last sound record ends.
        damage: what is wrong with what follows; None if nothing follows.
    """

    header: ChunkHeader
    records: tuple[tuple[Entry | StepMark, int, int], ...]
    ended: bool
    end: int
    damage: CorruptBlob | None

    def read(self, name: str, data: bytes, at: int) -> LoggedTensor:
        """Returns the entry whose record is number ``at``.

        Args:
            name: of the chunk, for the error.
            data: of the chunk.
            at: index into ``records``, of an entry.

        Raises:
            CorruptBlob: its body is not what was written.
        """
        entry, start, stop = self.records[at]
        assert isinstance(entry, Entry)
        body = data[start:stop]
        if (found := zlib.crc32(body)) != entry.crc32:
            raise CorruptBlob(f"{name}: {entry.key}", f"CRC-32 {entry.crc32:08x}", f"{found:08x}")
        spec = TensorSpec(shape=entry.shape, dtype=entry.dtype)
        return LoggedTensor(key=entry.key, spec=spec, stored=entry.stored, data=body)


def scan(name: str, data: bytes) -> Scan:
    """Reads the heads of a chunk, as far as they are sound.

    Args:
        name: of the chunk, for errors.
        data: all of it.

    Raises:
        CorruptBlob: it does not even begin as a chunk does.
    """
    records: list[tuple[Entry | StepMark, int, int]] = []
    damage: CorruptBlob | None = None
    ended = False
    header, at = _first(name, data)
    while at < len(data):
        try:
            record, start, stop = _record(name, data, at)
            if isinstance(record, ChunkHeader):
                raise CorruptBlob(f"{name}, byte {at}", "an entry or a mark", "the beginning of a chunk")
        except CorruptBlob as error:
            damage = error
            break
        ended = isinstance(record, ChunkEnd)
        if not isinstance(record, ChunkEnd):
            records.append((record, start, stop))
        at = stop
    return Scan(header=header, records=tuple(records), ended=ended and damage is None, end=at, damage=damage)


def _first(name: str, data: bytes) -> tuple[ChunkHeader, int]:
    header, _, end = _record(name, data, 0)
    if not isinstance(header, ChunkHeader) or header.format != FORMAT:
        found = header.format if isinstance(header, ChunkHeader) else "another record"
        raise CorruptBlob(name, f"the beginning of a chunk in format {FORMAT}", found)
    return header, end


def _record(name: str, data: bytes, at: int) -> tuple[Record, int, int]:
    """The record that begins there, and where its body begins and ends."""
    where = f"{name}, byte {at}"
    if len(data) - at < _FRAME.size:
        raise CorruptBlob(where, f"{_FRAME.size} bytes of a frame", f"{len(data) - at}")
    magic, head_bytes, body_bytes, check = _FRAME.unpack_from(data, at)
    if magic != _MAGIC or head_bytes > _HEAD_BYTES:
        raise CorruptBlob(where, f"a frame that begins with {_MAGIC!r}", repr(magic))
    head_at, body_at = at + _FRAME.size, at + _FRAME.size + head_bytes
    head = data[head_at:body_at]
    found = zlib.crc32(head, zlib.crc32(_SIZES.pack(head_bytes, body_bytes)))
    if len(head) < head_bytes or found != check:
        raise CorruptBlob(where, f"a head of {head_bytes} bytes with CRC-32 {check:08x}", f"{len(head)}, {found:08x}")
    with parsing(lambda text: CorruptBlob(where, "a record", text), ConfigError):
        record = _decoder.decode(head)
        what = str(record.key) if isinstance(record, Entry) else where
    if len(data) - body_at < body_bytes:
        raise CorruptBlob(f"{name}: {what}", f"{body_bytes} bytes", f"{len(data) - body_at}")
    return record, body_at, body_at + body_bytes
