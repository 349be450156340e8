"""Places of a stream from which it can be read on, by whoever is told of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.data.randomness import Draws
from holdfast.data.told import plain, whole
from holdfast.errors import ConfigError

__all__ = ["StreamMark"]

_LARGEST = 4 << 20
"""Characters of a mark that is handed to others: it lies in the head of a checkpoint's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMark:
    """A place, and what brings a stream there.

    Attributes:
        place: of the sample that comes next, counted over all epochs.
        epoch: which one it is of.
        epoch_from: the place of the epoch's first sample.
        state: what the stream's ``state_dict`` was; None: it has none, and the mark is at the start of an epoch.
        draws: where the generators were; None: the epoch begins here, under its own seed.
        following: a digest of the samples that come next; None: they are not known yet, or cannot be compared.
    """

    place: int
    epoch: int
    epoch_from: int
    state: Any = None
    draws: Draws | None = None
    following: str | None = None

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> StreamMark:
        """Returns what `told` was told of."""
        return cls(
            place=int(told["place"]),
            epoch=int(told["epoch"]),
            epoch_from=int(told["epoch_from"]),
            state=whole(told["state"]),
            draws=None if told["draws"] is None else Draws.read(told["draws"]),
            following=told["following"],
        )

    def told(self, what: str) -> dict[str, Any]:
        """Returns it in the form of JSON.

        Args:
            what: the stream, for messages.

        Raises:
            ConfigError: the stream's state is of other things than numbers, texts and tensors, or too large.
        """
        told = {
            "place": self.place,
            "epoch": self.epoch,
            "epoch_from": self.epoch_from,
            "state": plain(self.state, what),
            "draws": None if self.draws is None else self.draws.told(),
            "following": self.following,
        }
        if (length := len(json.dumps(told))) > _LARGEST:
            raise ConfigError(f"{what}: its state is {length >> 20} MiB as text; expected {_LARGEST >> 20} at most")
        return told
