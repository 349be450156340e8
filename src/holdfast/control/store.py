"""Decisions on disk: what the coordinator decided is durable before anybody hears of it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.control.membership.storing import StoredDecision
from holdfast.core.plan import Plan
from holdfast.errors import CorruptBlob, HoldfastError, StoreAway
from holdfast.parsing import parsing

__all__ = ["DecisionStore", "StoredDecision", "reading"]

_IS = "a database of decisions"


@contextlib.contextmanager
def reading(corrupt: Callable[[str], CorruptBlob], *also: type[Exception]) -> Iterator[None]:
    """Within it, whatever goes wrong goes wrong because what is read is no decision; ``also``: see ``parsing``.

    Raises:
        CorruptBlob: what ``corrupt`` made of it.
    """
    try:
        with parsing(corrupt, *also):
            yield
    except CorruptBlob:
        raise
    except HoldfastError as error:  # a value that no plan can have
        raise corrupt(str(error)) from None


class DecisionStore:
    """Appends decisions durably: what :meth:`put` returned from survives a kill and a power cut.

    Args:
        path: the database file; created if it is not there.

    Raises:
        StoreAway: it cannot be opened or written now, for lack of space for example.
        CorruptBlob: it is no database of decisions.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        with self._explained():
            self._db = sqlite3.connect(path, isolation_level=None)
            tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables and "decisions" not in tables:
                raise CorruptBlob(str(path), _IS, f"one of {', '.join(sorted(tables))}")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS decisions (revision INTEGER PRIMARY KEY, body BLOB NOT NULL)")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what SQLite and the decoder raise into errors of ours: it is damaged, or cannot be used now."""

        def corrupt(text: str) -> CorruptBlob:
            return CorruptBlob(str(self._path), _IS, text)

        try:
            with reading(corrupt):
                yield
        except sqlite3.IntegrityError:  # a second decision of one number: a bug of ours
            raise
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and _code(error) != sqlite3.SQLITE_ERROR:
                raise StoreAway(f"{self._path}: {error}") from error
            raise corrupt(str(error)) from error

    def put(self, decision: StoredDecision) -> None:
        """Stores a decision; each revision is decided once, a second one under its number is refused by SQLite.

        Raises:
            StoreAway: it cannot be written now. Safe to repeat.
            CorruptBlob: the database is damaged.
        """
        body = decision.encoded
        with self._explained():
            self._db.execute("INSERT INTO decisions VALUES (?, ?)", (decision.revision, body))

    def latest(self) -> StoredDecision | None:
        """Returns the newest decision; None if there is none. Raises CorruptBlob if it cannot be read."""
        with self._explained():
            row = self._db.execute("SELECT body FROM decisions ORDER BY revision DESC LIMIT 1").fetchone()
            return None if row is None else StoredDecision.decoded(row[0])

    def plans(self) -> dict[int, Plan]:
        """Returns the plan of every generation that had one. Raises CorruptBlob if a decision cannot be read."""
        found: dict[int, Plan] = {}
        with self._explained():
            for (body,) in self._db.execute("SELECT body FROM decisions ORDER BY revision"):
                found |= StoredDecision.decoded(body).plans
        return found

    def close(self) -> None:
        """Closes the database."""
        self._db.close()


def _code(error: sqlite3.Error) -> int:
    """The kind of an error of SQLite's, without what only tells where it arose."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
