"""Where the time of a simulated job goes: every second is booked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.errors import InternalError

__all__ = ["Ledger", "Part"]


class Part(StrEnum):
    """What a stretch of time was good for."""

    USEFUL = "useful"
    """Of each step that is committed for the first time, at most one period of the plan that it began by."""
    REDO = "redo"
    """Steps that had been committed before, and what else a step took; layers that are replayed."""
    COPY = "copy"
    """Workers come, go or change layers between two steps, and training stands still for it."""
    RESTART = "restart"
    """A loss is noticed and answered: detection, agreement, connections, state that is loaded, processes that start."""
    CHECKPOINT = "checkpoint"
    """Training stands still for a checkpoint, or for the last state that is saved."""
    IDLE = "idle"
    """Nobody trains: too few machines are there, and no one is on its way."""


@dataclass(slots=True)
class Ledger:
    """Seconds, by what they were good for."""

    _booked: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(Part, 0.0))

    def book(self, part: Part, seconds: float) -> None:
        """Add a stretch of time.

        Raises:
            InternalError: it is negative, or no number.
        """
        if not 0 <= seconds < math.inf:
            raise InternalError(f"{seconds} seconds of {part} cannot have passed")
        self._booked[part] += seconds

    def closed(self, now: float) -> dict[Part, float]:
        """Return the parts, which add up to ``now``.

        Raises:
            InternalError: they do not.
        """
        found = dict(self._booked)
        if not math.isclose(math.fsum(found.values()), now, rel_tol=1e-9, abs_tol=1e-6):
            raise InternalError(f"{math.fsum(found.values())} seconds were booked of {now}: {found}")
        return found
