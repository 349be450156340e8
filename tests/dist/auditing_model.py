"""A small model on which hardware plays a trick, in one worker's process: it flips a bit of one number.

Or one layer draws from numpy's generator, which nobody seeds; in workers alone, so that the try-out finds nothing.
"""

from __future__ import annotations

import multiprocessing

import numpy
import torch
from torch import Tensor, nn

CLASSES, WIDTH, PIXELS = 10, 16, 64
_BLACK = 0
"""A pixel that is black in all digits."""


def flip(tensor: Tensor, bit: int = 0, place: int = 1) -> None:
    """Autograd does not notice, as it would not if hardware did it."""
    tensor.view(-1).view(torch.int32)[place] ^= 1 << bit


class _Scaled(torch.autograd.Function):
    """Scales its input; the gradient of the scale has a bit flipped if that is wanted."""

    @staticmethod
    def forward(context, source: Tensor, scale: Tensor, flips: bool) -> Tensor:
        context.save_for_backward(source, scale)
        context.flips = flips
        return source * scale

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        source, scale = context.saved_tensors
        found = (gradient * source).sum(dim=0)
        if context.flips:
            flip(found)
        return gradient * scale, found, None


class Tricked(nn.Module):
    """A linear layer and a scale.

    ``worker``: whose process is struck. ``seeds``: of the generator, as they are for the passes that are struck.
    ``what``: activation, gradient, weight (once, for good), unused (that of a pixel which is always black), or numpy.
    """

    def __init__(self, inputs: int, outputs: int, what: str, worker: str, seeds: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(outputs))
        self.what, self.worker, self.seeds, self.struck = what, worker, frozenset(map(int, seeds)), False

    def forward(self, source: Tensor) -> Tensor:
        strikes = self._strikes()
        if self.what in ("weight", "unused") and strikes and not self.struck:
            self.struck = True
            flip(*((self.linear.bias.data, 16) if self.what == "weight" else (self.linear.weight.data, 16, _BLACK)))
        output = torch.tanh(self.linear(source.flatten(1)))
        if self.what == "numpy" and strikes:
            output = output * float(numpy.random.default_rng().random())
        found = _Scaled.apply(output, self.scale, self.what == "gradient" and strikes)
        if self.what == "activation" and strikes:
            flip(found.data)
        return found

    def _strikes(self) -> bool:
        name = multiprocessing.current_process().name
        here = name.startswith("holdfast-") and name.endswith(self.worker)
        return here and torch.initial_seed() in self.seeds


def build(layer: int = -1, what: str = "", worker: str = "", seeds: list[str] | None = None) -> list[nn.Module]:
    sizes = [(PIXELS, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES)]
    return [Tricked(*size, what if index == layer else "", worker, seeds or []) for index, size in enumerate(sizes)]
