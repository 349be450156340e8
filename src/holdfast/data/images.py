"""Images in the folders of TinyImageNet."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import ConfigError

__all__ = ["NUM_CLASSES", "TinyImageNet"]

NUM_CLASSES = 200
"""Of TinyImageNet."""
_MEAN = np.array((0.485, 0.456, 0.406), np.float32)
_DEVIATION = np.array((0.229, 0.224, 0.225), np.float32)


class TinyImageNet:
    """Its training images: float32 ``[3, 64, 64]``, colours as usual for ImageNet, and the class as int64 ``[]``.

    Args:
        path: the folder that was unpacked; ``train/CLASS/images/*`` are read, classes in the order of their names.

    Raises:
        ConfigError: there are no such images, or more classes than 200, or Pillow is not installed.
    """

    def __init__(self, path: str) -> None:
        folders = sorted(each for each in Path(path, "train").glob("*") if (each / "images").is_dir())
        self._files = [
            (file, index) for index, each in enumerate(folders) for file in sorted((each / "images").iterdir())
        ]
        if not self._files or len(folders) > NUM_CLASSES:
            raise ConfigError(
                f"data.path: {path}: expected images in train/CLASS/images, of 1 to {NUM_CLASSES} classes; found "
                f"{len(self._files)} of {len(folders)}"
            )
        if find_spec("PIL") is None:
            raise ConfigError("data.kind: tinyimagenet needs Pillow; install it with pip install pillow")
        self._image: Any = import_module("PIL.Image")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        file, label = self._files[index]
        with self._image.open(file) as image:  # some of them are grey
            pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / np.float32(255)
        return torch.from_numpy((pixels - _MEAN) / _DEVIATION).permute(2, 0, 1).contiguous(), torch.tensor(label)
