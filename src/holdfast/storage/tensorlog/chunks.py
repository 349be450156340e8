"""Names of chunks, and what is done with finished ones: sent to another store, and deleted when they are obsolete."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from holdfast.errors import ConfigError, CorruptBlob, MissingBlob
from holdfast.storage.blobs import BlobStore
from holdfast.storage.tensorlog.records import LogOf, Scan, scan

__all__ = [
    "LogChunk",
    "check_log",
    "chunks_of",
    "collect",
    "finished_name",
    "open_name",
    "read_chunk",
    "upload",
    "worker_of",
]

_NAME = re.compile(
    r"(?P<worker>[0-9.]+)/(?:open-(?P<open>[0-9]{8,18})"
    r"|chunk-(?P<number>[0-9]{8,18})-(?P<first>[0-9]{8,18})-(?P<last>[0-9]{8,18}))\.log",
    re.ASCII,
)
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """A chunk, as its name tells.

    Attributes:
        name: in its store.
        number: 0-based; those of one log follow one another without a gap.
        first: the first step of which it has records.
        last: the last one.
        finished: whether nothing more is written to it; else ``first`` and ``last`` are not known yet, and wide.
    """

    name: str
    number: int
    first: int
    last: int
    finished: bool

    def may_hold(self, step: int) -> bool:
        """Whether a record of this step can be in it."""
        return self.first <= step <= self.last


def open_name(worker: str, number: int) -> str:
    """Returns the name of a chunk that is being written."""
    return f"{worker}/open-{number:08d}.log"


def finished_name(worker: str, number: int, first: int, last: int) -> str:
    """Returns the name of a finished chunk."""
    return f"{worker}/chunk-{number:08d}-{first:08d}-{last:08d}.log"


def chunks_of(names: Iterable[str], worker: str) -> tuple[LogChunk, ...]:
    """Returns the chunks of one worker's log among these names, by number; what is named otherwise is none."""
    matches = (match for name in names if (match := _NAME.fullmatch(name)) and match["worker"] == worker)
    return tuple(sorted(map(_chunk, matches), key=lambda chunk: (chunk.number, chunk.finished)))


def worker_of(name: str) -> str | None:
    """Returns whose chunk this is, by its name; None if it is none."""
    match = _NAME.fullmatch(name)
    return None if match is None else match["worker"]


def _chunk(match: re.Match[str]) -> LogChunk:
    if match["open"] is not None:
        return LogChunk(name=match[0], number=int(match["open"]), first=0, last=_ENDLESS, finished=False)
    number, first, last = (int(match[group]) for group in ("number", "first", "last"))
    return LogChunk(name=match[0], number=number, first=first, last=last, finished=True)


def read_chunk(store: BlobStore, chunk: LogChunk, log: LogOf) -> tuple[bytes, Scan]:
    """Reads a chunk: all of its bytes, and what they hold.

    Where one that is not finished is torn at its end, its writer was killed there: what comes before is all there is.

    Raises:
        MissingBlob: it is gone.
        CorruptBlob: it does not begin as a chunk, or is not the part that its name says.
        ConfigError: it is of another log.
        StorageError: it cannot be read.
    """
    data = store.get(chunk.name)
    found = scan(chunk.name, data)
    if found.header.log != log:
        raise ConfigError(f"{store.url}/{chunk.name} is of the log of {found.header.log}; expected that of {log}")
    if found.header.number != chunk.number:
        raise CorruptBlob(chunk.name, f"chunk {chunk.number}", f"chunk {found.header.number}")
    if chunk.finished and not found.ended and found.damage is None:
        found = replace(found, damage=CorruptBlob(chunk.name, "the end of a chunk", f"{len(data)} bytes without one"))
    return data, found


def check_log(store: BlobStore, log: LogOf) -> None:
    """Checks that what a store has under a worker's name is that worker's log, of this job.

    Raises:
        ConfigError: it is of another job.
        StorageError: it cannot be read.
    """
    for chunk in chunks_of(store.list(), log.worker)[:1]:
        read_chunk(store, chunk, log)


def upload(source: BlobStore, target: BlobStore, log: LogOf, done: Iterable[str] = ()) -> Iterator[str]:
    """Copies the finished chunks of a log to another store, in order, yielding the name of each that is there.

    Args:
        source: where they are, usually the node's own folder.
        target: where they go.
        log: which log.
        done: names that are there already.

    Raises:
        StorageError: one cannot be read or written.

    After failure: those before it are there. Safe to repeat, with what was yielded as ``done``.
    """
    there = set(done)
    for chunk in chunks_of(source.list(), log.worker):
        if chunk.finished and chunk.name not in there:
            with contextlib.suppress(MissingBlob):  # it was deleted meanwhile, as nobody needs it any more
                target.put(chunk.name, source.get(chunk.name))
                yield chunk.name


def collect(store: BlobStore, worker: str, before: int) -> tuple[str, ...]:
    """Deletes the finished chunks of a log that have nothing but steps before this one; returns their names.

    Once a checkpoint of that step is complete, nobody replays anything before it. Oldest first, so what is left has no
    gap whenever this ends.

    Raises:
        StorageError: one cannot be deleted.

    After failure: those before it are gone. Safe to repeat.
    """
    chunks = chunks_of(store.list(), worker)
    old = [each.name for each in takewhile(lambda each: each.finished and each.last < before, chunks)]
    for name in old:
        store.delete(name)
    return tuple(old)
