"""What the leader of a sharded stage has its companions do; each does the same itself."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from holdfast.errors import InternalError

__all__ = [
    "Adopt",
    "Backward",
    "Command",
    "Discard",
    "Export",
    "Forward",
    "GatherSums",
    "Install",
    "MakeStage",
    "Skip",
    "Swap",
    "TakeBack",
    "Update",
    "decode",
    "encode",
]


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Base of all commands. ``stage``: the number of the stage that it is for."""

    stage: int


class MakeStage(_Command, frozen=True, kw_only=True):
    """Make a stage of the layers ``owned``."""

    owned: tuple[int, ...]


class Adopt(_Command, frozen=True, kw_only=True):
    """Take a layer over from another stage."""

    layer: int
    other: int


class Forward(_Command, frozen=True, kw_only=True):
    """Run F of a micro-batch over layers ``start`` to ``stop``."""

    step: int
    microbatch: int
    start: int
    stop: int


class Backward(_Command, frozen=True, kw_only=True):
    """Run B, I or W of a micro-batch over layers ``start`` to ``stop``, or all that are left."""

    kind: str
    step: int
    microbatch: int
    layers: tuple[int, int] | None


class GatherSums(_Command, frozen=True, kw_only=True):
    """Give the leader what a reduction's gradients have come to."""

    reduction: tuple[int, ...]


class Discard(_Command, frozen=True, kw_only=True):
    """Drop what was computed of an unfinished step."""


class Update(_Command, frozen=True, kw_only=True):
    """Make a layer's next state. ``present``: which of its trainable parameters have a gradient."""

    layer: int
    lr_scale: float
    present: tuple[bool, ...]


class Skip(_Command, frozen=True, kw_only=True):
    """Prepare an unchanged next state of a layer."""

    layer: int


class Swap(_Command, frozen=True, kw_only=True):
    """Make a layer's next state live."""

    layer: int


class TakeBack(_Command, frozen=True, kw_only=True):
    """Return a layer to a step."""

    layer: int
    to_step: int


class Export(_Command, frozen=True, kw_only=True):
    """Give the leader a layer's state."""

    layer: int


class Install(_Command, frozen=True, kw_only=True):
    """Replace a layer's state by one of which the bytes follow."""

    layer: int


Command: TypeAlias = (
    MakeStage | Adopt | Forward | Backward | GatherSums | Discard | Update | Skip | Swap | TakeBack | Export | Install
)
_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    """Returns a command as bytes."""
    return msgspec.msgpack.encode(command)


def decode(data: bytes) -> Command:
    """Returns what ``encode`` wrote.

    Raises:
        InternalError: it is no command.
    """
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise InternalError(f"a leader told its companions what is no command: {error}") from None
