"""A small convolutional net with batch-norm for 8×8 digits, as a list of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import ConfigError

__all__ = ["ConvBlock", "ResidualBlock", "build", "loss"]


class ConvBlock(nn.Module):
    """3×3 convolution, batch-norm, ReLU: ``[batch, inputs, h, w]`` to ``[batch, outputs, h / stride, w / stride]``."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        return functional.relu(self.norm(self.convolution(x)))


class ResidualBlock(nn.Module):
    """A convolutional block added to its input; keeps the shape ``[batch, channels, h, w]``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = ConvBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        out: Tensor = x + self.block(x)
        return out


def build(
    width: int = 16, blocks: int = 3, classes: int = 10, dropout: float = 0.1, *, seed: int = 0
) -> list[nn.Module]:
    """Return the layers: stem, half of the blocks, stride-2 block, the other blocks, pooling, classifier (blocks + 4).

    The initial weights depend on ``seed`` alone; the global random state is left as it was.

    Args:
        width: channels of the stem; twice as many after the stride.
        blocks: residual blocks in all, at least 2.
        classes: number of classes.
        dropout: rate before the classifier.
        seed: of the initial weights.

    Raises:
        ConfigError: a size is impossible.
    """
    if width < 1 or blocks < 2 or classes < 2 or not 0 <= dropout < 1:
        raise ConfigError(
            f"model: width={width}, blocks={blocks}, classes={classes}, dropout={dropout} is impossible:"
            " expected width >= 1, blocks >= 2, classes >= 2 and 0 <= dropout < 1"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        early = blocks // 2
        return [
            ConvBlock(1, width),
            *(ResidualBlock(width) for _ in range(early)),
            ConvBlock(width, 2 * width, stride=2),
            *(ResidualBlock(2 * width) for _ in range(blocks - early)),
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
            nn.Sequential(nn.Dropout(dropout), nn.Linear(8 * width, classes)),
        ]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of logits ``[batch, classes]`` against int64 ``[batch]``."""
    return functional.cross_entropy(output, target)
