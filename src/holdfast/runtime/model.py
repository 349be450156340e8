"""A model as an ordered list of layers: weights tied between layers, and what flows between layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError

__all__ = [
    "Loss",
    "Model",
    "Tie",
    "check_output",
    "find_ties",
    "infer_boundaries",
    "num_bytes",
    "spec_of",
    "tie_groups",
    "torch_dtype",
    "untie",
]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss(output, target)``: the mean over one micro-batch as a scalar tensor."""


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return the spec of a tensor."""
    return TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Return the type of a spec as torch knows it.

    Raises:
        ConfigError: torch has no such type.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{spec.dtype!r} is not the name of a tensor type, expected one such as float32")
    return dtype


def num_bytes(spec: TensorSpec) -> int:
    """Return the size of a spec's contiguous tensor in bytes."""
    return torch.Size(spec.shape).numel() * torch_dtype(spec).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """One weight that several layers use.

    Attributes:
        places: layer and name within the layer of each use, layers ascending, each layer once.
    """

    places: tuple[tuple[int, str], ...]

    def __post_init__(self) -> None:
        layers = self.layers
        if len(layers) < 2 or any(a >= b for a, b in pairwise(layers)):
            raise ConfigError(f"tie {self.places}: expected two or more ascending layers")

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that use the weight, ascending."""
        return tuple(layer for layer, _ in self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained.

    Attributes:
        layers: the layers in order; each takes and returns one tensor. Layers share no parameter.
        loss: the loss of one micro-batch.
        ties: weights that were one parameter and must stay equal.
    """

    layers: tuple[nn.Module, ...]
    loss: Loss
    ties: tuple[Tie, ...] = ()

    @classmethod
    def build(cls, layers: Sequence[nn.Module], loss: Loss) -> Model:
        """Return the model of these layers, with the ties found and taken apart.

        Raises:
            ConfigError: there is no layer, or an element is not a module.
        """
        if not layers:
            raise ConfigError("a model needs at least one layer")
        for index, layer in enumerate(layers):
            if not isinstance(layer, nn.Module):
                raise ConfigError(f"layer {index} is a {type(layer).__name__}, expected a torch.nn.Module")
        ties = find_ties(layers)
        return cls(layers=untie(layers, ties), loss=loss, ties=ties)


def find_ties(layers: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Return the parameters that occur, as the same object, in more than one layer.

    Args:
        layers: all layers of the model in order.

    Returns:
        One tie per such parameter, in the order of first use. The name is the first one within each layer.
    """
    places: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            places.setdefault(id(parameter), []).append((index, name))
    return tuple(Tie(places=tuple(uses)) for uses in places.values() if len(uses) > 1)


def tie_groups(ties: Sequence[Tie]) -> tuple[tuple[int, ...], ...]:
    """Return the distinct tuples of layers that share weights: the reductions over more than one layer, ascending."""
    return tuple(sorted({tie.layers for tie in ties}))


def untie(layers: Sequence[nn.Module], ties: Sequence[Tie]) -> tuple[nn.Module, ...]:
    """Give every layer after the first use of a tied weight its own parameter of the same value.

    Args:
        layers: all layers; their parameters are replaced in place. A layer that shares a whole module with an earlier
            one is copied.
        ties: what `find_ties` found.

    Returns:
        Layers that share no parameter and no module.
    """
    separate = _separate_modules(layers)
    for tie in ties:
        first, name = tie.places[0]
        original = layers[first].get_parameter(name)
        for index, _ in tie.places[1:]:
            own = nn.Parameter(original.detach().clone(), requires_grad=original.requires_grad)
            _replace(separate[index], original, own)
    return tuple(separate)


def _separate_modules(layers: Sequence[nn.Module]) -> list[nn.Module]:
    seen: set[nn.Module] = set()
    separate = []
    for layer in layers:
        modules = set(layer.modules())
        separate.append(layer if seen.isdisjoint(modules) else copy.deepcopy(layer))
        seen |= modules
    return separate


def _replace(layer: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(module, name, new)


def check_output(index: int, layer: nn.Module, output: object) -> Tensor:
    """Return a layer's output if it is one tensor of floating point.

    Raises:
        ConfigError: it is anything else; names the layer.
    """
    if isinstance(output, Tensor) and output.is_floating_point():
        return output
    found = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
    raise ConfigError(f"layer {index} ({type(layer).__name__}) returned {found}, expected one floating-point tensor")


@torch.no_grad()
def infer_boundaries(layers: Sequence[nn.Module], sample: Tensor) -> tuple[TensorSpec, ...]:
    """Find what every layer returns by running the layers on one micro-batch.

    Random states, parameters and buffers (running statistics included) are left as they were.

    Args:
        layers: all layers of the model.
        sample: the inputs of one micro-batch.

    Returns:
        One spec per layer: entry ``i`` is what layer ``i`` hands to layer ``i + 1``; the last is the model's output.

    Raises:
        ConfigError: a layer does not return one floating-point tensor.
    """
    specs = []
    with torch.random.fork_rng():
        for index, layer in enumerate(layers):
            buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
            output = torch.func.functional_call(layer, buffers, (sample,))
            sample = check_output(index, layer, output)
            specs.append(spec_of(sample))
    return tuple(specs)
