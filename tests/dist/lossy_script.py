"""A training script in which failures may be simulated; it says which items it was given, and what it ended with."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.data.digits import Digits
from holdfast.optim.digest import tensors_sha256

MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-2),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=MAKE, default="sgd")
    parser.add_argument("--simulate", help="casualties joined by +, percent, recovery")
    parser.add_argument("--digest")
    parser.add_argument("--told", help="a folder, for a file of each process")
    args = parser.parse_args()
    hf = holdfast.session(seed=2)
    digits = Digits()
    data = TensorDataset(*map(torch.stack, zip(*(digits[index] for index in range(400)), strict=True)))
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 16), nn.Linear(16, 10)
    )
    optimizer = MAKE[args.optimizer](model.parameters())
    if args.simulate:
        casualties, progress, recovery = args.simulate.split(",")
        optimizer = holdfast.SimulatedFailure(
            optimizer,
            step=3,
            workers=4,
            casualties=[int(each) for each in casualties.split("+")],
            progress=int(progress),
            recovery=recovery,
        )
    model, optimizer = hf.prepare(model, optimizer)
    for step in hf.steps(data, microbatches=8, size=3, steps=7):
        for x, y in step:
            if args.told:
                with (Path(args.told) / f"{hf.worker}-{os.getpid()}.jsonl").open("a") as file:
                    file.write(json.dumps([step.number, step.item]) + "\n")
            step.backward(nn.functional.cross_entropy(model(x), y))
    if args.digest and hf.is_first:
        Path(args.digest).write_text(tensors_sha256(dict(model.state_dict())))


if __name__ == "__main__":
    main()
