"""A model tried out before anybody trains it: every layer runs twice, alone, as a worker would run it.

What fails is told with the layer's name; and so is what gives other bits the second time: a recovery runs steps again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.core.tensorspec import ItemSpec, TensorSpec
from holdfast.data.items import Inputs, first_of, item_spec, of_each, spec_of, stack, tensors_of
from holdfast.data.randomness import seed_host
from holdfast.data.sampler import Dataset
from holdfast.devices.device import HOST, Device
from holdfast.errors import ConfigError
from holdfast.runtime.engine.foreign import theirs
from holdfast.runtime.engine.model import Model, check_loss, name_of
from holdfast.runtime.engine.precision import cast_to
from holdfast.runtime.engine.stage import Stage, layer_seed
from holdfast.runtime.tensors import same_bits

__all__ = ["Trial", "try_items", "try_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was found.

    Attributes:
        boundaries: what every layer returns, from the first to the last, which is the model's output.
        state_bytes: parameters and optimizer state of every layer.
        differences: what gave other bits when it ran again, a line each, by layer; the loss last.
    """

    boundaries: tuple[TensorSpec, ...]
    state_bytes: tuple[int, ...]
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """What one layer made of one micro-batch: what it returned, what its backward pass added up, what became of it."""

    forward: tuple[Tensor, ...]
    backward: tuple[Tensor, ...]
    update: str | None
    state_bytes: int

    def differs_from(self, other: _Ran) -> str:
        """Says which pass first gave other bits; empty if none did."""
        if not _same(self.forward, other.forward):
            return "forward pass"
        if not _same(self.backward, other.backward):
            return "backward pass"
        return "" if self.update == other.update else "update by the optimizer"


def try_model(
    model: Model,
    stage_of: Callable[[int], Stage],
    batch: tuple[Inputs, Tensor],
    seed: int,
    device: Device = HOST,
    precision: torch.dtype | None = None,
) -> Trial:
    """Runs every layer on a micro-batch: forward, the loss, backward and the update of each, everything twice.

    Args:
        model: what is tried; it ends with the weights with which it began.
        stage_of: makes the stage of one layer alone, of a model with one layer more, so that it computes no loss; its
            micro-batch is this one.
        batch: inputs and targets of a micro-batch.
        seed: of the job.
        device: where the stages compute, and the batch is.
        precision: of what autocast makes the loss; the stages know it.

    Raises:
        ConfigError: their code raised, or broke a rule for layers or for the loss; names the layer.

    Cost: three forward passes, two backward passes and two updates. Of one layer at a time there are copies, and a
    graph.
    """
    values = [first_of(batch[0])]
    for index in range(len(model.layers)):
        values.append(_forward(model, stage_of(index), index, values[index]))
        _check_stats(model, stage_of(index), index, *values[-2:])
    gradient, told = _loss_gradient(model, values[-1], batch[1], seed, device, precision)
    sizes: list[int] = []
    for index in reversed(range(len(model.layers))):
        before = _drawn()
        ran = [_run(model, stage_of(index), index, values[index], gradient) for _ in range(2)]
        which = ran[0].differs_from(ran[1])
        if which:
            what = f"{name_of(index, model.layers[index])} gives other bits in its {which} when it is run again"
            told = [f"{what}: {_cause(before)}", *told]
        gradient = ran[0].backward[0] if index else gradient
        sizes.insert(0, ran[0].state_bytes)
    boundaries = tuple(spec_of(value) for value in values[1:])
    return Trial(boundaries=boundaries, state_bytes=tuple(sizes), differences=tuple(told))


def _forward(model: Model, stage: Stage, index: int, value: Tensor) -> Tensor:
    before = {name: parameter.detach().clone() for name, parameter in model.layers[index].named_parameters()}
    output = _run_forward(model, stage, index, value)
    for name, parameter in model.layers[index].named_parameters():
        if not _same((before[name],), (parameter,)):
            raise ConfigError(
                f"{name_of(index, model.layers[index])} changes its parameter {name!r} in the forward pass, through "
                "its .data; weights change by updates only, because the order of micro-batches is not fixed"
            )
    return output


