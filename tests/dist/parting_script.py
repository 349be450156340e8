"""A training script whose workers may part: by a generator of its own, or by weights that one of them changes."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

STEPS, MICROBATCHES = 40, 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", choices=("", "weights", "draws"), default="")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    hf = holdfast.session(seed=3)
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = hf.prepare(model, optimizer, bucket_bytes=64)
    own = np.random.default_rng(1)
    for step in hf.steps(data, microbatches=MICROBATCHES, size=4, steps=args.steps):
        for x, y in step:
            if args.parts == "draws" and step.number >= 3:
                x = x + 0.1 * float(own.random())
            step.backward((model(x) - y).square().mean())
        if args.parts == "weights" and step.number == 11 and hf.worker == "1.0":
            with torch.no_grad():
                model[0].weight.view(torch.int32)[0, 0] ^= 1


if __name__ == "__main__":
    main()
