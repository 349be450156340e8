"""Scikit-learn's handwritten digits, which come with that package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
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
        rows = np.loadtxt(_packaged_file(), delimiter=",", dtype=np.float32)  # 64 pixels of 0..16, and the digit
        self._images = torch.from_numpy(rows[:, :-1]).div(16.0).reshape(-1, 1, 8, 8)
        self._labels = torch.from_numpy(rows[:, -1].astype(np.int64))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index], self._labels[index]


def _packaged_file() -> Path:
    """Found without importing the package, which takes more than a second of CPU time, in every worker."""
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise ConfigError("data.kind: digits needs scikit-learn; install holdfast[digits]")
    folders = [Path(folder) for folder in package.submodule_search_locations or ()]
    files = [folder / "datasets" / "data" / "digits.csv.gz" for folder in folders]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise ConfigError(f"data.kind: digits: this scikit-learn has no {' or '.join(map(str, files))}")
    return found