def _check_stats(model: Model, stage: Stage, index: int, value: Tensor, output: Tensor) -> None:
    """Batch-norm that trains must not read its running statistics: a micro-batch runs with others."""
    stats = stage.running_stats(index)
    if not stats.foreign:
        return
    with stats.filled(1.0):
        again = _run_forward(model, stage, index, value)
    if not _same((output,), (again,)):
        raise ConfigError(
            f"{name_of(index, model.layers[index])} depends on the running statistics of its batch-norm in training "
            f"({', '.join(stats.foreign)}: a class with a forward pass of its own), which the step folds behind all of "
            "its micro-batches; expected that it reads them in eval() only, as torch.nn.BatchNorm2d does"
        )


def _run_forward(model: Model, stage: Stage, index: int, value: Tensor) -> Tensor:
    try:
        with theirs(f"{name_of(index, model.layers[index])} failed on {spec_of(value)}"):
            output = stage.forward(0, 0, value.clone())
    except ConfigError as error:
        if "in-place" in str(error):
            raise ConfigError(f"{error} Expected a layer that leaves its input as it is: inplace=False") from error
        raise
    assert output is not None
    return output


def _run(model: Model, stage: Stage, index: int, value: Tensor, gradient: Tensor) -> _Ran:
    output = _forward(model, stage, index, value)
    name = name_of(index, model.layers[index])
    with theirs(f"{name} failed in its backward pass"):
        found = stage.backward(OpKind.B, 0, 0, gradient.clone())
    sums = [stage.message(reduction) for reduction in stage.reductions]
    for reduction, message in zip(stage.reductions, sums, strict=True):
        stage.accept(reduction, add_up((message,)))
    stage.conclude(stage.vote())
    with theirs(f"the optimizer failed in its update of {name}"):
        stage.update(index)
    stage.swap(index)
    digest, size = stage.layer_digest(index), stage.export(index).num_bytes
    stage.take_back(0)
    backward = (*(() if found is None else (found,)), *(part for message in sums for part in message.parts))
    return _Ran(forward=(output,), backward=backward, update=digest, state_bytes=size)


def _loss_gradient(
    model: Model, output: Tensor, target: Tensor, seed: int, device: Device, precision: torch.dtype | None
) -> tuple[Tensor, list[str]]:
    """Returns the gradient for the model's output, and what differed when it was computed again."""
    before, found = _drawn(), []
    for _ in range(2):
        leaf = output.clone().requires_grad_()
        device.seed(layer_seed(seed, 0, 0, len(model.layers)))
        with theirs(f"model.loss: failed on an output of {spec_of(output)} and a target of {spec_of(target)}"):
            with cast_to(precision, device.torch):
                loss = check_loss(model.loss(leaf, target.clone()))
            (gradient,) = torch.autograd.grad(loss, [leaf])
        found.append((loss.detach(), gradient))
    same = _same(*found)
    return found[0][1], [] if same else [f"model.loss: gives other bits when it is run again: {_cause(before)}"]


def try_items(dataset: Dataset, indices: Iterable[int], seed: int) -> tuple[ItemSpec, tuple[str, ...]]:
    """Reads items twice; returns what every item is like, and which are not the same when they are read again.

    Raises:
        ConfigError: an item cannot be read, is no pair of inputs and a target, or is not like the others; names it.
    """
    known, told = None, []
    for index in dict.fromkeys(indices):
        pairs = []
        for _ in range(2):
            seed_host(seed)
            with theirs(f"data: item {index} of {len(dataset)} cannot be read"):
                item = dataset[index]
            pairs.append(stack((index,), (item,), known))
        if not _same(*((*tensors_of(inputs), target) for inputs, target in pairs)):
            told.append(f"data: item {index} is not the same when it is read again: {_UNSEEDED}")
        inputs, target = pairs[0]
        known = item_spec((of_each(lambda each: each[0], inputs), target[0]))
    assert known is not None, "there is at least one item"
    return known, tuple(told)


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


_UNSEEDED = (
    "it draws from a generator of its own, keeps something from one time to the next, or runs an operation that is not "
    "deterministic"
)


def _drawn() -> dict[str, Any]:
    """The states of the generators that nobody seeds for a model."""
    numpys: Any = np.random.get_state()
    return {"Python's random module": random.getstate(), "numpy's generator": (numpys[1].tobytes(), numpys[2])}


def _cause(before: dict[str, Any]) -> str:
    drawn = [name for name, state in _drawn().items() if state != before[name]]
    if drawn:
        return f"it draws from {' and '.join(drawn)}"
    return _UNSEEDED
