"""GPT-3 as SlipStream trains it, in bf16, as a model of a job file: to measure what its layers cost on a GPU.

All blocks cost the same, so two of them are enough to measure; ``measure.py`` beside this makes whole profiles of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.models import gpt

__all__ = ["CONTEXT", "VOCABULARY", "Tokens", "layers", "loss"]

VOCABULARY = 50_257
CONTEXT = 2_048


class _Half(nn.Module):
    """A layer whose products are computed in bf16, and which hands on bf16; its weights are float32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            out: Tensor = self.layer(x)
            return out.bfloat16()


def layers(blocks: int, width: int, context: int = CONTEXT, vocabulary: int = VOCABULARY) -> list[nn.Module]:
    """Returns embedding, blocks and head; heads have 64 numbers, or 128 from a width of 3072 on."""
    heads = width // (64 if width < 3_072 else 128)
    shape = {"layers": blocks, "width": width, "heads": heads, "context": context, "vocab": vocabulary}
    return [_Half(layer) for layer in gpt.build(**shape, dropout=0.0)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean cross entropy, computed in float32."""
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


class Tokens:
    """Random tokens: what they are does not change what a layer costs."""

    def __init__(self, context: int = CONTEXT, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocabulary, (64, context + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._tokens[index]
        return row[:-1], row[1:]
