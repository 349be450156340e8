"""The generators that a script draws from: torch's, numpy's and that of ``random``."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.data.told import plain, whole

__all__ = ["LOADING", "Draws", "apart", "mixed", "seed_all", "seed_host"]

LOADING = -1
"""Behind a step and an item: what is drawn while its samples are loaded is not what its computation draws."""


def mixed(seed: int, *of: int) -> int:
    """Returns a number of 64 bits that follows from a seed and what it is for."""
    return int.from_bytes(blake2b(struct.pack(f"<{1 + len(of)}q", seed, *of), digest_size=8).digest(), "little")


def seed_all(seed: int, *of: int) -> None:
    """Seeds torch, numpy and random from a seed and what is about to run: a step, and an item of it."""
    value = mixed(seed, *of) if of else seed
    if _knows_accelerator():
        torch.manual_seed(value)
        _seed_others(value)
    else:  # it asks after every kind of device, which takes half a millisecond where the caches are cold
        seed_host(value)


@cache
def _knows_accelerator() -> bool:
    """Whether this torch was built for one, be it here or not."""
    try:
        return torch.accelerator.current_accelerator() is not None
    except RuntimeError:  # torch 2.6, of one that is not here
        return False


def seed_host(value: int) -> None:
    """Seeds the generators of the host alone."""
    torch.default_generator.manual_seed(value)
    _seed_others(value)


def _seed_others(value: int) -> None:
    random.seed(value)
    np.random.seed(value % 2**32)


@dataclass(frozen=True, slots=True)
class Draws:
    """Where the host's generators are."""

    torch: Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> Draws:
        """Returns where they are now."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())

    @classmethod
    def read(cls, told: Any) -> Draws:
        """Returns what `told` was told of."""
        state, (kind, keys, *rest), (version, numbers, following) = whole(told)
        python = version, tuple(numbers), following
        return cls(state, (kind, keys.numpy().view(np.uint32), *rest), python)

    def told(self) -> Any:
        """Returns it in the form of JSON."""
        kind, keys, *rest = self.numpy
        return plain([self.torch, [kind, torch.from_numpy(keys.view(np.int32)), *rest], self.python], "a generator")

    def restore(self) -> None:
        """Has them go on from here."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@contextmanager
def apart() -> Iterator[None]:
    """What is drawn within it is not missed behind it."""
    before = Draws.now()
    try:
        yield
    finally:
        before.restore()
