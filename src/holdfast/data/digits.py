"""Scikit-learn's handwritten digits, which come with that package."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.errors import ConfigError

__all__ = ["Digits"]


class Digits:
    """1797 digits: float32 ``[1, 8, 8]`` in 0..1, and the digit as int64 ``[]``.

    Raises:
        ConfigError: scikit-learn is not installed.
    """

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ConfigError("data.kind: digits needs scikit-learn; install holdfast[digits]") from error
        found = load_digits()
        self._images = torch.from_numpy(found.images).to(torch.float32).div_(16.0).unsqueeze(1)
        self._labels = torch.from_numpy(found.target).to(torch.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index], self._labels[index]
