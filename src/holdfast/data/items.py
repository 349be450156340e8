"""What a dataset hands out: every item inputs and a target, all of one shape, so that they can be stacked."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from holdfast.core.tensorspec import ItemSpec, TensorSpec
from holdfast.errors import ConfigError

__all__ = ["Inputs", "first_of", "item_spec", "of_each", "pair_of", "spec_of", "stack", "tensors_of"]

Inputs: TypeAlias = Tensor | dict[str, Tensor]
"""What a model is given of samples: one tensor, or several by the names of its arguments."""

_ALONE = ""
"""The name of an input that is the only one, and needs none."""


def first_of(inputs: Inputs) -> Tensor:
    """Return the first of the tensors, or the only one."""
    return inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the tensors, in their order."""
    return tuple(_named(inputs).values())


def of_each(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return inputs with what ``change`` makes of each tensor."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    return {name: change(each) for name, each in inputs.items()}


def _named(inputs: Inputs) -> dict[str, Tensor]:
    return {_ALONE: inputs} if isinstance(inputs, Tensor) else inputs


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return the spec of a tensor."""
    return TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def item_spec(pair: tuple[Inputs, Tensor]) -> ItemSpec:
    """Return what an item is like."""
    inputs = tuple((name, spec_of(each)) for name, each in _named(pair[0]).items())
    return ItemSpec(inputs=inputs, target=spec_of(pair[1]))


def pair_of(index: int, item: object) -> tuple[Inputs, Tensor]:
    """Return an item's inputs and target: tensors as they are; arrays, numbers and lists of these as torch reads them.

    Raises:
        ConfigError: it is anything else; names the item.
    """
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ConfigError(
            f"data: item {index} is {_shown(item)}; expected a pair: (input, target), the input a tensor or several "
            "by name"
        )
    return _inputs(index, item[0]), _tensor(index, "target", item[1])


def _inputs(index: int, value: object) -> Inputs:
    if not isinstance(value, Mapping):
        return _tensor(index, "input", value)
    if not value or not all(isinstance(name, str) and name for name in value):
        raise ConfigError(f"data: the input of item {index} is {_shown(value)}; expected tensors by name, one or more")
    return {name: _tensor(index, f"input {name!r}", each) for name, each in value.items()}


def _shown(item: object) -> str:
    kind = type(item).__name__
    if isinstance(item, Mapping):
        return f"a {kind} with the keys {', '.join(map(str, item))}"
    if isinstance(item, tuple | list):
        return f"a {kind} of {len(item)}"
    if isinstance(item, Tensor):
        return f"one tensor, {spec_of(item)}"
    return "None" if item is None else f"a {kind}"


def _tensor(index: int, what: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic | numbers.Number | list):
        try:
            return torch.tensor(value)  # a copy: arrays may be read-only
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"data: the {what} of item {index} cannot be a tensor: {error}") from error
    raise ConfigError(
        f"data: the {what} of item {index} is {_shown(value)}; expected a tensor, a numpy array, a number or a list of "
        "numbers"
    )


def stack(indices: Sequence[int], items: Sequence[object], expected: ItemSpec | None) -> tuple[Inputs, Tensor]:
    """Return the inputs and the targets of items, each stacked along a new first dimension.

    Args:
        indices: the items' numbers, for messages.
        items: as the dataset handed them out, at least one.
        expected: what all items are like; None: like the first of these.

    Raises:
        ConfigError: an item is no pair of inputs and a target, or is not like the others; names it.
    """
    pairs = [pair_of(index, item) for index, item in zip(indices, items, strict=True)]
    known = expected or item_spec(pairs[0])
    rows = [_named(inputs) for inputs, _ in pairs]
    for index, row, (_, target) in zip(indices, rows, pairs, strict=True):
        _check_names(index, row.keys(), [name for name, _ in known.inputs])
        for name, spec in known.inputs:
            _check(index, f"input {name!r}" if name else "input", spec_of(row[name]), spec)
        _check(index, "target", spec_of(target), known.target)
    stacked: dict[str, Tensor] = {name: torch.stack([row[name] for row in rows]) for name, _ in known.inputs}
    return stacked.get(_ALONE, stacked), torch.stack([target for _, target in pairs])


def _check_names(index: int, found: Collection[str], expected: Collection[str]) -> None:
    if set(found) != set(expected):
        shown, others = (", ".join(names) if any(names) else "one tensor" for names in (found, expected))
        raise ConfigError(
            f"data: the input of item {index} is {shown}, of others {others}; expected the same names for all items"
        )


def _check(index: int, what: str, found: TensorSpec, expected: TensorSpec) -> None:
    if found != expected:
        raise ConfigError(
            f"data: the {what} of item {index} is {found}, others are {expected}; expected one shape and type for all "
            "items: pad or cut them"
        )
