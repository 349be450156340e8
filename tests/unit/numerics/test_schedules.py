"""Schedulers of torch's as functions of the step: its own rates, asked for in any order; what is no such function."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

from holdfast.errors import ConfigError
from holdfast.optim.schedules import Tabulated

LR = 0.3


def warmed(optimizer):
    return torchs.SequentialLR(
        optimizer, [torchs.LinearLR(optimizer, 0.1, total_iters=3), torchs.ExponentialLR(optimizer, 0.8)], [3]
    )


MADE = {
    "step": partial(torchs.StepLR, step_size=3, gamma=0.1),
    "several": partial(torchs.MultiStepLR, milestones=[2, 5]),
    "restarts": partial(torchs.CosineAnnealingWarmRestarts, T_0=4, T_mult=2, eta_min=0.01),
    "one cycle": partial(torchs.OneCycleLR, max_lr=0.9, total_steps=20, cycle_momentum=False),
    "polynomial": partial(torchs.PolynomialLR, total_iters=9, power=2.0),
    "sequence": warmed,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_rates_are_torchs(make):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = make(optimizer)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    scale = Tabulated(make, LR)
    assert [LR * scale(step) for step in (11, 0, 5)] == pytest.approx([rates[step] for step in (11, 0, 5)])
    assert [scale(step) for step in range(12)] == [Tabulated(make, LR)(step) for step in range(12)], "the same bits"


WRONG = [
    (torchs.ReduceLROnPlateau, "ReduceLROnPlateau goes by a loss; expected a function of the step alone"),
    (lambda _: None, "returned a NoneType; expected a torch.optim.lr_scheduler.LRScheduler"),
    (
        partial(torchs.OneCycleLR, max_lr=0.9, total_steps=20),
        "OneCycleLR changes more than the learning rate, as the momentum; expected that alone, such as by cycle_mom",
    ),
]


@pytest.mark.parametrize(("make", "said"), WRONG, ids=["plateau", "none", "momentum"])
def test_what_is_no_function_of_the_step_is_refused(make, said):
    with pytest.raises(ConfigError) as error:
        Tabulated(make, LR)
    assert str(error.value).startswith(f"optimizer.schedule: {said}")
