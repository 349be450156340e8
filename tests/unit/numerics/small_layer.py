"""A layer with buffers, a frozen parameter and one that has no gradient at first."""

import torch
from torch import Tensor, nn


def make_layer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    layer[2].weight.requires_grad_(False)
    return layer


def gradients(step: int, layer: nn.Module) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    found: dict[str, Tensor | None] = {
        name: torch.randn(p.shape, generator=generator) for name, p in layer.named_parameters() if p.requires_grad
    }
    if step < 2:
        found["0.bias"] = None
    return found
