"""What crosses the boundary between two layers, without torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TensorSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and type of a tensor.

    Attributes:
        shape: sizes of the dimensions, the batch first.
        dtype: name of the type without ``torch.``, such as ``float32``.
    """

    shape: tuple[int, ...]
    dtype: str
