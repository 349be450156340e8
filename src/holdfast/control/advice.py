"""Whoever may know of something better than what was decided at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.control.membership import AnswerPlanned, Improved, Membership

__all__ = ["Adviser"]


class Adviser(Protocol):
    """Is asked at every tick, in a thread; what it says may be late, and then changes nothing."""

    def news(self, state: Membership) -> Sequence[AnswerPlanned | Improved]:
        """Returns better answers to losses that could come next, and something better for who is here."""
