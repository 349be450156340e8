"""Trains on shards of webdataset, shuffled by its own buffer: ``rng=random`` is the generator that Holdfast seeds."""

from __future__ import annotations

import random
import sys

import torch
import webdataset
from torch import nn
from torch.utils.data import DataLoader

import holdfast

SHARDS, OUT = sys.argv[1:]


def pair(sample: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Every sample with noise, as an augmentation has it."""
    label = float(sample[0])
    return label + 0.1 * torch.randn(8), torch.tensor([label])


hf = holdfast.session(seed=0)
data = webdataset.WebDataset(SHARDS, shardshuffle=4).shuffle(20, rng=random).decode().to_tuple("cls").map(pair)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model, _ = hf.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
for step in hf.steps(DataLoader(data, batch_size=3, num_workers=1), microbatches=4, steps=60):
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
if hf.is_first:
    torch.save(model.state_dict(), OUT)
