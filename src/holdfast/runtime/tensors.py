"""What a described tensor is to torch."""

from __future__ import annotations

import torch

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError

__all__ = ["num_bytes", "torch_dtype"]


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
