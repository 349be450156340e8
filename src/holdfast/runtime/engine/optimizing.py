"""From a job to what updates its layers: optimizers, their learning rates, the scale of the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from holdfast.config.job import (
    Job,
)
from holdfast.errors import ConfigError
from holdfast.optim.factory import OptimizerFactory, learning_rate_scale, make_optimizer
from holdfast.optim.loss_scale import LossScaling
from holdfast.optim.schedules import Tabulated
from holdfast.runtime.engine.foreign import load_target, theirs

__all__ = ["build_optimizer", "build_scaling", "learning_rate_of"]


def build_optimizer(job: Job) -> OptimizerFactory:
    """Returns what makes one layer's optimizer."""
    options = job.optimizer
    if ":" in options.kind:
        return _own_optimizer(options.kind)
    return make_optimizer(
        options.kind,
        lr=options.lr,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        nesterov=options.nesterov,
        dampening=options.dampening,
        betas=options.betas,
        eps=options.eps,
        amsgrad=options.amsgrad,
    )


def _own_optimizer(target: str) -> OptimizerFactory:
    function = load_target(target, "optimizer.kind")

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        with theirs(f"optimizer.kind: {target} failed"):
            made = function(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer.kind: {target} returned a {type(made).__name__}; expected a torch.optim.Optimizer"
            )
        return made

    return make


def build_scaling(job: Job) -> LossScaling | None:
    """Returns how the scale of the loss changes; None where the job scales no loss."""
    options = job.train.loss_scale
    return None if options is None else LossScaling(initial=options.initial, growth_every=options.growth_every)


def learning_rate_of(job: Job) -> Callable[[int], float]:
    """Returns the factor on the learning rate, as a function of the step.

    Raises:
        ConfigError: its scheduler cannot be made, or goes by more than the step.
    """
    options = job.optimizer
    if ":" not in options.schedule:
        return partial(
            learning_rate_scale,
            warmup_steps=options.warmup_steps,
            total_steps=job.train.steps,
            schedule=options.schedule,
        )
    make = load_target(options.schedule, "optimizer.schedule")
    failed = f"optimizer.schedule: {options.schedule} failed"
    with theirs(failed):
        scale = Tabulated(partial(make, **options.schedule_arguments), options.lr)

    def behind_warmup(step: int) -> float:
        if step < options.warmup_steps:
            return learning_rate_scale(step, warmup_steps=options.warmup_steps)
        with theirs(failed):
            return scale(step - options.warmup_steps)

    return behind_warmup
