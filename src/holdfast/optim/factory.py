"""Optimizers with a pinned implementation, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ConfigError
from holdfast.optim.lamb import Lamb

__all__ = ["OptimizerFactory", "learning_rate_scale", "make_optimizer"]

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the optimizer of one layer from that layer's trainable parameters (at least one)."""


def make_optimizer(
    kind: str,
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    amsgrad: bool = False,
) -> OptimizerFactory:
    """Return a factory for an optimizer, one per layer.

    The plain implementation is pinned (neither foreach nor fused): they differ in the last bits.

    Args:
        kind: ``sgd``, ``adam``, ``adamw`` or ``lamb``.
        lr: learning rate before the schedule.
        weight_decay: L2 penalty (decoupled for adamw and lamb).
        momentum: for sgd.
        nesterov: for sgd with momentum.
        dampening: for sgd with momentum.
        betas: for adam, adamw and lamb.
        eps: for adam, adamw and lamb.
        amsgrad: for adam and adamw.

    Raises:
        ConfigError: the kind is unknown or a value is out of range.
    """
    pinned = {"foreach": False, "fused": False}
    sgd = {"momentum": momentum, "nesterov": nesterov, "dampening": dampening, **pinned}
    lamb = {"betas": betas, "eps": eps}
    adam = {**lamb, "amsgrad": amsgrad, **pinned}
    kinds: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, sgd),
        "adam": (torch.optim.Adam, adam),
        "adamw": (torch.optim.AdamW, adam),
        "lamb": (Lamb, lamb),
    }
    if kind not in kinds:
        raise ConfigError(f"optimizer.kind: {kind!r} is unknown, expected {', '.join(kinds)}")
    make, options = kinds[kind]

    def build(parameters: list[nn.Parameter]) -> Optimizer:
        return make(parameters, lr=lr, weight_decay=weight_decay, **options)

    try:
        build([nn.Parameter(torch.zeros(1))])
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from error
    return build


def learning_rate_scale(step: int, *, warmup_steps: int = 0, total_steps: int = 0, schedule: str = "constant") -> float:
    """Return the factor on the learning rate for a step.

    Args:
        step: 0-based number of the step about to be made.
        warmup_steps: steps over which the factor rises linearly to 1; step 0 already gets ``1 / warmup_steps``.
        total_steps: steps of the run, for ``linear`` and ``cosine``, which fall to 0 at this step.
        schedule: ``constant``, ``linear`` or ``cosine``.

    Raises:
        ConfigError: the schedule is unknown, or it falls and ``total_steps`` is not above ``warmup_steps``.
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ConfigError(f"optimizer.schedule: {schedule!r} is unknown, expected constant, linear or cosine")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    if total_steps <= warmup_steps:
        raise ConfigError(f"optimizer.schedule: {schedule} needs more than {warmup_steps} steps, got {total_steps}")
    left = max(0.0, 1.0 - (step - warmup_steps) / (total_steps - warmup_steps))
    return left if schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
