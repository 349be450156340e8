"""Logs what a worker sends while it trains: whoever sends hands a tensor over, a thread writes it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from holdfast.core.tensorspec import TensorSpec
from holdfast.data.items import spec_of
from holdfast.errors import ConfigError, CorruptBlob, StorageError
from holdfast.runtime.chunk_sender import ChunkSender
from holdfast.runtime.tensors import num_bytes, torch_dtype
from holdfast.runtime.transport.framing import bytes_of
from holdfast.storage.blobs import BlobStore
from holdfast.storage.tensorlog.chunks import collect
from holdfast.storage.tensorlog.records import Key, LoggedTensor, Precision
from holdfast.storage.tensorlog.writer import LogWriter

__all__ = ["BackgroundLog", "LogCondition", "LogReport", "When", "tensor_of"]


class When(StrEnum):
    """When tensors are written."""

    AT_ONCE = "at-once"
    """By a thread, as soon as it comes to it."""
    IDLE = "idle"
    """By a thread, while the worker waits anyway, or once half of the memory is taken."""
    BEFORE_SENDING = "before-sending"
    """By whoever hands them over, who waits for it: a baseline."""


class LogCondition(StrEnum):
    """How logging goes."""

    LOGGING = "logging"
    BEHIND = "behind"
    """What is to be written takes all the memory that it may: whole steps are left out."""
    FAILED = "failed"
    """The log cannot be written: steps are left out until it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """How logging goes, and the figures.

    Attributes:
        condition: since the last step that was logged whole, or left out.
        why: what is wrong, for people; empty if nothing is.
        queued_bytes: what waits to be written, and is held in memory for that.
        most_bytes: how much that may be.
        written_bytes: of tensors, so far.
        bytes_per_s: how fast they were written, while any were; NaN before the first.
        logged_steps: steps that are complete in the log.
        left_out_steps: steps that are not, and never will be.
        sending: what is wrong with the store that other nodes read from, for people; empty if nothing is.
    """

    condition: LogCondition
    why: str
    queued_bytes: int
    most_bytes: int
    written_bytes: int
    bytes_per_s: float
    logged_steps: int
    left_out_steps: int
    sending: str = ""

    def __str__(self) -> str:
        told = [f"log {self.condition}" + (f": {self.why}" if self.why else "")]
        told.append(f"{self.queued_bytes} of {self.most_bytes} bytes wait")
        told.append(f"{self.logged_steps} step(s) logged, {self.left_out_steps} left out")
        if not math.isnan(self.bytes_per_s):
            told.append(f"{self.written_bytes} bytes written at {self.bytes_per_s / 1e6:.1f} MB/s")
        return "; ".join([*told, *filter(None, [self.sending])])


@dataclass(slots=True)
class _Attempt:
    """One way of making a step; it counts, or it is left out as a whole."""

    step: int
    left_out: bool = False


@dataclass(frozen=True, slots=True)
class _Tensor:
    attempt: _Attempt
    key: Key
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _End:
    """All of an attempt was handed over; ``why`` it does not count, empty if it does."""

    attempt: _Attempt
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Act:
    """Something else that is done in order; ``worked`` says that nothing was raised."""

    act: Callable[[], None]
    urgent: bool
    done: threading.Event = field(default_factory=threading.Event)
    worked: threading.Event = field(default_factory=threading.Event)


