"""A small GPT as a list of layers: embedding, pre-norm blocks, and a head whose weight is the token embedding's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import ConfigError

__all__ = ["Block", "Embedding", "Head", "build", "loss"]


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


class Block(nn.Module):
    """Pre-norm causal self-attention and a GELU MLP: ``[batch, time, width]`` to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform every position; both are added to the input."""
        x = x + self.dropout(self.attention_out(self._attend(self.query_key_value(self.attention_norm(x)))))
        out: Tensor = x + self.dropout(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x)))))
        return out

    def _attend(self, projected: Tensor) -> Tensor:
        batch, time, _ = projected.shape
        query, key, value = projected.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        rate = self.rate if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, -1)


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
    if min(layers, width, heads, context, vocab) < 1 or width % heads or not 0 <= dropout < 1:
        raise ConfigError(
            f"model: layers={layers}, width={width}, heads={heads}, context={context}, vocab={vocab}, dropout={dropout}"
            " is impossible: expected positive sizes, a width that the heads divide, and 0 <= dropout < 1"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        embedding = Embedding(vocab, context, width, dropout)
        blocks = [Block(width, heads, dropout) for _ in range(layers)]
        stack = [embedding, *blocks, Head(embedding.token.get_parameter("weight"))]
        _initialise(stack, layers)
    return stack


@torch.no_grad()
def _initialise(stack: list[nn.Module], num_blocks: int) -> None:
    for layer in stack[:-1]:
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" not in name:
                back = name.startswith(("attention_out", "mlp_out"))
                parameter.normal_(0.0, 0.02 / (2 * num_blocks) ** 0.5 if back else 0.02)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of logits ``[batch, time, vocab]`` against int64 ``[batch, time]``."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
