"""Residual networks with batch-norm, as lists of layers: a small one for 8×8 images, and ResNet-50 for 64×64 ones.

Source: He et al., Deep Residual Learning for Image Recognition; as usual, the 3×3 convolution of a bottleneck has the
stride.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import ConfigError
from holdfast.models.convnet import loss

__all__ = ["BasicBlock", "Bottleneck", "build", "build_50", "loss"]

_STAGES_50 = (3, 4, 6, 3)


class _Residual(nn.Module):
    """Some convolutions added to the input, which is projected where shapes differ; ReLU behind the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int, body: nn.Sequential) -> None:
        super().__init__()
        self.body = body
        alike = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if alike else nn.Sequential(*_convolved(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        return functional.relu(self.body(x) + self.shortcut(x))


class BasicBlock(_Residual):
    """Two 3×3 convolutions: ``[batch, inputs, h, w]`` to ``[batch, outputs, h / stride, w / stride]``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        first, second = _convolved(inputs, outputs, 3, stride), _convolved(outputs, outputs, 3)
        super().__init__(inputs, outputs, stride, nn.Sequential(*first, nn.ReLU(), *second))


class Bottleneck(_Residual):
    """A 1×1, a 3×3 and a 1×1 convolution, the first two with a quarter of the outputs; shapes as `BasicBlock`."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        inner = outputs // 4
        first, second = _convolved(inputs, inner, 1), _convolved(inner, inner, 3, stride)
        body = nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), *_convolved(inner, outputs, 1))
        super().__init__(inputs, outputs, stride, body)


def _convolved(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def build(width: int = 8, channels: int = 1, classes: int = 10, *, seed: int = 0) -> list[nn.Module]:
    """Return the small one: stem, three blocks of which two halve the image, pooling, classifier (6 layers).

    The initial weights depend on ``seed`` and sizes alone; the global random state is left as it was.

    Args:
        width: channels of the stem; four times as many at the end.
        channels: of the images.
        classes: number of classes.
        seed: of the initial weights.

    Raises:
        ConfigError: a size is impossible.
    """
    if width < 1 or channels < 1 or classes < 2:
        raise ConfigError(
            f"model: width={width}, channels={channels}, classes={classes} is impossible: expected width and channels "
            ">= 1, classes >= 2"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return [
            nn.Sequential(*_convolved(channels, width, 3), nn.ReLU()),
            BasicBlock(width, width, 1),
            BasicBlock(width, 2 * width, 2),
            BasicBlock(2 * width, 4 * width, 2),
            *_head(4 * width, classes),
        ]


def build_50(channels: int = 3, classes: int = 200, *, seed: int = 0) -> list[nn.Module]:
    """Return ResNet-50: stem, 16 bottlenecks, pooling, classifier (19 layers). Arguments and seed as of `build`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        outputs = [256 << stage for stage, count in enumerate(_STAGES_50) for _ in range(count)]
        blocks = [
            Bottleneck(before, after, 1 if after in (before, 256) else 2) for before, after in pairwise([64, *outputs])
        ]
        stem = nn.Sequential(*_convolved(channels, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
        return [stem, *blocks, *_head(outputs[-1], classes)]


def _head(features: int, classes: int) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(features, classes)
