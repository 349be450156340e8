"""A chain of blobs: in a folder that several machines share, or in a bucket."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from holdfast.control.chain.entry import packed, unpacked
from holdfast.control.chain.port import Numbered
from holdfast.errors import CorruptBlob, MissingBlob, StorageError, StoreAway
from holdfast.storage.blobs import BlobStore, ObjectStore

__all__ = ["BlobChain"]

_SIGN = "sign"
_NAMES = re.compile(r"decision-\d{12}")


class BlobChain:
    """See :class:`holdfast.control.chain.port.Chain`; it keeps all entries, each a blob of its own.

    None is ever deleted, so there are no gaps, and the newest is found by doubling and halving, without a list.

    Args:
        store: of this chain alone.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self.beat_s = 2.0 if isinstance(store, ObjectStore) else 0.4  # each request to a bucket is paid for

    def __str__(self) -> str:
        return self._store.url

    def put(self, number: int, body: bytes) -> bool:
        """See Chain.put."""
        name, data = _name(number), packed(body)
        with _away():
            return self._store.put_new(name, data) or self._store.get(name) == data

    def newest(self) -> Numbered | None:
        """See Chain.newest."""
        with _away():
            last, beyond = 0, 1
            while self._store.exists(_name(beyond)):
                last, beyond = beyond, 2 * beyond
            while beyond - last > 1:
                middle = (last + beyond) // 2
                last, beyond = (middle, beyond) if self._store.exists(_name(middle)) else (last, middle)
            data = self._store.get(_name(last)) if last else b""
        return Numbered(last, unpacked(data, f"{self}/{_name(last)}")) if last else None

    def bodies(self) -> Iterator[bytes]:
        """See Chain.bodies."""
        with _away():
            for name in sorted(filter(_NAMES.fullmatch, self._store.list())):  # others are half written, or signs
                yield unpacked(self._store.get(name), f"{self}/{name}")

    def say(self, sign: bytes) -> None:
        """See Chain.say."""
        with _away():
            self._store.put(_SIGN, sign)

    def said(self) -> bytes | None:
        """See Chain.said."""
        with _away():
            try:
                return self._store.get(_SIGN)
            except MissingBlob:
                return None

    def close(self) -> None:
        """Nothing is kept open."""


def _name(number: int) -> str:
    return f"decision-{number:012d}"


@contextlib.contextmanager
def _away() -> Iterator[None]:
    """Whatever a blob store fails at may be well again: a folder is mounted, a disk has room, a right is given.

    So may what is missing though it was seen: not all machines see what is new in a shared folder at the same time.
    """
    try:
        yield
    except CorruptBlob:
        raise
    except StorageError as error:
        raise StoreAway(str(error)) from None
