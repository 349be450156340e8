"""Large tensors that come and go with every step, in memory that the next ones of about their size are given again."""

from __future__ import annotations

import math
import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Memory", "fresh", "host_memory"]

Memory: TypeAlias = Callable[[int], Tensor]
"""Gives so many bytes of the host's memory, of any content: uint8, 1-D."""

_Kept: TypeAlias = deque[tuple[float, mmap.mmap]]
"""Mappings of a size, and since when nobody uses them; the last one since the shortest time."""

_LARGE_BYTES = 128 << 10
_HUGE_BYTES = 2 << 20
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_SPARE_BYTES = 16 << 20
"""As much may be kept beside what was in use at once: all that a step of a small model needs."""
_KEPT_S = 2.0
"""Longer than a step whose time this matters to; what nobody asked for meanwhile goes back to the system."""


class _Mappings:
    """Mappings that nobody uses, by size. What is written for the first time costs the system a page each.

    Beside a few there are never more, with those that are in use, than were in use at once: where one of another size
    is needed, others go. Any thread may ask for one, and any may be the last to use one, at any moment: so there is no
    lock, and each step is one operation of a deque.
    """

    def __init__(self) -> None:
        self._free: dict[int, _Kept] = {}

    def take(self, size: int) -> memoryview:
        """Return the memory of a mapping of this size; once it is freed, another one may have it."""
        self._give_back(before=time.monotonic() - _KEPT_S)
        try:
            _, mapping = self._free[size].pop()  # the last one that was used, so that the others can go
        except (KeyError, IndexError):
            self._make_room(size)
            mapping = _mapped(size)
        view = memoryview(mapping)
        weakref.finalize(view, self._keep, size, mapping).atexit = False
        return view

    def _keep(self, size: int, mapping: mmap.mmap) -> None:
        self._free.setdefault(size, deque()).append((time.monotonic(), mapping))

    def _give_back(self, *, before: float) -> None:
        """Unmaps what nobody has asked for since then."""
        for kept in self._free.copy().values():
            while _since(kept) < before:
                _unmap(kept)

    def _make_room(self, size: int) -> None:
        """Unmaps as much as that, if there is as much beside a few, of what was asked for longest ago."""
        while size > 0:
            free = self._free.copy()
            at, other = min(((_since(kept), other) for other, kept in free.items()), default=(math.inf, 0))
            if at == math.inf or sum(other * len(kept) for other, kept in free.items()) <= _SPARE_BYTES:
                return
            _unmap(self._free[other])
            size -= other


def _since(kept: _Kept) -> float:
    """When the first of these was used last; infinite if there is none."""
    try:
        return kept[0][0]
    except IndexError:
        return math.inf


def _unmap(kept: _Kept) -> None:
    with suppress(IndexError):  # somebody else has taken it
        kept.popleft()


_mappings = _Mappings()


def fresh(length: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return a 1-D tensor of any content.

    What torch allocates stays with the process when it is freed, in pieces that fit nothing else. On a CPU, a large
    tensor gets a mapping of its own instead, which is kept for the next one of about that size, and gone with it if
    none comes; in huge pages, where the system grants them, it is several times as fast to fill for the first time.
    """
    size = length * dtype.itemsize
    if size < _LARGE_BYTES or (device is not None and device.type != "cpu"):
        return torch.empty(length, dtype=dtype, device=device)
    return torch.frombuffer(_mappings.take(_rounded(size)), dtype=dtype, count=length)


def host_memory(size: int) -> Tensor:
    """Return so many bytes; see Memory."""
    return fresh(size, torch.uint8)


def _mapped(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE_PAGES is not None and size >= _HUGE_BYTES:
        mapping.madvise(_HUGE_PAGES)
    return mapping


def _rounded(size: int) -> int:
    """A size that serves all up to a quarter smaller: pages that are never written take no memory."""
    quarter = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // quarter) * quarter
