"""What an entry of a chain says: who put it, and what is decided as of then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from holdfast.control.membership.storing import StoredDecision, decoded_in_full
from holdfast.errors import CorruptBlob, HoldfastError
from holdfast.parsing import parsing

__all__ = ["Entry", "reading"]


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
        return decoded_in_full(data, cls)


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
