"""Rows of numbers with a class each, as one channel: scikit-learn's breast-cancer data, and gene expressions of NT3."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.data.packaged import packaged_file
from holdfast.errors import ConfigError

__all__ = ["BreastCancer", "Expressions", "Rows", "count_values"]


class Rows:
    """Items: float32 ``[1, values]``, and the class as int64 ``[]``.

    Args:
        values: float64 ``[items, values]``.
        classes: of each item, whole numbers from 0.
    """

    def __init__(self, values: np.ndarray, classes: np.ndarray) -> None:
        self._values = torch.from_numpy(values.astype(np.float32)).unsqueeze(1)
        self._classes = torch.from_numpy(classes.astype(np.int64))

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._values[index], self._classes[index]


class BreastCancer(Rows):
    """569 tumours: 30 measurements, each with mean 0 and standard deviation 1 over all; 0 malignant, 1 benign.

    Raises:
        ConfigError: scikit-learn is not installed.
    """

    def __init__(self) -> None:
        table = np.loadtxt(packaged_file("breast_cancer.csv", "breast-cancer"), delimiter=",", skiprows=1)
        values = table[:, :-1]
        super().__init__((values - values.mean(0)) / values.std(0), table[:, -1])


class Expressions(Rows):
    """A file of CANDLE's NT3, such as ``nt_train2.csv``: in each line 0 or 1, then the expression of every gene.

    Each gene is divided by its largest magnitude, as the benchmark does.

    Raises:
        ConfigError: there is no such file, or it is no table of that form.
    """

    def __init__(self, path: str) -> None:
        with warnings.catch_warnings(action="ignore"):  # numpy warns of a file without a line
            try:
                table = np.loadtxt(_existing(path), delimiter=",", ndmin=2)
            except ValueError as error:
                raise ConfigError(f"data.path: {path}: {error}; expected a table of numbers") from error
        if table.shape[0] < 1 or table.shape[1] < 2 or not np.isin(table[:, 0], (0, 1)).all():
            raise ConfigError(f"data.path: {path}: expected lines of 0 or 1 and at least one value behind it")
        largest = np.abs(table[:, 1:]).max(0)
        super().__init__(table[:, 1:] / np.where(largest == 0, 1, largest), table[:, 0])


def count_values(path: str) -> int:
    """Returns how many values a line of such a file has behind its class, read from the first one.

    Raises:
        ConfigError: there is no such file.
    """
    with _existing(path).open() as file:
        return file.readline().count(",")


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ConfigError(f"data.path: {path}: there is no such file; expected NT3's CSV")
    return Path(path)
