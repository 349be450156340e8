"""What the transformers here are made of: blocks of self-attention and an MLP, and initial weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import ConfigError

__all__ = ["DEVIATION", "Block", "PostNormBlock", "check_sizes", "initialise"]

DEVIATION = 0.02
"""Of initial weights, as in GPT-2 and BERT."""


class Block(nn.Module):
    """Pre-norm self-attention and a GELU MLP: ``[batch, time, width]`` to the same shape.

    Args:
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads.
        dropout: rate of every dropout.
        causal: whether a position attends to itself and those before it alone.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.rate, self.causal = heads, dropout, causal
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform every position; both are added to the input."""
        x = x + self.attend(self.attention_norm(x))
        out: Tensor = x + self.transform(self.mlp_norm(x))
        return out

    def attend(self, x: Tensor) -> Tensor:
        """Return what each position takes from those that it attends to."""
        batch, time, _ = x.shape
        projected = self.query_key_value(x).view(batch, time, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind()
        rate = self.rate if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=self.causal)
        out: Tensor = self.dropout(self.attention_out(mixed.transpose(1, 2).reshape(batch, time, -1)))
        return out

    def transform(self, x: Tensor) -> Tensor:
        """Return what each position makes of itself."""
        out: Tensor = self.dropout(self.mlp_out(functional.gelu(self.mlp_in(x))))
        return out


class PostNormBlock(Block):
    """The same with norms behind the sums, as in BERT."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform every position; both are added to the input and normalised."""
        x = self.attention_norm(x + self.attend(x))
        out: Tensor = self.mlp_norm(x + self.transform(x))
        return out


def check_sizes(width: int, heads: int, dropout: float, **sizes: int) -> None:
    """Checks the sizes of a transformer, and those of ``sizes`` besides, which have to be positive.

    Raises:
        ConfigError: one is not positive, the heads do not divide the width, or the rate is none.
    """
    if min(width, heads, *sizes.values()) < 1 or width % heads or not 0 <= dropout < 1:
        named = ", ".join(f"{name}={value}" for name, value in sizes.items())
        raise ConfigError(
            f"model: width={width}, heads={heads}, dropout={dropout}, {named} is impossible: "
            "expected positive sizes, a width that the heads divide, and 0 <= dropout < 1"
        )


@torch.no_grad()
def initialise(layers: Iterable[nn.Module], back: float = DEVIATION) -> None:
    """Draw weights from a normal distribution with deviation 0.02, zero biases, and leave norms as they are.

    Args:
        layers: in whose order numbers are drawn.
        back: deviation of the projections back into the residual stream.
    """
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" not in name:
                parameter.normal_(0.0, back if name.startswith(("attention_out", "mlp_out")) else DEVIATION)
