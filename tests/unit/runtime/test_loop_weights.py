"""Items that count by weights: what torch makes of all their samples at once is what a step makes of them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError
from holdfast.runtime.loop.alone import Alone
from holdfast.runtime.loop.session import Session

STEPS, ITEMS, SIZE = 3, 4, 8


def data():
    x = torch.randn(STEPS * ITEMS * SIZE, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.square().sum(1, keepdim=True))


def counted(x):
    """Which samples count: in each item another number of them."""
    return x[:, 0] > 0


class Run:
    """A script that trains on the samples that count, and keeps what it was given."""

    def __init__(self, **options):
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        self.plain = copy.deepcopy(self.model).double()
        self.hf, self.options, self.given, self.losses = Session(Alone(), 0), options, [], []

    def __call__(self, backward):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.hf.prepare(self.model, optimizer, **self.options)
        for step in self.hf.steps(data(), microbatches=ITEMS, size=SIZE, steps=STEPS, logs=("loss",)):
            self.given.append([])
            for x, y in step:
                self.given[-1].append((x, y))
                backward(step, x, y)
        return self

    def means(self, x, y):
        keep = counted(x)
        return nn.functional.mse_loss(self.model(x[keep]), y[keep]), keep.sum()


def plain(run, items_of=lambda items: items, clip=None):
    """The weights as torch alone makes them, in float64, of all samples of a step at once."""
    optimizer = torch.optim.SGD(run.plain.parameters(), lr=0.1)
    for items in run.given:
        x, y = (torch.cat(each).double() for each in zip(*items_of(items), strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(run.plain(x[counted(x)]), y[counted(x)]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(run.plain.parameters(), clip)
        optimizer.step()
    return list(run.plain.parameters())


def alike(run, expected):
    pairs = zip(run.model.parameters(), expected, strict=True)
    return all(torch.allclose(p.double(), q, rtol=1e-5, atol=1e-6) for p, q in pairs)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_mean_is_over_all_that_counts(clip):
    run = Run(clip_norm=clip)
    run(lambda step, x, y: step.backward(run.means(x, y)[0], weight=run.means(x, y)[1]))
    assert alike(run, plain(run, clip=clip))
    without = Run(clip_norm=clip)
    without(lambda step, x, y: step.backward(without.means(x, y)[0]))
    assert not alike(without, plain(without, clip=clip)), "the mean of means is another one"


def test_an_item_that_is_skipped_has_no_weight():
    run = Run()

    def backward(step, x, y):
        if step.item == 1:
            step.skip()
        else:
            loss, weight = run.means(x, y)
            step.backward(loss, weight=float(weight))

    run(backward)
    assert alike(run, plain(run, lambda items: [each for i, each in enumerate(items) if i != 1]))


def test_two_losses_of_an_item_have_two_weights():
    run = Run()

    def backward(step, x, y):
        for half in (slice(0, 4), slice(4, 8)):
            if counted(x[half]).any():
                loss, weight = run.means(x[half], y[half])
                step.backward(loss, weight=weight)
        if not counted(x).any():
            step.skip()

    run(backward)
    assert alike(run, plain(run))


def test_weights_of_nothing_change_nothing():
    run = Run()
    before = [p.clone() for p in run.model.parameters()]
    run(lambda step, x, y: step.backward(run.means(x, y)[0], weight=0))
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))


def test_the_loss_of_a_step_is_weighed():
    run = Run()
    given = []

    def backward(step, x, y):
        loss, weight = run.means(x, y)
        given.append((step.number, loss.item(), weight.item()))
        step.backward(loss, weight=weight)

    run(backward)
    last = [(loss, weight) for number, loss, weight in given if number == STEPS - 1]
    expected = sum(loss * weight for loss, weight in last) / sum(weight for _, weight in last)
    losses = run.hf._runner.stage().losses()
    assert sum(losses) / len(losses) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ((1, None), r"step 0, item 1: step\.backward: weight: expected one in each step\.backward, or in none"),
        ((None, 1), r"step 0, item 1: step\.backward: weight: expected one in each"),
        ((-1, 1), r"step 0, item 0: step\.backward: weight: expected a number from 0, got -1"),
        ((math.nan, 1), "expected a number from 0, got nan"),
        ((math.inf, 1), "expected a number from 0, got inf"),
    ],
)
def test_what_is_no_weight_is_refused_by_its_item(weights, text):
    run = Run()
    with pytest.raises(ConfigError, match=text):
        run(lambda step, x, y: step.backward(run.means(x, y)[0], weight=weights[step.item % 2]))


def test_workers_that_do_not_agree_whether_there_are_weights_are_told():
    """Each has the same in all of its items, as where it depends on the process."""
    run = Run()

    def backward(step, x, y):
        run.hf._runner.weighted = None
        step.backward(run.means(x, y)[0], weight=2 if step.item else None)

    with pytest.raises(ConfigError, match=r"step 0: .* was given a weight in 3 items, and none in 1; expected one in"):
        run(backward)


def test_what_is_logged_adds_up_over_steps():
    run, sums, counts = Run(), [], []

    def backward(step, x, y):
        for number in range(step.item):
            step.log("loss", number)
        step.backward(run.means(x, y)[0])

    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.hf.prepare(run.model, optimizer)
    for step in run.hf.steps(data(), microbatches=ITEMS, size=SIZE, steps=STEPS, logs=("loss",)):
        for x, y in step:
            with pytest.raises(ConfigError, match=r"step\.logged is known behind the loop over its items"):
                _ = step.sums
            backward(step, x, y)
        sums.append(step.sums["loss"])
        counts.append(step.counts["loss"])
        assert step.logged["loss"] == sums[-1] / counts[-1]
    assert (sums, counts) == ([0 + 0 + 1 + 0 + 1 + 2] * STEPS, [6] * STEPS)
