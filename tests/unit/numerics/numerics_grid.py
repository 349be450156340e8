"""Drives several stages in one process as a grid of workers would."""

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core import summing
from holdfast.core.schedule import OpKind
from holdfast.core.summing import Contribution, Total
from holdfast.core.tensorspec import TensorSpec
from holdfast.devices.device import HOST, Device
from holdfast.optim.digest import RunDigest, digest_states
from holdfast.optim.factory import make_optimizer
from holdfast.optim.loss_scale import LossScaling
from holdfast.runtime.engine.evaluated import EvaluationData
from holdfast.runtime.engine.model import Loss, Model
from holdfast.runtime.engine.stage import CommitMethod, Stage
from holdfast.runtime.engine.stepped import ReducedLayers

Load = Callable[[int, int], tuple[Tensor, Tensor]]


def _device() -> Device:
    """The host; with ``HOLDFAST_DEVICE=late`` that of tests/accelerator.py."""
    if os.environ.get("HOLDFAST_DEVICE") != "late":
        return HOST
    from tests.accelerator import Late

    return Late()


@dataclass
class Job:
    """What is trained; `stages` makes fresh workers for it."""

    layers: Callable[[], list[nn.Module]]
    loss: Loss
    load: Load
    num_microbatches: int = 6
    seed: int = 5
    clip_norm: float | None = None
    scaling: LossScaling | None = None
    commit: CommitMethod = "shadow"
    checkpointed: frozenset[int] = frozenset()
    outputs: Sequence[TensorSpec] = ()
    evaluation: EvaluationData | None = None
    precision: torch.dtype | None = None
    device: Device = field(default_factory=_device)
    optimizer: Any = field(default_factory=lambda: make_optimizer("adamw", lr=1e-2, weight_decay=0.1))

    def stages(self, ranges: Sequence[tuple[int, int]]) -> list[Stage]:
        model = Model.build(self.layers(), self.loss)
        return [
            Stage(
                layers=copy.deepcopy(model.layers),
                owned=range(start, stop),
                ties=model.ties,
                loss=model.loss,
                optimizer=self.optimizer,
                lr_scale=lambda step: 1.0 / (1 + step),
                seed=self.seed,
                num_microbatches=self.num_microbatches,
                load=self.load,
                clip_norm=self.clip_norm,
                scaling=self.scaling,
                commit=self.commit,
                checkpointed=self.checkpointed,
                outputs=self.outputs,
                evaluation=self.evaluation,
                precision=self.precision,
                device=self.device,
            )
            for start, stop in ranges
        ]


def run_microbatch(route: Sequence[Stage], step: int, microbatch: int, split: bool = False) -> None:
    """Run one micro-batch forward and backward along a route."""
    forward(route, step, microbatch)
    backward(route, step, microbatch, split)


def forward(route: Sequence[Stage], step: int, microbatch: int) -> None:
    activation = None
    for stage in route:
        activation = _sent(stage, stage.forward(step, microbatch, activation))
    assert activation is None


def backward(route: Sequence[Stage], step: int, microbatch: int, split: bool = False) -> None:
    gradient = None
    for stage in reversed(route):
        gradient = _sent(stage, stage.backward(OpKind.I if split else OpKind.B, step, microbatch, gradient))
    assert gradient is None
    for stage in route if split else ():
        assert stage.backward(OpKind.W, step, microbatch, None) is None


def _sent(stage: Stage, tensor: Tensor | None) -> Tensor | None:
    """What comes to others, as the transport copies it."""
    return None if tensor is None else stage._on.outgoing(tensor).wait()


def reduce(stages: Sequence[Stage], standing: Sequence[ReducedLayers] = ()) -> dict[ReducedLayers, Total]:
    """Sum all messages but those of reductions that stand, hand them to all owners and settle the verdict."""
    sums, vote = add_up(stages, standing)
    for stage in stages:
        stage.conclude(vote)
    return sums


def add_up(
    stages: Sequence[Stage], standing: Sequence[ReducedLayers] = ()
) -> tuple[dict[ReducedLayers, Total], Tensor]:
    """Sum all messages, hand them to all owners and return the sums and the vote of all."""
    told: dict[ReducedLayers, list[Contribution]] = defaultdict(list)
    for stage in stages:
        for reduction in (each for each in stage.reductions if each not in standing):
            message = stage.message(reduction)
            told[reduction].append(replace(message, parts=tuple(_sent(stage, part) for part in message.parts)))
    sums = {reduction: summing.add_up(each) for reduction, each in told.items()}
    vote = None
    for stage in stages:
        for reduction in (each for each in stage.reductions if each not in standing):
            stage.accept(reduction, replace(sums[reduction], total=sums[reduction].total.clone()))
        vote = stage.vote() if vote is None else Stage.merge_votes(vote, stage.vote())
    assert vote is not None
    return sums, vote


def commit(stages: Sequence[Stage]) -> None:
    for stage in stages:
        for layer in stage.layers:
            stage.update(layer)
            stage.swap(layer)


def train(
    job: Job,
    ranges: Sequence[tuple[int, int]],
    routes: Sequence[Sequence[int]],
    steps: int,
    *,
    order: Sequence[int] | None = None,
    split: bool = False,
) -> tuple[list[Stage], list[list[float]]]:
    """Train on workers with these ranges; micro-batch ``m`` goes along ``routes[m % len(routes)]``."""
    stages = job.stages(ranges)
    losses = []
    for step in range(steps):
        for stage in stages:
            stage.begin(step)
        for microbatch in order or range(job.num_microbatches):
            run_microbatch([stages[i] for i in routes[microbatch % len(routes)]], step, microbatch, split)
        reduce(stages)
        losses.append(next(found for stage in stages if (found := stage.losses()) is not None))
        commit(stages)
    return stages, losses


def digest(stages: Sequence[Stage]) -> RunDigest:
    """Digest the whole model, after checking that all owners of a layer agree."""
    owners: dict[int, list[Stage]] = {}
    for stage in stages:
        for layer in stage.layers:
            owners.setdefault(layer, []).append(stage)
    for layer, holders in owners.items():
        assert len({stage.layer_digest(layer) for stage in holders}) == 1
    return digest_states(owners[layer][0].export(layer) for layer in sorted(owners))


def gpt_job(**changes: Any) -> Job:
    from holdfast.models import gpt

    def load(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        window = torch.randint(32, (2, 17), generator=generator)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def layers() -> list[nn.Module]:
        return gpt.build(layers=3, width=32, heads=2, context=16, vocab=32, dropout=0.1)

    return Job(layers=layers, loss=gpt.loss, load=load, **changes)


def convnet_job(**changes: Any) -> Job:
    from holdfast.models import convnet

    def load(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        return torch.rand(4, 1, 8, 8, generator=generator), torch.randint(10, (4,), generator=generator)

    return Job(layers=lambda: convnet.build(width=4, blocks=2), loss=convnet.loss, load=load, **changes)
