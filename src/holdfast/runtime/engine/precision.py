"""In which numbers operations compute: as they are written, or, by torch's autocast, in fewer bits where that does."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from holdfast.errors import ConfigError

__all__ = ["PRECISIONS", "cast_to", "check_cast"]

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


def check_cast(precision: torch.dtype | None, device: torch.device) -> None:
    """Checks that autocast computes in numbers of a type on a device, and does not leave it at that they are written.

    Raises:
        ConfigError: it does not.
    """
    if precision is None:
        return
    wrong = "autocast does not have it there"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with cast_to(precision, device):
                if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) is precision:
                    return
        except (AssertionError, RuntimeError) as error:
            wrong = str(error)
    raise ConfigError(f"train.precision: {precision} on {device.type}: {wrong}; expected fp32, or another device")
