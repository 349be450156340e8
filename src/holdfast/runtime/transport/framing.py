"""A tensor behind a few packed bytes, in one message: how a transport sends what it has to say of a tensor.

Made with numpy where that does: on caches that an operation has used meanwhile, each call of torch takes 50 to 100 us.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy
import torch

from holdfast.core.tensorspec import TensorSpec
from holdfast.runtime.tensors import torch_dtype

__all__ = ["KNOWN_TO_NUMPY", "Body", "body_of", "bytes_of", "framed", "unframed"]

Body: TypeAlias = memoryview | torch.Tensor
"""The bytes of a message: of the host's memory; or of a device's, as a tensor: uint8, 1-D."""

KNOWN_TO_NUMPY = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
)


def framed(header: bytes, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a CPU tensor's bytes behind ``header``.

    Shapes:
        Any; the result has ``len(header)`` + the tensor's bytes elements of uint8.
    """
    content = bytes_of(tensor)
    frame = numpy.empty(len(header) + content.size, numpy.uint8)
    frame[: len(header)] = numpy.frombuffer(header, numpy.uint8)
    frame[len(header) :] = content  # other threads run meanwhile, which a bytearray would not let them
    return torch.from_numpy(frame)


def bytes_of(tensor: torch.Tensor) -> numpy.ndarray:
    """Returns a CPU tensor's bytes, of its own memory where that is contiguous."""
    tensor = tensor.detach()
    if tensor.dtype not in KNOWN_TO_NUMPY:
        tensor = tensor.contiguous().view(-1).view(torch.uint8)
    return numpy.ascontiguousarray(tensor.numpy()).reshape(-1).view(numpy.uint8)


def body_of(tensor: torch.Tensor) -> Body:
    """Returns a tensor's bytes, where they are, of its own memory where that is contiguous."""
    if tensor.is_cpu:
        return bytes_of(tensor).data
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def unframed(frame: numpy.ndarray, size: int, spec: TensorSpec) -> torch.Tensor:
    """Returns the tensor behind a header of ``size`` bytes: a part of the frame, which may yet have to be filled."""
    return torch.from_numpy(frame[size:]).view(torch_dtype(spec)).view(spec.shape)
