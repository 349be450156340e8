"""Reads a worker's log back, on its node or from a store that others can reach."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.errors import LogGap
from holdfast.plain import one_line
from holdfast.storage.blobs import BlobStore
from holdfast.storage.tensorlog.chunks import LogChunk, chunks_of, read_chunk
from holdfast.storage.tensorlog.records import Entry, Key, LoggedTensor, LogOf, Scan, StepMark

__all__ = ["LogReader"]

Place = tuple[LogChunk, int]
"""Where an entry is: a chunk, and the number of its record there."""


@dataclass(slots=True)
class _Step:
    """What the records of a step come to, read in order: its entries, and what the last mark said, if one did."""

    entries: dict[Key, Place] = field(default_factory=dict)
    mark: StepMark | None = None
    process: int = 0

    def take(self, record: Entry | StepMark, place: Place) -> None:
        if isinstance(record, StepMark):
            if not record.complete:
                self.entries.clear()
            self.mark = record
            return
        self.mark = None  # it is gone on with
        self.entries[record.key] = place

    def go_on(self, process: int) -> None:
        """What follows is by this process: nobody completes what another one has left."""
        if process != self.process and self.mark is None:
            self.begin_anew()
        self.process = process

    def begin_anew(self) -> None:
        self.entries.clear()
        self.mark = None


class LogReader:
    """A log, as its store has it at this moment.

    Not for several threads at once. Reading in the order of steps reads every chunk once.

    Args:
        store: the folder of a node's logs, or the store that they were sent to.
        log: whose log.

    Raises:
        StorageError: the store cannot be read.
    """

    def __init__(self, store: BlobStore, log: LogOf) -> None:
        self._store, self._log = store, log
        self._chunks = chunks_of(store.list(), log.worker)
        self._scans: dict[int, Scan] = {}
        self._steps: dict[int, _Step] = {}
        self._last: tuple[int, bytes] | None = None

    def keys(self, step: int) -> tuple[Key, ...]:
        """Returns what is logged of a step, all of it, in the order in which it was written.

        Raises:
            LogGap: the step was left out, not finished, or deleted, or a chunk is missing; the message says which.
            CorruptBlob: a chunk is damaged where records of this step may have been.
            ConfigError: the log is another job's.
            StorageError: a chunk cannot be read.
        """
        found = self._step(step)
        if found.mark is None:
            self._complain(step, "it was not finished")
        elif not found.mark.complete:
            raise LogGap(f"{self._named(step)}: it was left out: {one_line(found.mark.why)}")
        elif len(found.entries) < found.mark.entries:
            self._complain(step, f"{found.mark.entries} entries were written, {len(found.entries)} are there")
        return tuple(found.entries)

    def read(self, key: Key) -> LoggedTensor:
        """Returns one entry of a step that is complete.

        Raises:
            LogGap: it is not there, see :meth:`keys`.
            CorruptBlob: its bytes, or those where it may have been, are not what was written.
            StorageError: its chunk cannot be read.
        """
        self.keys(key.step)
        place = self._step(key.step).entries.get(key)
        if place is None:
            raise LogGap(f"{self._store.url}: the log of {self._log} has nothing under {key}")
        chunk, at = place
        return self._scans[chunk.number].read(chunk.name, self._bytes(chunk), at)

    @property
    def bitwise(self) -> bool:
        """Whether everything that was read so far was logged as exactly as it was sent."""
        return all(scan.header.precision == "exact" for scan in self._scans.values())

    def _step(self, step: int) -> _Step:
        if step not in self._steps:
            self._steps[step] = self._read_step(step)
        return self._steps[step]

    def _read_step(self, step: int) -> _Step:
        found = _Step()
        for chunk in self._candidates(step):
            found.go_on(self._scan(chunk).header.process)
            for at, (record, _, _) in enumerate(self._scan(chunk).records):
                if record.step == step:
                    found.take(record, (chunk, at))
        return found

    def _candidates(self, step: int) -> tuple[LogChunk, ...]:
        """The chunks that may hold something of a step; whatever came after the first of them is there."""
        found = tuple(chunk for chunk in self._chunks if chunk.may_hold(step))
        if not found:
            raise LogGap(f"{self._named(step)}: it was deleted, or never written")
        numbers = {chunk.number for chunk in self._chunks}
        missing = [each for each in range(found[0].number, max(numbers)) if each not in numbers]
        if missing:
            raise LogGap(f"{self._named(step)}: chunk {missing[0]} is missing")
        return found

    def _scan(self, chunk: LogChunk) -> Scan:
        if chunk.number not in self._scans:
            self._bytes(chunk)
        return self._scans[chunk.number]

    def _bytes(self, chunk: LogChunk) -> bytes:
        if self._last is None or self._last[0] != chunk.number:
            data, found = read_chunk(self._store, chunk, self._log)
            self._last = chunk.number, data
            self._scans.setdefault(chunk.number, found)
        return self._last[1]

    def _complain(self, step: int, what: str) -> None:
        """Says what is missing of a step, or what is damaged where that may have been.

        Raises:
            CorruptBlob: a finished chunk of this step is damaged.
            LogGap: none is.
        """
        for chunk in self._candidates(step):
            if chunk.finished and (damage := self._scan(chunk).damage) is not None:
                raise damage
        raise LogGap(f"{self._named(step)}: {what}")

    def _named(self, step: int) -> str:
        return f"{self._store.url}: the log of {self._log} lacks step {step}"
