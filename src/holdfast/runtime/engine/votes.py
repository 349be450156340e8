"""Votes as bytes, for the coordinator to pass on unread: a table of three columns, whatever computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_vote", "unpack_vote"]

_COLUMNS = 3


def pack_vote(vote: NDArray[Any]) -> bytes:
    """Return a vote, in float64, as little-endian bytes."""
    return vote.astype("<f8").tobytes()


def unpack_vote(data: bytes) -> NDArray[np.float64]:
    """Return what `pack_vote` wrote, of three columns."""
    return np.frombuffer(data, "<f8").astype(np.float64).reshape(-1, _COLUMNS)
