"""The script of ``loading.py``: items that sleep, and samples that are in memory or have to be waited for.

Or, with ``--passes``, a loop that goes over a DataLoader of its own behind each step; with ``--plain`` without a loop.
"""

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


def pass_seconds() -> float:
    """Goes over all images once, as an evaluation does, by two processes."""
    begun = time.monotonic()
    for _ in DataLoader(Images(0.0), batch_size=64, num_workers=2):
        pass
    return time.monotonic() - begun


def main() -> None:
    """Trains, and tells when each step was over, or how long each pass took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--item-s", type=float, default=0.0)
    parser.add_argument("--sample-s", type=float, default=0.0)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--passes", type=int, default=0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--times", type=Path, required=True)
    options = parser.parse_args()
    if options.plain:
        write(options, "plain", [pass_seconds() for _ in range(options.passes)])
        return
    hf = holdfast.session(seed=1)
    model = nn.Linear(3 * 32 * 32, 10)
    model, _ = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = DataLoader(
        Images(options.sample_s), batch_size=options.size, shuffle=True, num_workers=options.loaders
    )  # read for what it says, and never iterated
    ends, passes = [], []
    for step in hf.steps(loader, microbatches=options.microbatches, steps=options.steps or options.passes):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x.flatten(1)), y))
            time.sleep(options.item_s)
        ends.append(time.monotonic())
        if options.passes:
            passes.append(pass_seconds())
    write(options, hf.worker, passes or ends)


def write(options: argparse.Namespace, name: str, rows: list[float]) -> None:
    """Hands times over."""
    options.times.with_name(f"{options.times.name}-{name}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
