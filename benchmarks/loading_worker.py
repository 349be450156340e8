"""The script of ``loading.py``: items that sleep, and samples that are in memory or have to be waited for."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast

SAMPLES = 2048


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Small images in memory; each takes as long as a read from a file system far away, if told."""

    def __init__(self, sample_s: float) -> None:
        self._images = torch.randn(SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        self._sample_s = sample_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sample_s:
            time.sleep(self._sample_s)
        return self._images[index], torch.tensor(index % 10)


def main() -> None:
    """Trains, and tells when each step was over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--item-s", type=float, required=True)
    parser.add_argument("--sample-s", type=float, required=True)
    parser.add_argument("--loaders", type=int, required=True)
    parser.add_argument("--times", type=Path, required=True)
    options = parser.parse_args()
    hf = holdfast.session(seed=1)
    model = nn.Linear(3 * 32 * 32, 10)
    model, _ = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = DataLoader(
        Images(options.sample_s), batch_size=options.size, shuffle=True, num_workers=options.loaders
    )  # read for what it says, and never iterated
    ends = []
    for step in hf.steps(loader, microbatches=options.microbatches, steps=options.steps):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x.flatten(1)), y))
            time.sleep(options.item_s)
        ends.append(time.monotonic())
    options.times.with_name(f"{options.times.name}-{hf.worker}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
