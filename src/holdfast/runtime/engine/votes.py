"""Votes as bytes, for the coordinator to pass on unread: a float64 tensor of three columns."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_vote", "unpack_vote"]

_COLUMNS = 3


def pack_vote(vote: Tensor) -> bytes:
    """Return a vote as little-endian bytes."""
    return vote.numpy().astype("<f8").tobytes()


def unpack_vote(data: bytes) -> Tensor:
    """Return what `pack_vote` wrote."""
    return torch.frombuffer(bytearray(data), dtype=torch.float64).reshape(-1, _COLUMNS)
