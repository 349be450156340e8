"""One data-parallel training script, carried by Holdfast, by DistributedDataParallel or by torchft; it tells its times.

Not meant to be started by hand. All three have the same model, samples and optimizer; gradients of the items of a step
are accumulated, and the last item's backward pass is that in which DDP reduces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

SIZE = 8
TOKENS = 8  # of a sample of the GPT
_TIMEOUT = timedelta(seconds=30)


class Slow(torch.autograd.Function):
    """Takes as long as it is told, in place of computing, and has cheap gradients."""

    @staticmethod
    def forward(ctx: Any, seconds: float, *parameters: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        ctx.save_for_backward(*parameters)
        return sum((p.reshape(-1)[0] for p in parameters), torch.zeros(()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *(torch.full_like(p, 1e-3) for p in ctx.saved_tensors)


class Emulated(nn.Module):
    """Eight square matrices, over which every pass takes so many seconds."""

    def __init__(self, seconds: float, side: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(side, side)) for _ in range(8)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = Slow.apply(self.seconds, *self.layers)
        return output


class Gpt(nn.Module):
    """Blocks of width 512, with 3.15 million parameters each; they tell which of 256 tokens a sequence stands for."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 512)
        block = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(512, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.blocks(self.embed(inputs)).mean(dim=1))
        return output


def build(options: argparse.Namespace) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    if options.blocks:
        return Gpt(options.blocks), TensorDataset(torch.randint(256, (4096, TOKENS)), torch.randint(256, (4096,)))
    data = TensorDataset(torch.randn(4096, 1, 16, 16), torch.randint(10, (4096,)))
    if options.emulate:
        return Emulated(options.emulate, options.side), data
    width = options.width
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    return model, data


def loss_of(options: argparse.Namespace, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output if options.emulate else nn.functional.cross_entropy(output, target)


class Times:
    """Wall and processor time at the end of each step."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._rows: list[tuple[float, float]] = []

    def step(self) -> None:
        self._rows.append((time.monotonic(), time.process_time()))

    def write(self, loss: torch.Tensor) -> None:
        if self._path:
            Path(f"{self._path}-{os.getpid()}.json").write_text(json.dumps({"rows": self._rows, "loss": loss.item()}))


def with_holdfast(options: argparse.Namespace) -> None:
    import holdfast

    hf = holdfast.session()
    model, data = build(options)
    model, _ = hf.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))
    times, value = Times(options.times), torch.zeros(())
    count = options.microbatches * options.workers
    for step in hf.steps(data, microbatches=count, size=SIZE, steps=options.steps):
        for x, y in step:
            value = loss_of(options, model(x), y)
            step.backward(value)
        times.step()
    times.write(value.detach())


def items(data: TensorDataset, options: argparse.Namespace, step: int) -> Iterator[Any]:
    first = (step * options.workers + options.rank) * options.microbatches * SIZE
    for start in range(first, first + options.microbatches * SIZE, SIZE):
        yield torch.utils.data.default_collate([data[i % len(data)] for i in range(start, start + SIZE)])


def with_ddp(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    store = dist.FileStore(options.store, options.workers)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.workers, timeout=_TIMEOUT)
    model, data = build(options)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    times, value = Times(options.times), torch.zeros(())
    for step in range(options.steps):
        optimizer.zero_grad(set_to_none=False)
        for number, (x, y) in enumerate(items(data, options, step)):
            last = number == options.microbatches - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                value = loss_of(options, ddp(x), y)
                (value / options.microbatches).backward()
        optimizer.step()
        times.step()
    times.write(value.detach())
    dist.barrier()
    dist.destroy_process_group()


def with_torchft(options: argparse.Namespace) -> None:
    from torchft_manager import make_manager

    model, data = build(options)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
    flat = torch.zeros(sum(p.numel() for p in parameters))
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    manager = make_manager(
        rank=options.rank,
        lighthouse=options.store,
        least=options.workers,
        timeout=_TIMEOUT,
        state=dict,
        load=lambda state: None,
    )
    times, value = Times(options.times), torch.zeros(())
    print("ready", flush=True)
    sys.stdin.readline()
    while manager.current_step() < options.steps:
        manager.start_quorum()
        flat.zero_()
        for x, y in items(data, options, manager.current_step()):
            value = loss_of(options, model(x), y)
            (value / options.microbatches).backward()
        manager.allreduce(flat).wait()
        if manager.should_commit():
            optimizer.step()
            times.step()
    times.write(value.detach())
    print("done", flush=True)
    sys.stdin.readline()  # who leaves early would break the last step of the others


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("by", choices=("holdfast", "ddp", "torchft"))
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--emulate", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=0, help="of a GPT, in place of other models")
    parser.add_argument("--side", type=int, default=64, help="of the matrices of the model that is emulated")
    parser.add_argument("--store", default="")
    parser.add_argument("--times", default="", help="where to tell them; nowhere unless told")
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"holdfast": with_holdfast, "ddp": with_ddp, "torchft": with_torchft}[options.by](options)


if __name__ == "__main__":
    main()
