"""One process that trains as W workers would, one micro-batch after another, with simulated failures."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

from holdfast.config.job import Job
from holdfast.data.feeds import Feed, Indexed
from holdfast.data.items import pair_of
from holdfast.data.orders import shuffled
from holdfast.data.sampler import load_items
from holdfast.errors import ConfigError, StorageError
from holdfast.optim.digest import LayerState, digest_states, layer_file, load_layer, save_layer
from holdfast.runtime.engine.datasets import build_dataset
from holdfast.runtime.engine.model import WithContext, retie
from holdfast.runtime.engine.modules import build_model
from holdfast.runtime.engine.optimizing import build_optimizer, build_scaling, learning_rate_of
from holdfast.runtime.loop.alone import run_step, whole_stage
from holdfast.runtime.loop.failing import SimulatedFailure
from holdfast.runtime.loop.feeding import Feeding
from holdfast.runtime.loop.hosting import Loop
from holdfast.runtime.loop.prepared import prepare
from holdfast.runtime.loop.session import Runner, Step
from holdfast.runtime.loop.turns import Item, Take
from holdfast.study.outcomes import Held
from holdfast.study.scenarios import EXACT, StudyScenario, steps_per_epoch

__all__ = ["Split", "Trainer", "load_states", "save_states"]

_ONE_IN = 5
"""One item of so many is held out."""
_MOST_HELD_OUT, _AT_ONCE = 2048, 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """Some items of a dataset."""

    whole: Any
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return pair_of(self.indices[index], self.whole[self.indices[index]])


class Split:
    """A job's data in two: every fifth item is held out, the others are trained on.

    Args:
        job: whose data.

    Raises:
        ConfigError: there is nothing to hold out.
    """

    def __init__(self, job: Job) -> None:
        whole = build_dataset(job)
        held = range(_ONE_IN - 1, len(whole), _ONE_IN)
        if not held:
            raise ConfigError(f"data: a study holds out every fifth item; expected 5 items or more, got {len(whole)}")
        self.training = _Part(whole=whole, indices=tuple(each for each in range(len(whole)) if each not in held))
        chosen = held[:: -(-len(held) // _MOST_HELD_OUT)]
        torch.manual_seed(0)  # of data that draws
        self.held_out: Sequence[tuple[Tensor, Tensor]] = [
            default_collate(load_items(_Part(whole=whole, indices=tuple(chosen[at : at + _AT_ONCE])), range(size)))
            for at in range(0, len(chosen), _AT_ONCE)
            if (size := min(_AT_ONCE, len(chosen) - at))
        ]


class Trainer:
    """A model that is trained; fresh, with the bits that depend on the job's seed alone.

    Args:
        job: what is trained, by as many workers as it has pipelines.
        split: its data.
        scenario: what fails; None: nothing does.
    """

    def __init__(self, job: Job, split: Split, scenario: StudyScenario | None = None) -> None:
        built = build_model(job)
        self._loss, self._split = built.loss, split
        if any(isinstance(each, WithContext) for each in built.layers):
            raise ConfigError(
                "model: a study takes models that are lists of layers; expected none of kind huggingface, and no split"
            )
        if job.train.precision != "fp32":
            raise ConfigError(f"train.precision: a study computes in fp32; got {job.train.precision}")
        retie(built.layers, built.ties)
        self._model = nn.Sequential(*built.layers)
        optimizer = build_optimizer(job)([each for each in self._model.parameters() if each.requires_grad])
        prepared = prepare(
            self._model,
            (_failing(optimizer, scenario, len(job.grid.depths)),),
            schedulers=(LambdaLR(optimizer, learning_rate_of(job)),),
            clip_norm=job.train.clip_norm,
            bucket_bytes=1,  # each gradient by itself, also where nothing fails
        )
        prepared.scaling = build_scaling(job)
        count, size = job.global_microbatches, job.grid.microbatch_size
        self._in_vain = _in_vain(job, scenario)
        prepared.fail(count, steps_per_epoch(job, len(split.training)))
        order = shuffled(job.train.seed, len(split.training), size)
        self._loop = Loop(
            seed=job.train.seed,
            prepared=prepared,
            dataset=split.training,
            feed=Feed(source=Indexed(split.training, order), num_samples=size),
            microbatches=count,
            size=size,
            steps=job.train.steps,
        )
        items = _Items(self._run_item)
        self._stage = whole_stage(self._loop, items)
        self._runner = Runner(self._loop, items, lambda: self._stage, Feeding(self._loop))

    def run(self, step: int) -> None:
        """Runs a step: the one that its state is at."""
        if lost := self._in_vain.get(step):
            self._stage.begin(step)
            for microbatch in lost:
                self._stage.forward(step, microbatch, None)
            self._stage.discard()
        run_step(self._stage, self._loop, step)

    def held_out(self, steps: int) -> Held:
        """Returns loss and accuracy of the held-out data; ``steps``: how many were made.

        Raises:
            ConfigError: the loss is no number any more.
        """
        batches = self._split.held_out
        self._model.eval()
        with torch.no_grad():
            told = [_judge(self._model(x), y, self._loss) for x, y in batches]
        self._model.train()
        sizes = [len(y) for _, y in batches]
        loss = sum(each * size for (each, _, _), size in zip(told, sizes, strict=True)) / sum(sizes)
        if not math.isfinite(loss):
            raise ConfigError(
                f"after {steps} steps the held-out loss is {loss}, of which there is no difference to tell; a smaller "
                "optimizer.lr may help"
            )
        asked = sum(each for _, _, each in told)
        return Held(steps=steps, loss=loss, accuracy=sum(each for _, each, _ in told) / asked if asked else None)

    def states(self) -> list[LayerState]:
        """Returns its state, a copy."""
        return [self._stage.export(layer).clone() for layer in self._stage.layers]

    def take(self, states: Sequence[LayerState]) -> None:
        """Takes a state; the states stay as they are.

        Raises:
            StorageError: some of it is missing.
        """
        if len(states) != len(self._stage.layers):
            raise StorageError(f"a state of {len(states)} gradients; expected {len(self._stage.layers)}")
        for layer, state in enumerate(states):
            self._stage.install(layer, state.clone())

    def weights_sha256(self) -> str:
        """Returns the digest of its weights."""
        return digest_states(self.states()).weights_sha256

    def _run_item(self, item: Item) -> None:
        step = Step(item.shown, self._runner, item.step)
        for inputs, targets in step:
            step.backward(self._loss(self._model(inputs), targets))


class _Items:
    """Runs an item as soon as it is asked for, in the same thread."""

    def __init__(self, run_item: Callable[[Item], None]) -> None:
        self._run_item = run_item
        self._item: Item | None = None
        self._result: Any = None

    def run(self, items: Iterable[Item], take: Take) -> None:
        """Runs items, and has what came of each taken, until no more are wanted."""
        for item in items:
            self._item = item
            self._run_item(item)
            if not take(item, self._result):
                return

    def next_item(self, step: int) -> Item | None:
        """Returns the item that is asked for, once."""
        item, self._item = self._item, None
        return item

    def done(self, result: Any) -> None:
        """It is done."""
        self._result = result


def _in_vain(job: Job, scenario: StudyScenario | None) -> dict[int, range]:
    """By step, the micro-batches whose gradients are lost with their workers, and which others compute once more."""
    if scenario is None or scenario.strategy != "adaptive":
        return {}
    count = job.global_microbatches
    return {scenario.at: range(count * (scenario.survivors or 0) // len(job.grid.depths), count)}


def _failing(
    optimizer: torch.optim.Optimizer, scenario: StudyScenario | None, workers: int
) -> torch.optim.Optimizer | SimulatedFailure:
    if scenario is None or scenario.strategy in EXACT:
        return optimizer
    survivors = scenario.survivors or 0
    return SimulatedFailure(
        optimizer,
        step=scenario.at,
        casualties=workers - survivors,
        workers=workers,
        progress=scenario.progress,
        recovery=scenario.strategy,  # type: ignore[arg-type]  # of those that can be simulated
    )


def _judge(output: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, int, int]:
    """The mean loss; how many classes are right, and of how many."""
    mean = float(loss(output, target))
    if target.is_floating_point() or output.shape[:-1] != target.shape:
        return mean, 0, 0
    asked = target >= 0  # what is not asked for is negative
    return mean, int((output.argmax(-1) == target)[asked].sum()), int(asked.sum())


def save_states(folder: Path, states: Sequence[LayerState]) -> None:
    """Writes a state, a file for each gradient, in place of what was there; the folder is there once it is whole."""
    temporary = folder.with_name(folder.name + ".tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    for state in states:
        save_layer(layer_file(temporary, state.layer), state)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.replace(folder)


def load_states(folder: Path) -> list[LayerState]:
    """Returns a state that was written.

    Raises:
        StorageError: a file cannot be read.
    """
    return [load_layer(file) for file in sorted(folder.glob("layer-*.safetensors"))]
