"""A script that goes wrong in one of the ways that show when its first item is tried: the argument says which."""

from __future__ import annotations

import sys
import threading

import numpy as np
import torch
from torch import nn

import holdfast

WHAT = sys.argv[1]
hf = holdfast.session()
own = np.random.default_rng(3)
begun = None


class Points(torch.utils.data.Dataset):
    opened = None

    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = torch.full((8,), index / 24) if WHAT != "opened" else self.opened[index]
        if WHAT == "data-begun":
            x = x + torch.from_numpy(begun.normal(size=8) if begun else np.ones(8)).float()
        elif WHAT.startswith("data"):
            x = x + torch.from_numpy(own.normal(size=8)).float()
        return x, x.sum().reshape(1)


class Model(nn.Sequential):
    def forward(self, x):
        if WHAT == "in-place":
            self[0].weight.data.mul_(0.99)
        if WHAT == "rebound":
            self[0].weight.data = self[0].weight.data * 0.99
        if WHAT == "model":
            x = x * float(own.normal())
        if WHAT == "shape":
            x = x[:, :5]
        return super().forward(x)


class Norm(nn.BatchNorm1d):
    """Has a forward pass of its own, which may scale by what it has seen before, in training too."""

    def forward(self, x):
        scale = 1 + self.running_var.clone() if WHAT == "renorm" else 2.0
        return super().forward(x) * scale


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute of its own and warms up by that."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.count = np.zeros(1) if WHAT == "attribute-array" else 0

    def step(self, closure=None):
        self.count = self.count + 1
        super().step()


class Wrapping(torch.optim.SGD):
    """Keeps another optimizer, as Lookahead does."""

    def __init__(self, parameters, **options):
        parameters = list(parameters)
        super().__init__(parameters, **options)
        self.inner = torch.optim.SGD(parameters, **options)


class Coupled(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure=None):
        given = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in given]).norm()
        for p in given:
            p.grad.div_(norm)
        super().step()


def begin(worker: int) -> None:
    """Gives a loader process a generator of its own; all of them begin alike."""
    global begun
    begun = np.random.default_rng(5)


def open_file(worker: int) -> None:
    """What a loader process alone has, as one that reads a file."""
    torch.utils.data.get_worker_info().dataset.opened = torch.linspace(0, 1, 24).reshape(24, 1).repeat(1, 8)


items = 0
kinds = {
    "attribute": Counting,
    "attribute-array": Counting,
    "wrapping": Wrapping,
    "coupled": Coupled,
    "coupled-whole": Coupled,
}
first = nn.Embedding(24, 16, max_norm=0.1) if WHAT == "max-norm" else nn.Linear(8, 16)
model = Model(first, *([Norm(16)] if WHAT in ("own-norm", "renorm") else []), nn.Linear(16, 1))
optimizer = kinds.get(WHAT, torch.optim.SGD)(model.parameters(), lr=0.01)
model, optimizer = hf.prepare(model, optimizer, bucket_bytes=64 if WHAT == "coupled" else 1 << 20)
given, options = Points(), {"size": 3, "workers": 2 if WHAT == "data-loaded" else None}
if WHAT in ("data-begun", "data-beside"):
    loaders = 2 if WHAT == "data-begun" else 0
    given, options = torch.utils.data.DataLoader(given, 3, num_workers=loaders, worker_init_fn=begin), {}
if WHAT == "opened":
    given, options = torch.utils.data.DataLoader(given, 3, num_workers=2, worker_init_fn=open_file), {}
for step in hf.steps(given, microbatches=9 if WHAT == "large-step" else 4, steps=4, **options):
    for x, y in step:
        items += 1
        if WHAT == "raises":
            raise ValueError("of the loop")
        if WHAT == "left":
            break
        if WHAT == "hangs":
            threading.Event().wait()
        loss = nn.functional.mse_loss(model((x[:, 0] * 24).long() if WHAT == "max-norm" else x), y)
        if WHAT == "first":
            loss = loss * (2.0 if hf.is_first else 1.0)
        step.backward(loss * items if WHAT == "counter" else loss)
    if WHAT == "left":
        break
