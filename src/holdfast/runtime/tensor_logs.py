"""A worker's logs of what crosses nodes: written while it trains, read while it replays what others cannot."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.config.job import Logging
from holdfast.core.instructions import Payload
from holdfast.core.program import Wanted
from holdfast.errors import ConfigError, CorruptBlob, LogGap, ReplicaDiverged, StorageError
from holdfast.protocol.effects import Consult
from holdfast.protocol.executor import Keep
from holdfast.runtime.background_log import BackgroundLog, LogReport, When, tensor_of
from holdfast.runtime.transport.framing import bytes_of
from holdfast.storage.blobs import BlobStore, LocalStore, open_store
from holdfast.storage.tensorlog.chunks import collect, worker_of
from holdfast.storage.tensorlog.reader import LogReader
from holdfast.storage.tensorlog.records import Key, LogOf, What
from holdfast.storage.tensorlog.writer import LogWriter

__all__ = ["TensorLogs", "node_folder"]

_CLOSE_S = 10.0
_AHEAD = 2
"""Steps that are read before they are needed."""
_WHAT = {Payload.ACTIVATION: What.ACTIVATION, Payload.GRADIENT: What.GRADIENT, Payload.SUM: What.TIED_SUM}
_VERDICT: Wanted = (Payload.VOTE, 0, 0)


def node_folder(directory: Path, node: int | str) -> Path:
    """Returns where the logs of a node lie in a job's folder of logs."""
    return directory / f"node-{node}"


class TensorLogs:
    """See :class:`holdfast.runtime.driver.Logs`. What is replayed is logged apart, as it is of steps logged before.

    Args:
        settings: of the job.
        directory: the job's own folder of logs, with one for every node in it.
        node: ours.
        log: whose log it is.
        note: takes what a person should know.
        url: where all nodes can read the job's logs; None: each other's disks.
        compares: whether what is replayed has the bits that were logged, whoever runs it.
    """

    def __init__(
        self,
        settings: Logging,
        directory: Path,
        node: int | str,
        log: LogOf,
        note: Callable[[str], None],
        url: str | None = None,
        *,
        compares: bool = True,
    ) -> None:
        self._compares = compares
        self._settings, self._directory, self._log, self._note, self._url = settings, directory, log, note, url
        self._folder = node_folder(directory, node)
        self._main: BackgroundLog | None = None
        self._apart: BackgroundLog | None = None
        self._names: list[str] = []
        self._reading: _Reading | None = None
        self._expected: Mapping[Key, torch.Tensor] = {}
        self._bitwise = True
        self._stop = 0
        self._given_up = False

    def keep(self, keep: Keep) -> None:
        """See Logs.keep."""
        key = _key_of((keep.payload, keep.boundary, keep.number), keep.step)
        tensor = _tensor(keep.value).cpu()
        known = self._expected.get(key)
        if known is not None and bytes_of(known).data != bytes_of(tensor.detach()).data:
            raise ReplicaDiverged(f"worker {self._log.worker} replays {key}, and gets other bits than were logged")
        log = self._writing()
        if log is not None:
            log.hand_over(key, tensor)

    def kept(self, step: int, why: str = "") -> None:
        """See Logs.kept."""
        log = self._writing()
        if log is not None and why:
            log.abort_step(step, why)
        elif log is not None:
            log.end_step(step)
        if self._reading is not None and step == self._stop - 1:
            self.leave()

    def idle(self) -> AbstractContextManager[None]:
        """See Logs.idle."""
        return nullcontext() if self._main is None else self._main.idle()

    def flush(self, limit_s: float) -> bool:
        """See Logs.flush."""
        flushed = self._main is None or self._main.flush(limit_s)
        if not flushed:
            self._note(f"what it logged cannot be read by others within {limit_s:g} s")
        return flushed

    def collect(self, before: int) -> None:
        """See Logs.collect."""
        if self._main is not None:
            self._main.collect(before)
        if self._names:
            threading.Thread(target=self._collect_apart, args=(before,), name="collect", daemon=True).start()

    def consult(self, consult: Consult) -> None:
        """See Logs.consult."""
        self.leave()
        self._names.append(f"{self._log.worker}.{consult.generation}.{len(self._names)}")
        self._apart = self._open(self._names[-1], When.AT_ONCE)
        self._reading, self._stop = _Reading(self._readers(), consult, compares=self._compares), consult.stop
        self._bitwise = True

    def consulted(self, step: int, limit_s: float) -> Mapping[Wanted, Any] | None:
        """See Logs.consulted."""
        assert self._reading is not None, "what is read was asked for"
        found = self._reading.take(step, limit_s)
        if found is None:
            return None
        self._expected, self._bitwise = found.expected, found.bitwise
        return found.values

    def leave(self) -> None:
        """See Logs.leave."""
        reading, apart = self._reading, self._apart
        self._reading, self._apart, self._expected = None, None, {}
        if reading is not None:
            reading.end()
            if not self._bitwise:
                self._note("replayed what was logged in lower precision: the result is not that of a run without loss")
        if apart is not None and not apart.close(_CLOSE_S):
            self._note("what it replayed could not be logged: whoever is lost next may need a checkpoint")

    def _writing(self) -> BackgroundLog | None:
        if self._reading is not None:
            return self._apart
        if self._main is None and not self._given_up:
            self._main = self._open(self._log.worker, When(self._settings.when))
            self._given_up = self._main is None
        return self._main

    def _open(self, name: str, when: When) -> BackgroundLog | None:
        """A log; None, with the reason told, if what is there already cannot be gone on from."""
        log = LogOf(job=self._log.job, job_id=self._log.job_id, worker=name)
        try:
            writer = LogWriter(self._folder, log, precision=self._settings.precision)
        except (StorageError, ConfigError) as error:
            self._note(f"logs nothing: {error}")
            return None
        return BackgroundLog(
            writer,
            most_bytes=self._settings.most_bytes,
            when=when,
            store=self._shared(),
            send_all=self._settings.upload == "always",
            tell=self._tell,
        )

    def _tell(self, report: LogReport) -> None:
        self._note(str(report))

    def _shared(self) -> BlobStore | None:
        return None if self._url is None else open_store(self._url)

    def _readers(self) -> list[LogReader]:
        """Of all logs that there are, whoever's."""
        shared = self._shared()
        stores: Iterable[BlobStore] = [shared] if shared is not None else self._nodes()
        return [
            LogReader(store, LogOf(job=self._log.job, job_id=self._log.job_id, worker=str(name)))
            for store in stores
            for name in sorted({*map(worker_of, store.list())} - {None}, key=str)
        ]

    def _nodes(self) -> list[BlobStore]:
        found = sorted(self._directory.glob("node-*")) if self._directory.is_dir() else []
        return [LocalStore(folder) for folder in found]

    def _collect_apart(self, before: int) -> None:
        """What cannot be deleted now may be with the next checkpoint."""
        shared = self._shared()
        for store in (LocalStore(self._folder), *([] if shared is None else [shared])):
            for name in list(self._names):
                try:
                    collect(store, name, before)
                except StorageError as error:
                    self._note(f"old logs stay for now: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What was read of a step; what comes out of it, as far as that was logged; whether all so far was kept exactly."""

    step: int
    values: Mapping[Wanted, Any]
    expected: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    bitwise: bool = True


class _Reading:
    """Reads what a replay needs, some steps ahead of it."""

    def __init__(self, readers: list[LogReader], consult: Consult, *, compares: bool) -> None:
        # The readers are the thread's alone, to its end, which nobody waits for: what it found goes over by the queue.
        self._readers, self._consult, self._compares = readers, consult, compares
        self._found: queue.Queue[_Step | Exception] = queue.Queue(maxsize=_AHEAD)
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="replay-reader", daemon=True).start()

    def take(self, step: int, limit_s: float) -> _Step | None:
        """Returns a step, in order; None if it is not there in time. Raises what reading it has raised."""
        try:
            found = self._found.get(timeout=limit_s)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        assert found.step == step, "steps are taken in the order in which they are read"
        return found

    def end(self) -> None:
        """Reads no further."""
        self._ended.set()

    def _run(self) -> None:
        for step in range(self._consult.start, self._consult.stop):
            try:
                found: _Step | Exception = self._read(step)
            except StorageError as error:
                found = error
            except Exception as error:  # noqa: BLE001 - a thread's main: whoever waits for it hears of it
                found = StorageError(f"{type(error).__name__}: {error}")
            while not self._ended.is_set():
                try:
                    self._found.put(found, timeout=1.0)
                    break
                except queue.Full:
                    continue
            if self._ended.is_set() or isinstance(found, Exception):
                return

    def _read(self, step: int) -> _Step:
        logged = _Logged(self._readers, step)
        values: dict[Wanted, Any] = {
            each: logged.read(_key_of(each, step)) for each in sorted(self._consult.wanted, key=str)
        }
        if step + 1 < self._consult.stop:
            vote = _Logged(self._readers, step + 1).read(Key(step=step + 1, what=What.VOTE))
            values[_VERDICT] = bytes_of(vote).data.tobytes()
        numbers = sorted({number for payload, _, number in self._consult.wanted if payload is not Payload.SUM})
        ends = (_key_of((*end, number), step) for end in sorted(self._consult.ends) for number in numbers)
        bitwise = all(reader.bitwise for reader in self._readers)
        known = {key: logged.read(key) for key in ends if logged.has(key)} if self._compares and bitwise else {}
        return _Step(step=step, values=values, expected=known, bitwise=bitwise)


