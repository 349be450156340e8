"""Layers as a job is evaluated by them: as nobody trains, without gradients, on data of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from holdfast.core.tensorspec import ItemSpec, TensorSpec
from holdfast.core.work import WorkPhase, working
from holdfast.data.items import Inputs, first_of, of_each, stack
from holdfast.data.sampler import load_items
from holdfast.devices.device import HOST, Device
from holdfast.errors import ConfigError
from holdfast.runtime.engine.foreign import theirs
from holdfast.runtime.engine.model import Loss, Model, WithContext, check_output
from holdfast.runtime.engine.precision import cast_to
from holdfast.runtime.tensors import places

__all__ = [
    "EvaluationData",
    "Metrics",
    "as_evaluated",
    "beside_of",
    "check_evaluation",
    "load_evaluated",
    "run_as_evaluated",
    "scores_of",
]

Metrics: TypeAlias = Callable[[Tensor, Tensor], Mapping[str, Any]]
"""``metrics(output, target)``: numbers of a micro-batch, by their names; or tensors of one element."""
_LOSS = "loss"
_AS_WRITTEN = nullcontext()
_MOST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """What a job is evaluated by.

    Attributes:
        load: the inputs and targets of a micro-batch, a pure function of its number.
        metrics: of the output and the targets; None: the loss is all.
    """

    load: Callable[[int], tuple[Inputs, Tensor]]
    metrics: Metrics | None = None


def beside_of(
    module: nn.Module,
    inputs: Callable[[], Inputs],
    cast: AbstractContextManager[object] = _AS_WRITTEN,
    *,
    evaluated: bool = False,
) -> object | None:
    """Returns what a layer is given beside its input; None for one that is given nothing.

    Args:
        module: the layer.
        inputs: loads those of the micro-batch, if they are needed.
        cast: entered for the layer's own operations.
        evaluated: whether it is in eval mode meanwhile.
    """
    if not isinstance(module, WithContext):
        return None
    given = inputs()
    with cast, as_evaluated(module) if evaluated else nullcontext():
        beside: object = module.context(given)
    return beside


def run_as_evaluated(index: int, module: nn.Module, value: Tensor, beside: object | None) -> Tensor:
    """Runs a layer in eval mode, which it leaves again; returns its output, without a graph.

    Raises:
        ConfigError: that has changed a parameter or a buffer.
    """
    marks = [(place, place.tensor, place.tensor._version, place.tensor.data_ptr()) for place in places(module)]
    with torch.no_grad(), as_evaluated(module):
        output: Tensor = module(value) if beside is None else module(value, beside)
    for place, tensor, version, pointer in marks:
        if place.now is not tensor or (tensor._version, tensor.data_ptr()) != (version, pointer):
            raise ConfigError(
                f"layer {index} ({type(module).__name__}) changes {place.name!r} when it is evaluated; expected that "
                "nothing of a layer changes but by training"
            )
    return output


@contextmanager
def as_evaluated(module: nn.Module) -> Iterator[None]:
    """Within it a module is in eval mode; behind it, each of its parts is in the mode in which it was."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train(modes[0][1])
        for each, training in modes:
            each.training = training


def scores_of(
    loss: Loss, metrics: Metrics | None, output: Tensor, target: Tensor, device: Device = HOST
) -> dict[str, float]:
    """Returns the loss of a micro-batch, and what metrics say of it, in this order.

    Raises:
        ConfigError: they say something else than numbers, or name one ``loss``.
    """
    with torch.no_grad():
        found: dict[str, Any] = {_LOSS: loss(output, target)}
        if metrics is not None:
            found |= _checked(metrics(output, target))
    return {name: _number(name, value, device) for name, value in found.items()}


def _checked(said: object) -> Mapping[str, Any]:
    if not isinstance(said, Mapping) or not all(isinstance(name, str) for name in said) or _LOSS in said:
        got = f"the keys {', '.join(map(str, said))}" if isinstance(said, Mapping) else f"a {type(said).__name__}"
        raise ConfigError(f"evaluate.metrics: expected numbers by their names, none of which is {_LOSS!r}; got {got}")
    if len(said) > _MOST:
        raise ConfigError(f"evaluate.metrics: {len(said)} numbers; expected at most {_MOST}")
    return said


def _number(name: str, value: object, device: Device) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(device.outgoing(value.detach()).wait())
    if isinstance(value, Real):
        return float(value)
    if name == _LOSS:
        raise ConfigError(f"model.loss: expected one number for a whole micro-batch in eval mode; got {value!r:.200}")
    got = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigError(f"evaluate.metrics: {name}: expected a number for a whole micro-batch; got {got}")


def check_evaluation(
    model: Model,
    data: EvaluationData,
    outputs: Sequence[TensorSpec] = (),
    device: Device = HOST,
    precision: torch.dtype | None = None,
) -> dict[str, float]:
    """Checks that a model can be evaluated: by its first micro-batch, whose scores it returns.

    Args:
        model: the model.
        data: what it is evaluated by.
        outputs: what every layer returns in training, and has to return here; empty: that is not known.
        device: where it is computed.
        precision: of what autocast makes it; None: as it is written.

    Raises:
        ConfigError: it cannot.
    """
    loaded, target = data.load(0)
    inputs, target = of_each(device.brought, loaded), device.brought(target)
    value, known = first_of(inputs).clone(), dict(enumerate(outputs))
    for index, module in enumerate(model.layers):
        module.to(device.torch)
        with theirs(f"evaluate: layer {index} ({type(module).__name__}) failed in eval mode"):
            with cast_to(precision, device.torch):
                beside = beside_of(module, lambda: inputs, evaluated=True)
                output = run_as_evaluated(index, module, value, beside)
            value = check_output(index, module, output, known.get(index))
    with theirs("evaluate.metrics failed"), cast_to(precision, device.torch):
        return scores_of(model.loss, data.metrics, value, target, device)


def load_evaluated(dataset: Any, number: int, size: int, expected: ItemSpec | None) -> tuple[Inputs, Tensor]:
    """Returns a micro-batch of data that a job is evaluated by, which are read from the beginning.

    Args:
        dataset: by index.
        number: of the micro-batch.
        size: samples of each.
        expected: what every item is like; None: all of a micro-batch are alike.
    """
    indices: Sequence[int] = range(number * size, (number + 1) * size)
    with working(WorkPhase.LOADING, microbatch=number):
        return stack(indices, load_items(dataset, indices), expected)
