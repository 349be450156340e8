"""What a described tensor is to torch, and whether two are alike to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError

__all__ = ["num_bytes", "same_bits", "torch_dtype"]


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Return the type of a spec as torch knows it.

    Raises:
        ConfigError: torch has no such type.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{spec.dtype!r} is not the name of a tensor type, expected one such as float32")
    return dtype


def num_bytes(spec: TensorSpec) -> int:
    """Return the size of a spec's contiguous tensor in bytes."""
    return torch.Size(spec.shape).numel() * torch_dtype(spec).itemsize


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are alike to the bit, or neither is there."""
    if one is None or other is None:
        return one is other
    bits = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.shape == other.shape and torch.equal(*bits)
