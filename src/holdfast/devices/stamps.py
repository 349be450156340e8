"""When operations begin and end, though they may only be queued yet. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["AtOnce", "Stamps"]


class Stamps(Protocol):
    """Of what is computed on; a :class:`holdfast.devices.device.Device` is such."""

    def stamp(self, now: float) -> Any:
        """Returns what tells later when all that is queued so far was done; ``now``: the host's clock, in seconds."""

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Returns when that was of each, by the host's clock; waits for the last."""


class AtOnce:
    """Of operations that are done when they return."""

    def stamp(self, now: float) -> Any:
        """See Stamps.stamp."""
        return now

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """See Stamps.seconds."""
        return list(stamps)
