"""A training script with its own loop, in several variants; every item that it is given is told in a file."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.data.digits import Digits


class Tied(nn.Module):
    """One weight used twice, one that is frozen, one that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 24, bias=False)
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(24, 64, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.data.T.clone())
        self.classes = nn.Linear(24, 10)

    def forward(self, images):
        inner = torch.relu(self.frozen(self.embed(images.flatten(1))))
        again = nn.functional.linear(inner, self.embed.weight.T)
        return self.classes(torch.tanh(self.embed(again)))


class Average:
    """A moving average of the weights, which the script itself keeps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.times = 0

    def update(self) -> None:
        self.times += 1
        for mine, theirs in zip(self.weights, self.model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.1)

    def state_dict(self):
        return {"weights": self.weights, "times": self.times}

    def load_state_dict(self, state):
        self.weights, self.times = list(state["weights"]), state["times"]


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4 * 64, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=("norm", "scaled", "tied", "own"), default="norm")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sum-chunks", type=int)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--told", help="a folder in which every item is told")
    parser.add_argument("--digest", help="a file for what the script itself ends with")
    parser.add_argument("--fault", default="", help="what the script does wrong, and in which worker: KIND[:WORKER]")
    parser.add_argument("--logged", help="a folder in which each process tells what was logged of each step")
    parser.add_argument("--outside", help="a file that the first worker waits for behind step 2")
    return parser.parse_args()


def main() -> None:
    args = parse()
    hf = holdfast.session(seed=3)
    digits = Digits()
    data = TensorDataset(*map(torch.stack, zip(*(digits[index] for index in range(500)), strict=True)))
    model = (Tied() if args.variant == "tied" else net()).to(hf.device)
    if args.compiled:
        model = torch.compile(model, backend="aot_eager")
    options: dict = {}
    if args.variant == "norm":
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)]
    elif args.variant == "scaled":
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2)]
        scaler = torch.amp.GradScaler(hf.device.type, init_scale=2.0**127, growth_interval=3)
        options = {"scaler": scaler, "clip_norm": 0.5}
    elif args.variant == "tied":
        optimizers = [
            torch.optim.AdamW(model.embed.parameters(), lr=1e-2),
            torch.optim.SGD(
                [*model.head.parameters(), *model.classes.parameters(), *model.unused.parameters()], lr=0.1
            ),
        ]
        options = {"scheduler": [torch.optim.lr_scheduler.CosineAnnealingLR(each, T_max=8) for each in optimizers]}
    else:
        optimizers = [torch.optim.RMSprop(model.parameters(), lr=1e-3)]
    model, *optimizers = hf.prepare(model, *optimizers, bucket_bytes=256, **options)
    average = hf.state(Average(model)) if args.variant == "own" else None
    loss_fn = nn.CrossEntropyLoss()

    made = hf.steps(
        data,
        microbatches=args.microbatches,
        size=3,
        steps=args.steps,
        logs=("right", "odd"),
        sum_chunks=args.sum_chunks,
        to_device=args.variant == "norm",
    )
    for step in made:
        if args.fault == f"slow-body:{hf.worker}" and step.number == 2:
            time.sleep(4)  # twice as long as a worker may be stuck: in the loop's body, and in no item
        for images, labels in step:
            x, y = images.to(hf.device), labels.to(hf.device)
            for optimizer in optimizers:
                optimizer.zero_grad()
            tell(args, hf, step.number, step.item)
            go_wrong(args, hf, step, model, optimizers)
            if args.variant == "own" and step.item == 1:
                step.skip()
                continue
            if args.variant == "scaled":
                with torch.autocast(hf.device.type, dtype=torch.bfloat16):
                    output = model(x)
                step.backward(loss_fn(output.float(), y))
            elif args.variant == "own":
                with torch.no_grad():
                    taught = model.eval()(x)
                output = model.train()(x)
                step.backward(0.5 * loss_fn(output, y) + 0.1 * (output - taught).square().mean())
                step.backward(0.1 * sum(p.square().sum() for p in model.parameters()))
            elif args.fault.startswith("no-backward"):
                model(x)
            else:
                output = model(x)
                step.log("right", (output.argmax(1) == y).float().mean())
                for odd in (y[y % 2 == 1]).tolist():
                    step.log("odd", odd)
                loss = loss_fn(output, y)
                if args.variant == "norm" and step.item % 2:  # a second view: batch-norm runs twice in such an item
                    loss = loss + 0.1 * (output - model(x.flip(-1))).square().mean()
                step.backward(loss * os.getpid() if args.fault == "own-bits" else loss)
        if args.logged:
            with (Path(args.logged) / f"{hf.worker}-{os.getpid()}.logged").open("a") as file:
                file.write(json.dumps([step.number, step.logged]) + "\n")
        if average is not None:
            average.update()
        if args.fault == "break" and step.number == 2:
            break
        if args.outside and step.number == 2 and hf.worker == "0.0":
            Path(args.outside).with_suffix(".there").touch()
            while not Path(args.outside).exists():
                time.sleep(0.01)
    if args.told:
        (Path(args.told) / f"{hf.worker}-{os.getpid()}.behind").touch()
    if args.fault == "behind":
        raise RuntimeError("what comes behind the loop")
    if args.digest and hf.is_first:
        kept = [*model.state_dict().values(), *(average.weights if average is not None else [])]
        Path(args.digest).write_text(str([value.double().sum().item().hex() for value in kept]))


def go_wrong(args: argparse.Namespace, hf, step, model: nn.Module, optimizers: list) -> None:
    kind, _, worker = args.fault.partition(":")
    if step.number != 2 or worker not in ("", hf.worker):
        return
    if kind == "raise":
        raise ValueError("the third step is not to my taste")
    if kind == "exit":
        raise SystemExit(7)
    if kind == "exit-well":
        raise SystemExit(0)
    if kind == "load":
        batches = torch.utils.data.DataLoader(torch.arange(4), num_workers=1, generator=torch.Generator())
        assert [int(x) for x in batches] == [0, 1, 2, 3]
    if kind == "step":
        optimizers[0].step()
    if kind == "buffer":
        model.register_buffer("seen", torch.zeros(1))


def tell(args: argparse.Namespace, hf, step: int, item: int) -> None:
    if args.told:
        with (Path(args.told) / f"{hf.worker}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([step, item]) + "\n")


if __name__ == "__main__":
    main()
