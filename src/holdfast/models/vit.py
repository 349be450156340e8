"""A small vision transformer for 8×8 digits, as a list of layers: patches, pre-norm blocks, classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.models.convnet import loss
from holdfast.models.transformer import Block, check_sizes, initialise

__all__ = ["Head", "Patches", "build", "loss"]

SIDE = 8


class Patches(nn.Module):
    """Patches as tokens behind a class token: ``[batch, 1, 8, 8]`` to ``[batch, 1 + patches, width]``."""

    def __init__(self, patch: int, width: int, dropout: float) -> None:
        super().__init__()
        self.patch = patch
        self.projection = nn.Linear(patch * patch, width)
        self.first = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(torch.zeros(1 + (SIDE // patch) ** 2, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Cut images into squares and embed them."""
        batch, across, side = images.shape[0], SIDE // self.patch, self.patch
        squares = images.reshape(batch, across, side, across, side).transpose(2, 3).reshape(batch, across**2, side**2)
        tokens = torch.cat([self.first.expand(batch, 1, -1), self.projection(squares)], dim=1)
        out: Tensor = self.dropout(tokens + self.position)
        return out


class Head(nn.Module):
    """Norm and classifier over the class token: ``[batch, time, width]`` to logits ``[batch, classes]``."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        out: Tensor = self.classifier(self.norm(x[:, 0]))
        return out


def build(
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
    patch: int = 2,
    classes: int = 10,
    dropout: float = 0.1,
    *,
    seed: int = 0,
) -> list[nn.Module]:
    """Return the model's layers: ``layers`` blocks between the patches and the classifier.

    Initial weights depend on ``seed`` alone; the global random state is left as it was.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words".

    Args:
        layers: number of blocks; the list has two elements more.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads.
        patch: side of a patch in pixels: 1, 2, 4 or 8.
        classes: number of classes.
        dropout: rate of every dropout.
        seed: of the initial weights.

    Raises:
        ConfigError: a size is not positive, the heads do not divide the width, or patches the image.
    """
    check_sizes(width, heads, dropout, layers=layers, patch=patch, classes=classes)
    if SIDE % patch:
        raise ConfigError(f"model: patch={patch} is impossible: expected 1, 2, 4 or 8, as images are 8 x 8")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        stack: list[nn.Module] = [Patches(patch, width, dropout)]
        stack += [Block(width, heads, dropout, causal=False) for _ in range(layers)]
        stack.append(Head(width, classes))
        initialise(stack)
    return stack
