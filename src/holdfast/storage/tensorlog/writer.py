"""Writes a worker's log into a folder of its node, chunk by chunk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError, CorruptBlob, StorageError
from holdfast.storage.blobs import RESERVED_BYTES, LocalStore, check_space, synchronise
from holdfast.storage.tensorlog.chunks import LogChunk, chunks_of, finished_name, open_name, read_chunk
from holdfast.storage.tensorlog.records import (
    FORMAT,
    Buffer,
    ChunkEnd,
    ChunkHeader,
    Entry,
    Key,
    LogOf,
    Precision,
    Record,
    StepMark,
    encode_record,
    entry_of,
)

__all__ = ["CHUNK_BYTES", "LogWriter"]

CHUNK_BYTES = 64 << 20
"""A chunk is finished once it is so large: small enough to be sent while the next one is written."""
_GONE_ON_WITH = 2
"""So many steps back at most one is gone on with."""


class LogWriter:
    """Appends entries and marks. What a process of the same job and worker left here before is kept, and gone on from.

    Not for several threads at once. Steps may be written in any order, and may overlap.

    Args:
        folder: of the logs of a node; made, private to the user, with the first record.
        log: whose log it is.
        precision: in which type float tensors are kept; written into every chunk.
        chunk_bytes: a chunk is finished once it has so many bytes.
        reserved_bytes: leave so much of the disk free.

    Raises:
        ConfigError: the folder has a log of another job under this worker's name.
        StorageError: what is there cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        log: LogOf,
        *,
        precision: Precision = "exact",
        chunk_bytes: int = CHUNK_BYTES,
        reserved_bytes: int = RESERVED_BYTES,
    ) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"a chunk of {chunk_bytes} bytes is impossible: expected at least 1")
        self._folder, self._log, self._precision = folder, log, precision
        self._chunk_bytes, self._reserved_bytes = chunk_bytes, reserved_bytes
        self._file: int | None = None
        self._end = 0
        self._steps: tuple[int, int] | None = None
        self._open_steps: dict[int, set[Key]] = {}
        self._num_finished = 0
        self._number = self._process = self._take_over()

    @property
    def store(self) -> LocalStore:
        """The folder as a store, in which finished chunks can be read."""
        return LocalStore(self._folder, reserved_bytes=self._reserved_bytes)

    @property
    def log(self) -> LogOf:
        """Whose log it is."""
        return self._log

    @property
    def precision(self) -> Precision:
        """In which type float tensors are kept."""
        return self._precision

    @property
    def num_finished(self) -> int:
        """How many chunks this writer has finished."""
        return self._num_finished

    def append(self, key: Key, spec: TensorSpec, body: Buffer, stored: str | None = None) -> None:
        """Writes one entry; of two of the same key the later one counts.

        Args:
            key: its name.
            spec: the tensor as it was sent.
            body: its elements in row-major order, little-endian, as a contiguous buffer of bytes.
            stored: the type of these elements; None: that of ``spec``.

        Raises:
            StorageError: it could not be written, for lack of space for example.

        After failure: the log is as it was. Safe to repeat.
        """
        self._write(entry_of(key, spec, stored or spec.dtype, body), body)
        self._open_steps.setdefault(key.step, set()).add(key)

    def complete(self, step: int) -> None:
        """Says that all of a step is written: all that was appended of it since it was dropped, if it was.

        Raises:
            StorageError: it could not be written.

        After failure: the step does not count as complete. Safe to repeat.
        """
        self._write(StepMark(step=step, complete=True, entries=len(self._open_steps.get(step, ()))))
        for old in [each for each in self._open_steps if each < step - _GONE_ON_WITH]:
            del self._open_steps[old]

    def drop(self, step: int, why: str) -> None:
        """Says that nothing counts that was written of a step so far; ``why`` for people.

        Raises:
            StorageError: it could not be written.

        After failure: the step does not count either, as nothing says that it is complete. Safe to repeat.
        """
        self._write(StepMark(step=step, complete=False, entries=0, why=why))
        self._open_steps.pop(step, None)

    def finish(self) -> None:
        """Finishes the chunk that is being written: everything so far is on the disk, and can be read and sent.

        Raises:
            StorageError: it could not be synchronised or renamed.

        After failure: everything can still be read here. Safe to repeat.
        """
        if self._file is None or self._steps is None:
            return
        first, last = self._steps
        with self._complaining():
            self._append(self._file, ChunkEnd(), b"")
            os.fsync(self._file)
            place = self._folder / open_name(self._log.worker, self._number)
            place.replace(self._folder / finished_name(self._log.worker, self._number, first, last))
            synchronise(place.parent)
        self._close()
        self._number += 1
        self._num_finished += 1

    def close(self) -> None:
        """Ends writing without finishing the chunk, as the end of the process would."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._end, self._steps = None, 0, None

    def _write(self, record: Entry | StepMark, body: Buffer = b"") -> None:
        with self._complaining():
            file = self._opened(len(body))
            if self._end == 0:
                self._append(file, self._header(), b"")
            self._append(file, record, body)
        first, last = self._steps or (record.step, record.step)
        self._steps = min(first, record.step), max(last, record.step)
        if self._end >= self._chunk_bytes:
            self.finish()

    def _opened(self, body_bytes: int) -> int:
        """The chunk that is being written, begun if there is none, on a disk that has room for more."""
        place = self._folder / open_name(self._log.worker, self._number)
        if self._file is None:
            for folder in (self._folder, place.parent):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_space(place.parent, body_bytes, self._reserved_bytes)
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(place, flags, 0o600)
        return self._file

    def _header(self) -> ChunkHeader:
        log = self._log
        return ChunkHeader(
            format=FORMAT,
            job=log.job,
            job_id=log.job_id,
            worker=log.worker,
            number=self._number,
            precision=self._precision,
            process=self._process,
        )

    def _append(self, file: int, record: Record, body: Buffer) -> None:
        """Writes a record behind the last whole one; what a failure left behind that goes first."""
        if os.fstat(file).st_size != self._end:
            os.ftruncate(file, self._end)
        parts = [memoryview(encode_record(record, len(body))), memoryview(body)]
        for part in parts:
            left = part
            while left:
                left = left[os.write(file, left) :]
        self._end += sum(map(len, parts))

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = self._folder / self._log.worker
            raise StorageError(f"{place}: the log cannot be written: {error.strerror or error}") from error

    def _take_over(self) -> int:
        """Finishes the chunk over which an earlier process was killed; returns the number of the next one."""
        found = chunks_of(self.store.list(), self._log.worker)
        if not found:
            return 0
        last = found[-1]
        if last.finished:
            read_chunk(self.store, last, self._log)
            return last.number + 1
        return last.number + self._finish_for(last)

    def _finish_for(self, chunk: LogChunk) -> bool:
        """Makes of what is sound in it a finished chunk; returns whether there is anything, else it is deleted."""
        try:
            _, found = read_chunk(self.store, chunk, self._log)
        except CorruptBlob:  # killed before even its beginning was written
            found = None
        if found is None or not found.records:
            self.store.delete(chunk.name)
            return False
        steps = [record.step for record, _, _ in found.records]
        place = self._folder / chunk.name
        with self._complaining():
            with place.open("r+b") as file:
                file.truncate(found.end)
                file.seek(0, os.SEEK_END)
                file.write(encode_record(ChunkEnd()))
                file.flush()
                os.fsync(file.fileno())
            place.replace(self._folder / finished_name(self._log.worker, chunk.number, min(steps), max(steps)))
            synchronise(place.parent)
        return True
