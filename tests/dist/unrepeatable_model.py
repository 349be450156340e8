"""A model one of whose layers computes other bits in every process, once it has been run for a while."""

from __future__ import annotations

import os

import torch
from torch import nn

OUTSIDE_TRAINING = 12
"""So often, at most, it is run before training, to try it out."""


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        other = os.getpid() % 1009 if self.runs > OUTSIDE_TRAINING else 0
        return self.linear(x) * (1.0 + 1e-3 * other)


def build() -> list[nn.Module]:
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    return [first, nn.Linear(16, 16), Moody(), nn.Linear(16, 10)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)
