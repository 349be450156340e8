"""What a store of decisions must be able to do: put what is not there yet, and say what is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

__all__ = ["Chain", "Numbered"]


class Numbered(NamedTuple):
    """An entry as it is stored."""

    number: int
    body: bytes


class Chain(Protocol):
    """The port to whatever keeps entries; they are numbered from 1, without gaps. ``str()`` tells where it is.

    Every method may be called from several threads, and raises StoreAway if the store cannot be used now: whether what
    was asked was done is not known then, and asking again is safe. Other errors would come again.
    """

    @property
    def beat_s(self) -> float | None:
        """Seconds from one sign of life of who leads to the next; None: no other coordinator could see one."""

    def put(self, number: int, body: bytes) -> bool:
        """Puts an entry, unless there is one of its number; returns whether this one is there, durably.

        An entry that is there already with the same bytes is this one: the answer to an earlier put was lost. If it is
        not known any more, False: somebody has put the next one since, so whoever puts this one does not lead.

        Args:
            number: one more than that of an entry that was read or put; 1 for the first.
            body: as nobody else would put it.

        Raises:
            StoreAway: it is not known whether it is there.
            StorageError: the store refuses it.
        """

    def newest(self) -> Numbered | None:
        """Returns the newest entry, None if there is none. Raises CorruptBlob if what is there cannot be one."""

    def bodies(self) -> Iterator[bytes]:
        """Yields all entries that are kept, in order: the newest, and others as the store has room."""

    def say(self, sign: bytes) -> None:
        """Replaces the sign of life."""

    def said(self) -> bytes | None:
        """Returns the sign of life, None if there is none."""

    def close(self) -> None:
        """Lets go of what it holds."""
