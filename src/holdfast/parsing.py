"""The one place in which whatever a parser raises becomes one line of the error that its caller promises.

Parsers have many ways to fail: a date that is none, a number with 5,000 digits, a list in a list in a list, half a
character. None of them is a bug of ours when it comes of what was read, and none may show as a traceback.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator

import msgspec
import yaml

from holdfast.plain import one_line

__all__ = ["parsing"]

_LONGEST = 500
_OF_PARSERS: tuple[type[Exception], ...] = (
    ValueError,  # of numbers and texts; so are UnicodeError and JSONDecodeError
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
    EOFError,
    struct.error,
    yaml.YAMLError,
    msgspec.MsgspecError,
)
_IN_WORDS = {RecursionError: "is nested too deeply", MemoryError: "is too large"}


@contextlib.contextmanager
def parsing(complain: Callable[[str], Exception], *also: type[Exception]) -> Iterator[None]:
    """Within it, whatever goes wrong goes wrong because of what is parsed.

    Args:
        complain: makes the error to be raised of one line that says what is wrong.
        also: what else the parser raises.

    Raises:
        HoldfastError: what ``complain`` made; or, as it is, one that the parser raises on purpose.
    """
    caught = (*_OF_PARSERS, *also)
    try:
        yield
    except caught as error:
        raise complain(_in_one_line(error)) from None


def _in_one_line(error: Exception) -> str:
    words = next((text for kind, text in _IN_WORDS.items() if isinstance(error, kind)), None)
    if words is None and isinstance(error, KeyError):
        words = f"lacks {error}"
    return words or one_line(str(error), _LONGEST) or type(error).__name__
