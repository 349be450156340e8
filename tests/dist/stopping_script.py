"""A training script that ends its loop before its time, or gives its items weights; it tells what it ends with."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

STEPS, MICROBATCHES = 12, 6


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop", default="", help="WHEN:STEP: in its item 4, or behind it, by all or by one worker")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--weights", choices=("none", "all", "some", "negative", "zero"), default="none")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--told", help="a file for what the loop ends with")
    return parser.parse_args()


def weight_of(args: argparse.Namespace, step, x: torch.Tensor) -> dict:
    """How many features are positive: as the number of tokens of a text, other in each item."""
    if args.weights == "none" or (args.weights == "some" and step.item == 5):
        return {}
    return {"weight": {"negative": -1, "zero": 0}.get(args.weights, (x > 0).sum())}


def main() -> None:
    args = parse()
    hf = holdfast.session(seed=3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 8, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    model, optimizer = hf.prepare(model, optimizer, scheduler=scheduler, clip_norm=args.clip, bucket_bytes=64)
    when, _, at = args.stop.partition(":")
    seen, totals, losses = 0, [0.0, 0], []
    limit = {} if args.time_limit is None else {"time_limit": args.time_limit}
    held = hf.steps(data, microbatches=MICROBATCHES, size=4, steps=args.steps, logs=("loss",), **limit)
    for step in iter(held.__next__, None) if when == "held" else held:
        for x, y in step:
            if when == "skips" and step.item == 2:
                step.skip()
                continue
            loss = (model(x) - y).square().mean()
            step.log("loss", loss)
            step.backward(loss, **weight_of(args, step, x))
            if when == "in" and str(step.number) == at and step.item == 4:
                hf.stop()
        if when in ("break", "held") and str(step.number) == at:
            break
        if when == "exit" and str(step.number) == at:
            sys.exit(0)
        if (when == "behind" or (when == "one" and hf.worker == "0.0")) and str(step.number) == at:
            hf.stop()
        seen, losses = step.number + 1, [*losses, step.logged["loss"]]
        totals = [totals[0] + step.sums["loss"], totals[1] + step.counts["loss"]]
    if args.told and hf.is_first:
        bits = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
        told = {
            "seen": seen,
            "digest": hashlib.sha256(bits).hexdigest(),
            "lr": optimizer.param_groups[0]["lr"],
            "totals": totals,
            "losses": losses,
            "weights": [p.tolist() for p in model.parameters()],
        }
        Path(args.told).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
