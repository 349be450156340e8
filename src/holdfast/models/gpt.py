"""A small GPT as a list of layers: embedding, pre-norm blocks, and a head whose weight is the token embedding's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.models.transformer import DEVIATION, Block, check_sizes, initialise

__all__ = ["Embedding", "Head", "build", "loss"]


class Embedding(nn.Module):
    """Token plus position embedding, with dropout: int64 ``[batch, time]`` to float ``[batch, time, width]``."""

    def __init__(self, vocab: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens; ``time`` is at most the context."""
        out: Tensor = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        return out


class Head(nn.Module):
    """Final norm and projection to the vocabulary: ``[batch, time, width]`` to logits ``[batch, time, vocab]``."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(weight.shape[1])
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return functional.linear(self.norm(x), self.weight)


def build(
    layers: int = 8,
    width: int = 128,
    heads: int = 4,
    context: int = 128,
    vocab: int = 256,
    dropout: float = 0.1,
    *,
    seed: int = 0,
) -> list[nn.Module]:
    """Return the model's layers: ``layers`` blocks between an embedding and a head that shares its weight.

    Initial weights are normal with deviation 0.02, those of projections back into the residual stream smaller by
    ``sqrt(2 * layers)``, as in GPT-2. They depend on ``seed`` alone; the global random state is left as it was.

    Args:
        layers: number of blocks; the list has two elements more.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads.
        context: longest sequence.
        vocab: number of tokens.
        dropout: rate of every dropout.
        seed: of the initial weights.

    Raises:
        ConfigError: a size is not positive, or the heads do not divide the width.
    """
    check_sizes(width, heads, dropout, layers=layers, context=context, vocab=vocab)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        embedding = Embedding(vocab, context, width, dropout)
        blocks = [Block(width, heads, dropout, causal=True) for _ in range(layers)]
        stack = [embedding, *blocks, Head(embedding.token.get_parameter("weight"))]
        initialise(stack[:-1], back=DEVIATION / (2 * layers) ** 0.5)
    return stack


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of logits ``[batch, time, vocab]`` against int64 ``[batch, time]``."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
