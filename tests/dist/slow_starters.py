"""A model whose workers, as told by the arguments, die or hang while they start; its probe does not."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

from torch import nn


def build(folder, how, times):
    """``times`` processes of worker 1.0, one after another, are lost in this function."""
    if multiprocessing.current_process().name == "holdfast-1.0":
        marks = sorted(Path(folder).glob("lost-*"))
        if len(marks) < times:
            (Path(folder) / f"lost-{len(marks)}").touch()
            lose(how)
    return [nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)]


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def hanging_probe():
    time.sleep(3600)


def lose(how):
    if how == "die":
        os._exit(7)
    while True:
        time.sleep(3600)


__all__ = ["build", "hanging_probe", "loss"]
