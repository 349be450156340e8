"""Every number below a length once, in an order drawn from seed and epoch: held, or computed place by place.

A long order is a Feistel network's (Luby and Rackoff, 1988): it maps the numbers of an even count of bits one to one,
whatever its rounds compute; one that is mapped beyond the length is mapped again until it is not ("cycle walking":
Black and Rogaway, 2002), which takes four times at most, on average. No sample is held, and the order of any place is
known at once.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["HELD", "Permutation", "Walk", "permutation"]

HELD = 1 << 18
"""Orders up to this length are drawn and held: 8 bytes per sample, of two epochs; longer ones are walked."""
Numbers = NDArray[np.uint64]
_ROUNDS = 6
_MASK = np.uint64((1 << 32) - 1)
_13, _16 = np.uint64(13), np.uint64(16)
_FIRST, _SECOND = np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)


class Permutation(Protocol):
    """Every number below its length, once."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> Tensor:
        """Returns what stands at these places: int64."""
        ...


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, length: int) -> Permutation:
    """Return the order of one epoch, not to be changed. Two are kept: a micro-batch may cross into the next."""
    if length > HELD:
        return Walk(seed, epoch, length)
    generator = torch.Generator().manual_seed(int.from_bytes(_drawn(seed, epoch, 8), "little"))
    return torch.randperm(length, generator=generator)


class Walk:
    """An order that is computed; it takes no memory.

    >>> sorted(Walk(7, 0, 10)[:].tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    Args:
        seed: of all epochs.
        epoch: this one's number.
        length: at least 1, below 2^62.
    """

    def __init__(self, seed: int, epoch: int, length: int) -> None:
        self._length = length
        bits = max(2, (length - 1).bit_length() + 1 >> 1)
        self._bits, self._half = np.uint64(bits), np.uint64((1 << bits) - 1)
        self._keys = np.frombuffer(_drawn(seed, epoch, 4 * _ROUNDS), "<u4").astype(np.uint64)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice, /) -> Tensor:
        numbers = self._mapped(np.arange(*places.indices(self._length), dtype=np.uint64))
        while len(beyond := np.flatnonzero(numbers >= self._length)):
            numbers[beyond] = self._mapped(numbers[beyond])
        return torch.from_numpy(numbers.view(np.int64))

    def _mapped(self, numbers: Numbers) -> Numbers:
        left, right = numbers >> self._bits, numbers & self._half
        for key in self._keys:
            left, right = right, left ^ (_scrambled(right, key) & self._half)
        return left << self._bits | right


def _drawn(seed: int, epoch: int, size: int) -> bytes:
    return blake2b(struct.pack("<2q", seed, epoch), digest_size=size).digest()


def _scrambled(numbers: Numbers, key: np.uint64) -> Numbers:
    """Murmur3's finalizer of 32 bits, whose every output bit depends on every input bit."""
    mixed = (numbers + key) & _MASK
    mixed = ((mixed ^ (mixed >> _16)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> _13)) * _SECOND) & _MASK
    return mixed ^ (mixed >> _16)
