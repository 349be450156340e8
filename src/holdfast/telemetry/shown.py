"""Events that came from somewhere else, made fit to be shown."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec

from holdfast.plain import one_line

__all__ = ["shown"]

_UNFIT = (b"\\", b"\x7f")
_S = TypeVar("_S", bound=msgspec.Struct)


def shown(event: _S) -> _S:
    """Returns a struct, such as an event that was read, in which every text is plain and one line."""
    with contextlib.suppress(UnicodeEncodeError):  # half a character, as a path may have
        written = msgspec.json.encode(event)  # of most, one look tells: what is not printed as it stands is escaped
        if written.isascii() and not any(sign in written for sign in _UNFIT):
            return event
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    changed = {name: fit for name, value in fields.items() if (fit := _fit(value)) != value}
    return msgspec.structs.replace(event, **changed) if changed else event


def _fit(value: object) -> object:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else one_line(value)
    if isinstance(value, msgspec.Struct):
        return shown(value)
    return tuple(map(_fit, value)) if isinstance(value, tuple) else value
