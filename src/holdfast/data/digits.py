"""Scikit-learn's handwritten digits, which come with that package."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from holdfast.data.packaged import packaged_file

__all__ = ["Digits"]


class Digits:
    """1797 digits: float32 ``[1, 8, 8]`` in 0..1, and the digit as int64 ``[]``.

    Raises:
        ConfigError: scikit-learn is not installed.
    """

    def __init__(self) -> None:
        rows = np.loadtxt(
            packaged_file("digits.csv.gz", "digits"), delimiter=",", dtype=np.float32
        )  # 64 pixels of 0..16, and the digit
        self._images = torch.from_numpy(rows[:, :-1]).div(16.0).reshape(-1, 1, 8, 8)
        self._labels = torch.from_numpy(rows[:, -1].astype(np.int64))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index], self._labels[index]
