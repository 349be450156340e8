"""What a described tensor is to torch, whether two are alike to the bit, and how a thread computes with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError

__all__ = ["Place", "denormals_kept", "num_bytes", "places", "same_bits", "settle_thread", "torch_dtype"]

_SMALL = numpy.float32(1e-38)
_TENTH = numpy.float32(0.1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module has a tensor, and which it had when that was looked up."""

    name: str
    owner: dict[str, Any]
    leaf: str
    tensor: Tensor

    @property
    def now(self) -> Any:
        """What is there now; None: nothing."""
        return self.owner.get(self.leaf)


def places(model: nn.Module) -> Iterator[Place]:
    """Yield the places of all parameters and buffers; one of several places of a tensor is a place of its own."""
    for prefix, module in model.named_modules():
        for owner in (module._parameters, module._buffers):
            for leaf, tensor in owner.items():
                if tensor is not None:
                    yield Place(f"{prefix}.{leaf}" if prefix else leaf, owner, leaf, tensor)


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


def settle_thread() -> None:
    """In a thread of its own, whoever has begun it: sums have the same bits wherever they are made."""
    torch.set_num_threads(1)  # sums over several threads have other bits; the limit is each thread's own
    torch.set_flush_denormal(False)  # as the thread has it that began this one


@contextmanager
def denormals_kept() -> Iterator[None]:
    """Within it numbers close to zero are no zeros, whatever ``torch.set_flush_denormal`` was told in this thread."""
    flushed = not _SMALL * _TENTH
    if flushed:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(True)
