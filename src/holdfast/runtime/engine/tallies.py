"""Tallies as bytes, for the coordinator to pass on unread: a float64 tensor of three columns."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_tally", "unpack_tally"]

_COLUMNS = 3


def pack_tally(tally: Tensor) -> bytes:
    """Return a tally as little-endian bytes."""
    return tally.numpy().astype("<f8").tobytes()


def unpack_tally(data: bytes) -> Tensor:
    """Return what `pack_tally` wrote."""
    return torch.frombuffer(bytearray(data), dtype=torch.float64).reshape(-1, _COLUMNS)
