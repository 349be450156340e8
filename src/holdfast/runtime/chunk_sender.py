"""Sends finished chunks of a worker's log to the store that other nodes read from, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import HoldfastError
from holdfast.storage.blobs import BlobStore
from holdfast.storage.tensorlog.chunks import check_log, chunks_of, collect, upload
from holdfast.storage.tensorlog.writer import LogWriter

__all__ = ["ChunkSender"]


class ChunkSender:
    """Copies chunks that are finished, and deletes copies that are obsolete. What fails is told, and tried next time.

    Args:
        writer: whose chunks; only its name, and its folder as a store, are used.
        store: where they go.
        tell: called when :attr:`trouble` has changed, in the thread that sends.
    """

    def __init__(self, writer: LogWriter, store: BlobStore, tell: Callable[[], None]) -> None:
        self._source, self._log, self._store = writer.store, writer.log, store
        self._tell = tell
        # Under `_changed`, of any thread: what is asked for and answered; `trouble` is one reference, and read without.
        # `_sent` is the sending thread's alone.
        self._sent: set[str] | None = None
        self._asked = self._answered = 0
        self._sends = False
        self._before: int | None = None
        self._closed = False
        self._trouble = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log-chunks", daemon=True).start()

    @property
    def trouble(self) -> str:
        """Why the last try did not work, for people; empty if it did."""
        return self._trouble

    def send(self) -> None:
        """Has all finished chunks sent; returns at once."""
        with self._changed:
            self._sends = True
            self._asked += 1
            self._changed.notify_all()

    def sent(self, limit_s: float) -> bool:
        """Waits until all that was asked for is done, at most so many seconds; whether it is, and worked."""
        with self._changed:
            asked = self._asked
            done = self._changed.wait_for(lambda: self._answered >= asked, max(0.0, limit_s))
            return done and not self._trouble

    def collect(self, before: int) -> None:
        """Has copies deleted that have nothing but steps before this one, and sends nothing; returns at once."""
        with self._changed:
            self._before = before
            self._asked += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread once it has done what was asked for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._answered < self._asked)
                if self._answered == self._asked:
                    return
                asked, before, self._before = self._asked, self._before, None
                sends, self._sends = self._sends, False
            trouble = self._try(before, sends=sends)
            with self._changed:
                changed = trouble != self._trouble
                self._trouble, self._answered = trouble, asked
                self._changed.notify_all()
            if changed:
                self._tell()

    def _try(self, before: int | None, *, sends: bool) -> str:
        """Sends, if that was asked for, and deletes; returns what is wrong, or nothing."""
        try:
            if self._sent is None:
                check_log(self._store, self._log)
                self._sent = {chunk.name for chunk in chunks_of(self._store.list(), self._log.worker)}
            for name in upload(self._source, self._store, self._log, self._sent) if sends else ():
                self._sent.add(name)
            if before is not None:
                self._sent.difference_update(collect(self._store, self._log.worker, before))
        except HoldfastError as error:
            self._keep(before, sends=sends)
            return f"{self._store.url}: chunks of the log cannot be sent: {error}"
        except Exception as error:  # noqa: BLE001 - a thread's main: nobody else would notice
            return f"{self._store.url}: chunks of the log cannot be sent: {type(error).__name__}: {error}"
        return ""

    def _keep(self, before: int | None, *, sends: bool) -> None:
        """Sends and deletes next time what could not be now."""
        with self._changed:
            self._sends = self._sends or sends
            if before is not None and self._before is None:
                self._before = before
