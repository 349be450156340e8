"""Schedulers of torch's, as functions of the step: any worker knows the learning rate of any step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import ConfigError

__all__ = ["Tabulated"]

_KEY = "optimizer.schedule"


class Tabulated:
    """What a scheduler makes of a learning rate, step by step.

    Args:
        make: makes the scheduler of an optimizer, which trains nothing.
        lr: the learning rate, in whose place that of the scheduler is.

    Raises:
        ConfigError: it is no scheduler, or needs more than to know how many steps were made.
    """

    def __init__(self, make: Callable[[torch.optim.Optimizer], object], lr: float) -> None:
        self._lr = lr
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.5)
        self._scheduler = made = make(self._optimizer)
        if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(f"{_KEY}: ReduceLROnPlateau goes by a loss; expected a function of the step alone")
        if not isinstance(made, LRScheduler):
            raise ConfigError(
                f"{_KEY}: returned a {type(made).__name__}; expected a torch.optim.lr_scheduler.LRScheduler"
            )
        self._step = made.step
        self._scales = [self._scale()]

    def __call__(self, step: int) -> float:
        """Returns the factor on the learning rate for a step, 0-based.

        Cost: that of all steps before it, once.
        """
        while len(self._scales) <= step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the order of calls, which is nobody's here
                self._step()
            self._scales.append(self._scale())
        return self._scales[step]

    def _scale(self) -> float:
        (group,) = self._optimizer.param_groups
        other: dict[str, Any] = {key: value for key, value in group.items() if key in ("momentum", "weight_decay")}
        if other != {"momentum": 0.5, "weight_decay": 0}:
            raise ConfigError(
                f"{_KEY}: {type(self._scheduler).__name__} changes more than the learning rate, as the momentum; "
                "expected that alone, such as by cycle_momentum: false"
            )
        return float(group["lr"]) / self._lr
