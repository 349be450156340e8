"""What an entry of a chain says: who put it, and what is decided as of then."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator

import msgspec

from holdfast.control.membership.storing import StoredDecision
from holdfast.errors import CorruptBlob, HoldfastError
from holdfast.parsing import parsing

__all__ = ["Entry", "packed", "read_entry", "reading", "unpacked"]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry; the newest has all that a coordinator which takes over must know.

    Attributes:
        by: 16 hexadecimal digits that whoever put it has drawn, so that no two put the same bytes.
        decision: the decision in force; None: nothing was decided so far.
    """

    by: str
    decision: StoredDecision | None = None

    @property
    def encoded(self) -> bytes:
        """Returns the entry as JSON; the same entry is always the same bytes."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def decoded(cls, data: bytes) -> Entry:
        """Returns the entry that was encoded.

        Raises:
            msgspec.MsgspecError: it is none; or it says more than that, of which we know nothing.
        """
        found = msgspec.json.decode(data, type=cls)
        if msgspec.json.decode(found.encoded) != msgspec.json.decode(data):  # numbers alone may be written otherwise
            raise msgspec.ValidationError("it is no decision of this version")
        return found


@contextlib.contextmanager
def reading(corrupt: Callable[[str], CorruptBlob]) -> Iterator[None]:
    """Within it, whatever goes wrong goes wrong because what is read is no decision.

    Raises:
        CorruptBlob: what ``corrupt`` made of it.
    """
    try:
        with parsing(corrupt):
            yield
    except CorruptBlob:
        raise
    except HoldfastError as error:  # a value that no plan can have
        raise corrupt(str(error)) from None


def read_entry(body: bytes, where: str) -> Entry:
    """Returns the entry of a body.

    Raises:
        CorruptBlob: it is none; ``where`` says which it would be.
    """
    with reading(lambda text: CorruptBlob(where, "a decision", text)):
        return Entry.decoded(body)


def packed(body: bytes) -> bytes:
    """Returns an entry's body as it is kept where room is dear; the same body is always the same bytes."""
    return zlib.compress(body)


def unpacked(data: bytes, where: str) -> bytes:
    """Returns the body that was packed.

    Raises:
        CorruptBlob: none was; ``where`` says which it would be.
    """
    try:
        return zlib.decompress(data)
    except zlib.error as error:
        raise CorruptBlob(where, "a decision", str(error)) from None
