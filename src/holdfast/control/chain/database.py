"""A chain in a database file on this machine: durable before anybody hears of it, whatever is killed."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from holdfast.control.chain.entry import reading
from holdfast.control.chain.port import Numbered
from holdfast.errors import CorruptBlob, StoreAway

__all__ = ["DatabaseChain"]

_IS = "a database of decisions"


class DatabaseChain:
    """See :class:`holdfast.control.chain.port.Chain`; it keeps all entries, and has no signs of life.

    Args:
        path: the database file; created if it is not there.
        only_read: it is another process's; nothing is written to it, and it has to be there.

    Raises:
        StoreAway: it cannot be opened or written now, for lack of space for example.
        CorruptBlob: it is no database of decisions.
    """

    beat_s = None

    def __init__(self, path: str | Path, *, only_read: bool = False) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        with self._explained():
            address = f"{self._path.absolute().as_uri()}?mode=ro" if only_read else path
            self._db = sqlite3.connect(address, uri=only_read, isolation_level=None, check_same_thread=False)
            tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables and "decisions" not in tables:
                raise CorruptBlob(str(path), _IS, f"one of {', '.join(sorted(tables))}")
            if only_read:
                if not tables:
                    self._db.close()
                    raise StoreAway(f"{path}: nothing has been decided so far")
                return
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS decisions (number INTEGER PRIMARY KEY, body BLOB NOT NULL)")

    def __str__(self) -> str:
        return str(self._path)

    def put(self, number: int, body: bytes) -> bool:
        """See Chain.put."""
        with self._explained():
            try:
                self._db.execute("INSERT INTO decisions VALUES (?, ?)", (number, body))
            except sqlite3.IntegrityError:
                (found,) = self._db.execute("SELECT body FROM decisions WHERE number = ?", (number,)).fetchone()
                return bool(found == body)
        return True

    def newest(self) -> Numbered | None:
        """See Chain.newest."""
        with self._explained():
            row = self._db.execute("SELECT number, body FROM decisions ORDER BY number DESC LIMIT 1").fetchone()
            return None if row is None else Numbered(*row)

    def bodies(self) -> Iterator[bytes]:
        """Yields all entries that are kept, in order."""
        with self._explained():
            for (body,) in self._db.execute("SELECT body FROM decisions ORDER BY number"):
                yield body

    def say(self, sign: bytes) -> None:
        """Nobody could hear it: there is one coordinator, and its agent sees it end."""

    def said(self) -> bytes | None:
        """Nothing is."""
        return None

    def close(self) -> None:
        """See Chain.close."""
        self._db.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what SQLite and the decoder raise into errors of ours: it is damaged, or cannot be used now."""

        def corrupt(text: str) -> CorruptBlob:
            return CorruptBlob(str(self._path), _IS, text)

        with self._lock:
            try:
                with reading(corrupt):
                    yield
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and _code(error) != sqlite3.SQLITE_ERROR:
                    raise StoreAway(f"{self._path}: {error}") from error
                raise corrupt(str(error)) from error


def _code(error: sqlite3.Error) -> int:
    """The kind of an error of SQLite's, without what only tells where it arose."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
