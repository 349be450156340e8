"""A small model, and data, whose code raises: once in some process, at an item, or until a file is back."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, ITEMS = 8, 4096
POISON = 1000.0


class Fragile(nn.Module):
    """A linear layer; ``poisonous``: raises on the poison. ``once``: raises in the one process that makes this file."""

    def __init__(self, *, poisonous: bool, once: str | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.poisonous = poisonous
        self.once = once
        self.calls = 0

    def forward(self, source: Tensor) -> Tensor:
        self.calls += 1
        if self.poisonous and bool((source.abs() >= POISON).any()):
            raise ValueError("no such token")
        if self.once is not None and _in_worker() and self.calls == CALLS and _made(self.once):
            raise ValueError("a bit flipped")
        return torch.tanh(self.linear(source.clamp(-1, 1)))


CALLS = 5
"""In the second step of a worker that runs three micro-batches in each."""


def _in_worker() -> bool:
    """Not where the model is tried out before."""
    return multiprocessing.current_process().name.startswith("holdfast-")


def _made(path: str) -> bool:
    """Whether it is we who made the file."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def build(poisonous_layer: int = -1, once: str | None = None) -> list[nn.Module]:
    return [Fragile(poisonous=i == poisonous_layer, once=once if i == 1 else None) for i in range(4)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


class Items:
    """Each item is a pure function of its number; ``poison`` is one that the first layer cannot take.

    ``away``: an item that cannot be read at first. Its file comes back after ``tries`` readings, by anybody.
    """

    def __init__(self, poison: int, away: int, tries: int, log: str | None) -> None:
        self.poison, self.away, self.tries, self.log = poison, away, tries, log

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.away and self.log is not None and self._count() <= self.tries:
            raise FileNotFoundError(2, "No such file or directory", f"item-{index}")
        made = torch.Generator().manual_seed(index)
        source, target = torch.rand(WIDTH, generator=made), torch.rand(WIDTH, generator=made)
        return (source + POISON if index == self.poison else source), target

    def _count(self) -> int:
        """Notes a reading, and returns how many there were."""
        assert self.log is not None
        with Path(self.log).open("a") as file:
            file.write("x")
        return Path(self.log).stat().st_size


def items(poison: int = -1, away: int = -1, tries: int = 0, log: str | None = None) -> Items:
    return Items(poison, away, tries, log)
