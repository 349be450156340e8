"""A small model for 8x8 images, one layer of which has gradients that are not finite for some micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, CLASSES = 16, 10


class _Poison(torch.autograd.Function):
    """Scales its input; the scale's gradient overflows for inputs that a hash of their bits chooses."""

    @staticmethod
    def forward(context: Any, source: Tensor, scale: Tensor, one_in: int) -> Tensor:
        context.save_for_backward(source, scale)
        context.strikes = int(source.detach().contiguous().view(torch.int32).sum()) % one_in == 0
        return source * scale

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        source, scale = context.saved_tensors
        found = (gradient * source).sum().reshape(1)
        return gradient * scale, found + torch.inf if context.strikes else found, None


class Poisoned(nn.Module):
    """A linear layer whose gradients are not finite for one in so many micro-batches; 0: for none."""

    def __init__(self, inputs: int, outputs: int, one_in: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(1))
        self.one_in = one_in

    def forward(self, source: Tensor) -> Tensor:
        found = torch.tanh(self.linear(source.flatten(1)))
        return _Poison.apply(found, self.scale, self.one_in) if self.one_in else found * self.scale


def build(layer: int, one_in: int) -> list[nn.Module]:
    sizes = [(64, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES)]
    return [Poisoned(*size, one_in if index == layer else 0) for index, size in enumerate(sizes)]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets)
