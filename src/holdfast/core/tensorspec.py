"""What crosses the boundary between two layers, and what items of data are like, without torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_TARGET", "ItemSpec", "TensorSpec"]

NO_TARGET = -100
"""The class that a target has where none is asked for: torch's losses leave it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and type of a tensor.

    Attributes:
        shape: sizes of the dimensions, the batch first.
        dtype: name of the type without ``torch.``, such as ``float32``.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """As people write it: ``float32 [2, 8]``."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSpec:
    """What every item of a dataset is like.

    Attributes:
        inputs: what its inputs are like, by name; one that is alone may have the name "".
        target: what its target is like.
    """

    inputs: tuple[tuple[str, TensorSpec], ...]
    target: TensorSpec
