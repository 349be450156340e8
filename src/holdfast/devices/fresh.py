"""Large tensors that come and go with every step, in memory that goes back to the system with them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Memory", "fresh", "host_memory"]

Memory: TypeAlias = Callable[[int], Tensor]
"""Gives so many bytes of the host's memory, of any content: uint8, 1-D."""

_HUGE_BYTES = 2 << 20
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def fresh(length: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return a 1-D tensor of any content.

    What torch allocates stays with the process when it is freed, in pieces that fit nothing else. On a CPU, a large
    tensor gets a mapping of its own instead, which is gone with it; in huge pages, where the system grants them, it
    is several times as fast to fill for the first time. A mapping begins with zeros, but do not count on it.
    """
    size = length * dtype.itemsize
    if size < _HUGE_BYTES or (device is not None and device.type != "cpu"):
        return torch.empty(length, dtype=dtype, device=device)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE_PAGES is not None:
        mapping.madvise(_HUGE_PAGES)
    return torch.frombuffer(mapping, dtype=dtype)


def host_memory(size: int) -> Tensor:
    """Return so many bytes; see Memory."""
    return fresh(size, torch.uint8)
