"""What models are trained to make small, where they do not say it themselves."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.core.tensorspec import NO_TARGET

__all__ = ["cross_entropy"]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of those targets that are not left out; 0 if all are.

    Args:
        output: logits ``[..., classes]``.
        target: int64 ``[...]``: the classes, or ``NO_TARGET``.
    """
    logits, classes = output.flatten(0, -2), target.flatten()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half of the bits hold no such sums
    total = functional.cross_entropy(logits, classes, ignore_index=NO_TARGET, reduction="sum")
    return total / (classes != NO_TARGET).sum().clamp(min=1)
