"""In which numbers operations compute: as they are written, or, by torch's autocast, in fewer bits where that does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["PRECISIONS", "cast_to"]

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the names that a job has for them."""
_AS_WRITTEN = nullcontext()


def cast_to(precision: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Within it torch's autocast computes what it can in numbers of a type; None: all as it is written.

    Weights that were cast are not kept from one operation to the next: of a weight that is used twice, as tied ones
    are, gradients would come together before they are cast back, in other bits than those of layers by themselves.
    """
    if precision is None:
        return _AS_WRITTEN
    return torch.autocast(device.type, dtype=precision, cache_enabled=False)
