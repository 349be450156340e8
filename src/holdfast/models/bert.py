"""A small BERT for masked language modelling, as a list of layers: embedding, post-norm blocks, and a tied head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.core.tensorspec import NO_TARGET
from holdfast.models.transformer import PostNormBlock, check_sizes, initialise

__all__ = ["Embedding", "Head", "build", "loss"]


class Embedding(nn.Module):
    """Token plus position embedding, norm and dropout: int64 ``[batch, time]`` to float ``[batch, time, width]``."""

    def __init__(self, vocab: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens; ``time`` is at most the context."""
        out: Tensor = self.dropout(self.norm(self.token(tokens) + self.position[: tokens.shape[1]]))
        return out


class Head(nn.Module):
    """Transform and projection to the vocabulary: ``[batch, time, width]`` to logits ``[batch, time, vocab]``."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        vocab, width = weight.shape
        self.transform = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return functional.linear(self.norm(functional.gelu(self.transform(x))), self.weight, self.bias)


def build(
    layers: int = 8,
    width: int = 128,
    heads: int = 4,
    context: int = 128,
    vocab: int = 257,
    dropout: float = 0.1,
    *,
    seed: int = 0,
) -> list[nn.Module]:
    """Return the model's layers: ``layers`` blocks between an embedding and a head that shares its weight.

    Initial weights depend on ``seed`` alone; the global random state is left as it was.

    Source: Devlin et al., "BERT". Here texts are single, so there are no segments and no next sentence to predict.

    Args:
        layers: number of blocks; the list has two elements more.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads.
        context: longest sequence.
        vocab: number of tokens: the bytes, and the mask.
        dropout: rate of every dropout.
        seed: of the initial weights.

    Raises:
        ConfigError: a size is not positive, or the heads do not divide the width.
    """
    check_sizes(width, heads, dropout, layers=layers, context=context, vocab=vocab)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        embedding = Embedding(vocab, context, width, dropout)
        blocks = [PostNormBlock(width, heads, dropout, causal=False) for _ in range(layers)]
        head = Head(embedding.token.get_parameter("weight"))
        initialise([embedding, *blocks, head.transform])
    return [embedding, *blocks, head]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of logits ``[batch, time, vocab]`` where there is a target.

    Args:
        output: the logits.
        target: int64 ``[batch, time]``: the token that was there, or -100 where none is asked for.
    """
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=NO_TARGET)
