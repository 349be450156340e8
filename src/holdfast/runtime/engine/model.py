"""A model as an ordered list of layers: weights tied between layers, and what flows between layers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from holdfast.core.tensorspec import TensorSpec
from holdfast.data.items import Inputs, spec_of
from holdfast.errors import ConfigError

__all__ = [
    "Loss",
    "Model",
    "Tie",
    "WithContext",
    "check_loss",
    "check_output",
    "find_ties",
    "name_of",
    "retie",
    "tie_groups",
    "untie",
]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss(output, target)``: the mean over one micro-batch as a scalar tensor."""


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
            ConfigError: there is no layer, an element is not a module that takes one tensor, a parameter has no values
                yet, or none is to be trained.
        """
        if not layers:
            raise ConfigError("a model needs at least one layer")
        for index, layer in enumerate(layers):
            _check_layer(index, layer)
        if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
            raise ConfigError("no parameter of any layer has requires_grad, expected at least one that is trained")
        ties = find_ties(layers)
        return cls(layers=untie(layers, ties), loss=loss, ties=ties)


class WithContext(nn.Module):
    """A layer that is given, beside what the one before returned, what the samples of the micro-batch say."""

    def context(self, inputs: Inputs) -> Any:
        """Returns what is the second argument of ``forward``, given the samples' inputs; draws nothing."""
        raise NotImplementedError


def name_of(index: int, layer: nn.Module) -> str:
    """Return what messages call a layer: ``layer 3 (Linear)``."""
    return f"layer {index} ({type(layer).__name__})"


def _check_layer(index: int, layer: object) -> None:
    if isinstance(layer, type) and issubclass(layer, nn.Module):
        raise ConfigError(f"layer {index} is the class {layer.__name__}, expected a module: {layer.__name__}(...)")
    if not isinstance(layer, nn.Module):
        raise ConfigError(f"layer {index} is a {type(layer).__name__}, expected a torch.nn.Module")
    for name, parameter in layer.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise ConfigError(
                f"{name_of(index, layer)}: parameter {name} has no values yet, expected all sizes in build"
            )
    with suppress(ValueError):  # of forward passes in C++, which say nothing of what they take
        _check_call(index, layer, inspect.signature(layer.forward))


def _check_call(index: int, layer: nn.Module, signature: inspect.Signature) -> None:
    try:
        signature.bind(None)
    except TypeError:
        takes = ", ".join(signature.parameters) or "nothing"
        raise ConfigError(
            f"{name_of(index, layer)} takes {takes}; expected one tensor: whatever else it needs must be in that "
            "tensor, in a buffer or in the layer"
        ) from None


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


def retie(layers: Sequence[nn.Module], ties: Sequence[Tie]) -> None:
    """Have layers share the weights again that `untie` took apart, for whoever trains all of them as one module."""
    for tie in ties:
        (first, name), *others = tie.places
        for index, own in others:
            _replace(layers[index], layers[index].get_parameter(own), layers[first].get_parameter(name))


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


def check_output(index: int, layer: nn.Module, output: object, expected: TensorSpec | None = None) -> Tensor:
    """Return a layer's output if it is one tensor of floating point.

    Args:
        index: the layer's number.
        layer: the layer.
        output: what it returned.
        expected: what it returned before; None: nothing is known of that.

    Raises:
        ConfigError: it is anything else, or another shape or type than expected; names the layer.
    """
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise ConfigError(
            f"{name_of(index, layer)} returned {_shown(output)}, expected one floating-point tensor: wrap the layer in "
            "a module that returns just that"
        )
    if expected is not None and spec_of(output) != expected:
        raise ConfigError(
            f"{name_of(index, layer)} returned {spec_of(output)}, and {expected} at first; expected one shape and type "
            "for all micro-batches"
        )
    return output


def check_loss(value: object) -> Tensor:
    """Return the loss of a micro-batch if it is a scalar that depends on the model's output.

    Raises:
        ConfigError: it is anything else.
    """
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        hint = ", such as its .mean()" if isinstance(value, Tensor) and value.dim() else ""
        raise ConfigError(
            f"model.loss: returned {_shown(value)}, expected a scalar tensor: the micro-batch's mean{hint}"
        )
    if not value.requires_grad:
        raise ConfigError("model.loss: what it returned does not depend on the model's output by operations of torch")
    return value


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor, {spec_of(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
