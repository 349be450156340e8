"""What a dataset hands out: every item a pair of tensors, all of one shape, so that they can be stacked."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from holdfast.core.tensorspec import ItemSpec, TensorSpec
from holdfast.errors import ConfigError

__all__ = ["item_spec", "pair_of", "spec_of", "stack"]


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return the spec of a tensor."""
    return TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def item_spec(pair: tuple[Tensor, Tensor]) -> ItemSpec:
    """Return what an item is like."""
    return ItemSpec(input=spec_of(pair[0]), target=spec_of(pair[1]))


def pair_of(index: int, item: object) -> tuple[Tensor, Tensor]:
    """Return an item as a pair of tensors: tensors as they are, arrays and numbers as torch reads them.

    Raises:
        ConfigError: it is anything else; names the item.
    """
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ConfigError(f"data: item {index} is {_shown(item)}; expected a pair of tensors: (input, target)")
    return _tensor(index, "input", item[0]), _tensor(index, "target", item[1])


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
    if isinstance(value, np.ndarray | np.generic | numbers.Number):
        try:
            return torch.tensor(value)  # a copy: arrays may be read-only
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"data: the {what} of item {index} cannot be a tensor: {error}") from error
    raise ConfigError(
        f"data: the {what} of item {index} is {_shown(value)}; expected a tensor, a numpy array or a number"
    )


def stack(indices: Sequence[int], items: Sequence[object], expected: ItemSpec | None) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of items, each stacked along a new first dimension.

    Args:
        indices: the items' numbers, for messages.
        items: as the dataset handed them out, at least one.
        expected: what all items are like; None: like the first of these.

    Raises:
        ConfigError: an item is no pair of tensors, or is not like the others; names it.
    """
    pairs = [pair_of(index, item) for index, item in zip(indices, items, strict=True)]
    known = expected or item_spec(pairs[0])
    for index, pair in zip(indices, pairs, strict=True):
        _check(index, "input", spec_of(pair[0]), known.input)
        _check(index, "target", spec_of(pair[1]), known.target)
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def _check(index: int, what: str, found: TensorSpec, expected: TensorSpec) -> None:
    if found != expected:
        raise ConfigError(
            f"data: the {what} of item {index} is {found}, others are {expected}; expected one shape and type for all "
            "items: pad or cut them"
        )