class _Logged:
    """A step, as all logs together have it."""

    def __init__(self, readers: list[LogReader], step: int) -> None:
        self._step, self._troubles = step, list[Exception]()
        self._where: dict[Key, list[LogReader]] = {}
        for reader in readers:
            try:
                keys = reader.keys(step)
            except (StorageError, ConfigError) as error:
                self._troubles.append(error)
                continue
            for key in keys:
                self._where.setdefault(key, []).append(reader)

    def has(self, key: Key) -> bool:
        """Whether some log has it."""
        return key in self._where

    def read(self, key: Key) -> torch.Tensor:
        """Returns an entry, from the first log that has it undamaged.

        Raises:
            CorruptBlob: it is damaged wherever it is.
            LogGap: no log has it; the message says what is wrong with each.
        """
        for reader in self._where.get(key, ()):
            try:
                return tensor_of(reader.read(key))
            except StorageError as error:
                self._troubles.append(error)
        damaged = next((each for each in self._troubles if isinstance(each, CorruptBlob)), None)
        if damaged is not None:
            raise damaged
        why = "; ".join(map(str, self._troubles)) or "there are no logs"
        raise LogGap(f"no log has {key}: {why}")


def _key_of(wanted: Wanted, step: int) -> Key:
    payload, place, number = wanted
    if payload is Payload.VOTE:
        return Key(step=step, what=What.VOTE)
    microbatch = None if payload is Payload.SUM else number
    return Key(step=step, what=_WHAT[payload], place=place, microbatch=microbatch)


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    assert isinstance(value, torch.Tensor), "engines hand on tensors"
    return value
