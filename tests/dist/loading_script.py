"""A training script whose data come in one of several ways, and draw; every item tells which samples it has."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    default_collate,
)

import holdfast

SAMPLES, SIZE, MICROBATCHES, STEPS = 36, 2, 6, 36
"""Three steps are an epoch."""
LONG = 1000
"""Samples of an epoch of the stream with marks."""


def sample(index):
    """A sample with noise from every generator that a user may draw from."""
    noise = torch.rand(4) + random.random() + float(np.random.rand())
    return index, torch.arange(4.0) * index / SAMPLES + 0.1 * noise


class Noisy(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return sample(index)


class Stream(IterableDataset):
    """Shuffles what it has read, as such streams do."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(SAMPLES))
        random.Random(self.epoch).shuffle(numbers)
        for index in numbers:
            yield sample(index)


class Marked(IterableDataset):
    """Long, of no length, and with a state by which it is read on; counts what is read."""

    def __init__(self):
        self.at, self.read = 0, 0

    def __iter__(self):
        while self.at < LONG:
            self.at += 1
            self.read += 1
            yield sample(self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def collate(self, samples):
        """An item's first sample, too, is told of how many were read before."""
        indices, x = default_collate(samples)
        return indices, x, self.read


class Own(Sampler):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(SAMPLES))
        random.shuffle(numbers)
        return iter(numbers[self.epoch :] + numbers[: self.epoch])


class Batches(BatchSampler):
    pass


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="shuffled")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--told", help="a folder in which the samples of every item are told")
    parser.add_argument("--digest", help="a file for what the weights are in the end")
    parser.add_argument("--strike", default="", help="a worker that kills its loader processes in two steps")
    parser.add_argument("--outside", help="a file that the first worker waits for behind a step")
    parser.add_argument("--behind", type=int, default=5, help="which step that is")
    return parser.parse_args()


def data_of(args: argparse.Namespace) -> dict:
    workers = {"num_workers": args.loaders}
    if args.data == "grouped":
        lengths = [index % 5 for index in range(SAMPLES)]
        return {"dataset": Noisy(), "size": SIZE, "group_by_length": lengths, "workers": args.loaders}
    if args.data == "batches":
        return {"dataset": DataLoader(Noisy(), batch_sampler=Batches(RandomSampler(Noisy()), SIZE, False), **workers)}
    if args.data == "sampler":
        return {"dataset": DataLoader(Noisy(), batch_size=SIZE, sampler=Own(), **workers)}
    if args.data == "stream":
        return {"dataset": DataLoader(Stream(), batch_size=SIZE, **workers)}
    if args.data == "marked":
        marked = Marked()
        return {"dataset": DataLoader(marked, batch_size=SIZE, collate_fn=marked.collate, **workers)}
    return {"dataset": DataLoader(Noisy(), batch_size=SIZE, shuffle=True, **workers)}


def main() -> None:
    args = parse()
    hf = holdfast.session(seed=3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    model, _ = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=64)
    has_length = args.data not in ("stream", "marked")
    long = {"epochs": args.steps // 3} if has_length else {"steps": args.steps}
    for step in hf.steps(microbatches=MICROBATCHES, **long, **data_of(args)):
        for indices, x, *read in step:
            tell(args, hf, step, indices, *read)
            strike(args, hf, step)
            step.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        if args.outside and step.number == args.behind and hf.worker == "0.0":
            Path(args.outside).with_suffix(".there").touch()
            while not Path(args.outside).exists():
                time.sleep(0.01)
    if args.digest and hf.is_first:
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        Path(args.digest).write_text(hashlib.sha256(bits).hexdigest())


def strike(args: argparse.Namespace, hf, step) -> None:
    if args.strike != hf.worker or step.number not in (2, 7) or step.item % 2:
        return
    own = [each for child in psutil.Process().children() for each in child.children()]
    for each in own:
        each.send_signal(signal.SIGKILL)
        with (Path(args.told) / f"{each.pid}.struck").open("w"):
            pass


def tell(args: argparse.Namespace, hf, step, indices: torch.Tensor, *more: int) -> None:
    if args.told:
        with (Path(args.told) / f"{hf.worker}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([step.number, step.item, indices.tolist(), *more]) + "\n")


if __name__ == "__main__":
    main()