class BackgroundLog:
    """Takes tensors and numbers from the thread that trains, and has them written. Nothing that goes wrong is raised.

    Whoever hands a tensor over never waits, but with ``When.BEFORE_SENDING``. Of what waits to be written, at most
    ``most_bytes`` are held. Where more would be, the whole step is left out: what waits of it is forgotten, what comes
    of it is not taken, and the log says so. So is a step of which something could not be written.

    Args:
        writer: where to; nobody else uses it any more.
        most_bytes: of tensors that wait.
        when: they are written.
        store: where finished chunks go for other nodes; None: nowhere.
        send_all: whether they go there as soon as they are finished; else when :meth:`flush` is called.
        tell: takes a report whenever the condition, or that of the store, has changed; in any thread, without a lock.
    """

    def __init__(
        self,
        writer: LogWriter,
        *,
        most_bytes: int,
        when: When = When.AT_ONCE,
        store: BlobStore | None = None,
        send_all: bool = False,
        tell: Callable[[LogReport], None] = lambda report: None,
    ) -> None:
        if most_bytes < 1:
            raise ConfigError(f"{most_bytes} bytes for what is to be logged are impossible: expected at least 1")
        self._writer, self._most_bytes, self._when, self._tell = writer, most_bytes, when, tell
        self._sender = None if store is None else ChunkSender(writer, store, self._told)
        self._send_all = send_all
        # What follows is read and changed under `_changed`: by the thread that trains, the one that hears commands, the
        # one that writes, and the one that sends chunks. `_writer` has one user at a time: the thread that writes, or,
        # with `BEFORE_SENDING`, whoever holds `_writing`; it may wait for a disk, so `_changed` is not held then.
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._work: deque[_Tensor | _End | _Act] = deque()
        self._attempts: dict[int, _Attempt] = {}
        self._owed: dict[int, str] = {}
        self._queued = self._urgent = 0
        self._idle = self._closed = False
        self._condition, self._why = LogCondition.LOGGING, ""
        self._written = self._logged = self._left_out = 0
        self._writing_s = 0.0
        if when is not When.BEFORE_SENDING:
            threading.Thread(target=self._run, name="tensor-log", daemon=True).start()

    def hand_over(self, key: Key, tensor: torch.Tensor) -> None:
        """Takes a tensor that is sent to another node, to be written later; returns at once.

        Args:
            key: what it is.
            tensor: on the CPU. Its memory is not copied, and held until it is written: nobody may change it.

        After failure: nothing is raised; :meth:`report` tells, and the log says that it lacks the step.
        """
        tensor = _alone(tensor.detach())
        with self._changed:
            attempt = self._attempts.setdefault(key.step, _Attempt(key.step))
            if attempt.left_out:
                return
            waiting = f"{self._queued} of {self._most_bytes} bytes wait to be written, and {tensor.nbytes} more come"
            crowded = self._queued + tensor.nbytes > self._most_bytes
            if crowded:
                self._leave_out(attempt)
                self._add(_End(attempt, waiting))  # in order: an earlier attempt at this step may be complete
            else:
                self._queued += tensor.nbytes
                self._add(_Tensor(attempt, key, tensor))
        if crowded:
            self._turn(LogCondition.BEHIND, waiting)
        self._write_here()

    def end_step(self, step: int) -> None:
        """Says that a step is committed, and all of it was handed over."""
        self._end(step, "")

    def abort_step(self, step: int, why: str) -> None:
        """Says that what was handed over of a step does not count, as it is made again; ``why`` for people."""
        self._end(step, why)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Within it the thread that trains waits for somebody: there is time to write."""
        self._set_idle(True)
        try:
            yield
        finally:
            self._set_idle(False)

    def flush(self, limit_s: float) -> bool:
        """Has all that was handed over written, finished and sent, whoever is busy: a failure was detected.

        Args:
            limit_s: how long to wait for it, in seconds; 0 not at all.

        Returns:
            Whether all is where other nodes can read it: in the store if there is one, else on this node's disk. Steps
            that were left out do not count.
        """
        until = time.monotonic() + limit_s
        if not self._do(self._finish, limit_s, urgent=True):
            return False
        return self._sender is None or self._sender.sent(until - time.monotonic())

    def collect(self, before: int, limit_s: float = 0.0) -> bool:
        """Has chunks deleted that have nothing but steps before this one, of which there is a checkpoint.

        Returns:
            Whether that is done on this node's disk, within ``limit_s`` seconds; in the store it is done later.
        """
        return self._do(lambda: self._collect(before), limit_s, urgent=limit_s > 0)

    def report(self) -> LogReport:
        """Returns how logging goes."""
        with self._changed:
            return LogReport(
                condition=self._condition,
                why=self._why,
                queued_bytes=self._queued,
                most_bytes=self._most_bytes,
                written_bytes=self._written,
                bytes_per_s=self._written / self._writing_s if self._writing_s else math.nan,
                logged_steps=self._logged,
                left_out_steps=self._left_out,
                sending="" if self._sender is None else self._sender.trouble,
            )

    def close(self, limit_s: float) -> bool:
        """Flushes as :meth:`flush` does, and ends the threads; returns whether everything was written and sent.

        Nothing may be handed over afterwards.
        """
        flushed = self.flush(limit_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._sender is not None:
            self._sender.close()
        return flushed

    def _end(self, step: int, why: str) -> None:
        with self._changed:
            attempt = self._attempts.pop(step, None) or _Attempt(step)
            if not attempt.left_out:
                self._add(_End(attempt, why))
        self._write_here()

    def _do(self, act: Callable[[], None], limit_s: float, *, urgent: bool) -> bool:
        """Has something done after all that waits, if urgent whether or not there is time; whether it worked."""
        work = _Act(act, urgent)
        with self._changed:
            if self._closed:
                return False
            self._urgent += urgent
            self._add(work)
        self._write_here()
        return work.done.wait(max(0.0, limit_s)) and work.worked.is_set()

    def _add(self, work: _Tensor | _End | _Act) -> None:
        """With the lock."""
        self._work.append(work)
        self._wake()

    def _wake(self) -> None:
        """Wakes the thread, if there is something for it to do: it costs whoever trains a moment. With the lock."""
        if self._may_write():
            self._changed.notify_all()

    def _write_here(self) -> None:
        """Writes what waits, where callers do it themselves: who sends, and who tells what is obsolete."""
        if self._when is not When.BEFORE_SENDING:
            return
        with self._writing:
            while (work := self._next()) is not None:
                self._process(work)

    def _next(self) -> _Tensor | _End | _Act | None:
        with self._changed:
            return self._work.popleft() if self._work else None

    def _set_idle(self, idle: bool) -> None:
        with self._changed:
            self._idle = idle
            self._wake()

    def _may_write(self) -> bool:
        hurried = self._urgent > 0 or self._closed or self._queued * 2 > self._most_bytes
        return bool(self._work) and (self._when is When.AT_ONCE or self._idle or hurried)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._may_write() or (self._closed and not self._work))
                work = self._work.popleft() if self._work else None
            if work is None:
                self._writer.close()
                return
            self._process(work)

    def _process(self, work: _Tensor | _End | _Act) -> None:
        try:
            self._write_owed()
            self._write(work)
        except StorageError as error:
            self._fail(work, str(error))
        except Exception as error:  # noqa: BLE001 - a thread's main: nobody else would notice
            self._fail(work, f"{type(error).__name__}: {error}")
        with self._changed:
            if isinstance(work, _Tensor):
                self._queued -= work.tensor.nbytes
            elif isinstance(work, _Act):
                self._urgent -= work.urgent
                work.done.set()

    def _write_owed(self) -> None:
        """Says of steps that they are left out, where that could not be written so far."""
        with self._changed:
            owed = dict(self._owed)
        for step, why in owed.items():
            self._writer.drop(step, why)
            with self._changed:
                del self._owed[step]

    def _write(self, work: _Tensor | _End | _Act) -> None:
        finished = self._writer.num_finished
        if isinstance(work, _Act):
            work.act()
            work.worked.set()
        elif isinstance(work, _Tensor):
            self._write_tensor(work)
        elif work.why:
            self._writer.drop(work.attempt.step, work.why)
        elif not work.attempt.left_out:
            self._write_complete(work.attempt.step)
        if self._send_all and self._sender is not None and self._writer.num_finished > finished:
            self._sender.send()

    def _write_tensor(self, work: _Tensor) -> None:
        began = time.monotonic()
        stored, data = _stored(work.key, work.tensor, self._writer.precision)
        self._writer.append(work.key, spec_of(work.tensor), data, stored)
        with self._changed:
            self._written += data.nbytes
            self._writing_s += time.monotonic() - began

    def _write_complete(self, step: int) -> None:
        self._writer.complete(step)
        with self._changed:
            self._logged += 1
        self._turn(LogCondition.LOGGING, "")

    def _fail(self, work: _Tensor | _End | _Act, why: str) -> None:
        if not isinstance(work, _Act):
            with self._changed:
                self._leave_out(work.attempt)
                self._owed[work.attempt.step] = why
        self._turn(LogCondition.FAILED, why)

    def _leave_out(self, attempt: _Attempt) -> None:
        """Forgets what waits of an attempt; the log is to be told. With the lock."""
        self._left_out += not attempt.left_out
        attempt.left_out = True
        gone = [work for work in self._work if not isinstance(work, _Act) and work.attempt is attempt]
        self._queued -= sum(work.tensor.nbytes for work in gone if isinstance(work, _Tensor))
        self._work = deque(work for work in self._work if isinstance(work, _Act) or work.attempt is not attempt)

    def _turn(self, condition: LogCondition, why: str) -> None:
        with self._changed:
            changed = condition is not self._condition
            self._condition, self._why = condition, why
        if changed:
            self._told()

    def _told(self) -> None:
        self._tell(self.report())

    def _finish(self) -> None:
        self._writer.finish()
        if self._sender is not None:
            self._sender.send()

    def _collect(self, before: int) -> None:
        self._writer.finish()
        collect(self._writer.store, self._writer.log.worker, before)
        if self._sender is not None:
            self._sender.collect(before)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A part of a larger one would keep all of that in memory."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _stored(key: Key, tensor: torch.Tensor, precision: Precision) -> tuple[str, memoryview]:
    """A tensor's type as it is kept, and its elements: only what crosses boundaries is made less precise."""
    if precision != "exact" and key.microbatch is not None and tensor.is_floating_point() and tensor.itemsize > 2:
        tensor = tensor.to(getattr(torch, precision))
    return spec_of(tensor).dtype, bytes_of(tensor).data


def tensor_of(logged: LoggedTensor) -> torch.Tensor:
    """Returns a logged tensor, of the type in which it was sent.

    Raises:
        CorruptBlob: its bytes are no such tensor.
    """
    name = str(logged.key)
    try:
        stored = TensorSpec(shape=logged.spec.shape, dtype=logged.stored)
        if (size := num_bytes(stored)) != len(logged.data):
            raise CorruptBlob(name, f"{size} bytes of {stored}", f"{len(logged.data)}")
        found = (
            torch.frombuffer(bytearray(logged.data), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        )
        return found.view(torch_dtype(stored)).view(logged.spec.shape).to(torch_dtype(logged.spec))
    except ConfigError as error:
        raise CorruptBlob(name, "a tensor", str(error)) from error
