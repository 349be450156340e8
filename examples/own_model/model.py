"""One's own model, data, loss and optimizer: a residual network that tells two spirals apart.

Holdfast calls these functions by name (see job.yaml); nothing here knows of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset


class Block(nn.Module):
    """A residual block: ``[batch, width]`` to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and what the block adds to it."""
        out: Tensor = x + self.dropout(self.outer(functional.gelu(self.inner(self.norm(x)))))
        return out


def build(width: int, blocks: int) -> list[nn.Module]:
    """Return the layers in order. torch's generator is seeded with the job's seed when this is called."""
    first = nn.Sequential(nn.Linear(2, width), nn.GELU())
    return [first, *(Block(width) for _ in range(blocks)), nn.Linear(width, 2)]


def dataset(samples: int) -> Dataset[tuple[Tensor, ...]]:
    """Return points on two spirals, with a little noise, and the spiral that each lies on: equal in every process."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(samples) % 2
    turn = torch.rand(samples, generator=generator).sqrt() * 3 * math.pi
    angle = turn + label * math.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / (3 * math.pi)
    return TensorDataset(points + 0.01 * torch.randn(points.shape, generator=generator), label)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of one micro-batch."""
    return functional.cross_entropy(output, target)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of one layer. The schedule of the job file scales its learning rate.

    ``foreach`` and ``fused`` are other implementations with other last bits, so one is pinned.
    """
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, foreach=False, fused=False)
