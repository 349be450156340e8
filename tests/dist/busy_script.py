"""A training script in which something takes long once, in step 4: in every worker, or in one."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import holdfast

STEP = 4


class Storage(Dataset):
    """Data that are behind something which may stand still."""

    def __init__(self) -> None:
        self.inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
        self.stalls_s = 0.0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        stalls_s, self.stalls_s = self.stalls_s, 0.0
        time.sleep(stalls_s)
        return self.inputs[index], self.inputs[index].sum().reshape(1)


class Net(nn.Module):
    """What is compiled once more where the second argument is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, inputs, late: bool):
        return self.inner(inputs) * 1.0 if late else self.inner(inputs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("loads", "computes", "compiles", "spins"))
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--worker", help="in which worker; default in all")
    args = parser.parse_args()
    hf = holdfast.session()
    data, late = Storage(), False

    def backend(module, inputs):
        time.sleep(args.seconds if late else 0.0)
        return module.forward

    model = torch.compile(Net(), backend=backend) if args.what == "compiles" else Net()
    model, _ = hf.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in hf.steps(data, microbatches=8, size=4, steps=8):
        strikes = step.number == STEP and args.worker in (None, hf.worker)
        late = step.number >= STEP
        data.stalls_s = args.seconds if strikes and args.what == "loads" else 0.0
        for inputs, targets in step:
            if strikes and args.what == "computes":
                time.sleep(args.seconds)
                strikes = False
            while strikes and args.what == "spins":
                pass
            step.backward(nn.functional.mse_loss(model(inputs, late), targets))


if __name__ == "__main__":
    main()
