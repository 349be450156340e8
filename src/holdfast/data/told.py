"""State of somebody else's objects in the form of JSON, beside the tensors in it or with them."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import ConfigError

__all__ = ["plain", "whole"]

_TENSOR = "__tensor__"


def plain(
    value: Any, what: str, tensors: list[Tensor] | None = None, types: Collection[torch.dtype] | None = None
) -> Any:
    """Returns a state in the form of JSON.

    Args:
        value: numbers, texts, None, tensors, and lists and dicts of these.
        what: whose it is, for messages.
        tensors: takes the tensors, each of which is its number then; None: they are written into the text.
        types: those that tensors may have; None: any.

    Raises:
        ConfigError: something in it is nothing of the kind.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or (types is not None and value.dtype not in types):
            raise ConfigError(
                f"{what}: its state holds a tensor of {value.dtype}, {value.layout}; expected a dense one"
            )
        if tensors is None:
            return {_TENSOR: _text_of(value.detach())}
        tensors.append(value.detach())
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise ConfigError(f"{what}: keys of its state are not all texts or numbers")
        return {"__dict__": [[key, plain(each, what, tensors, types)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [plain(each, what, tensors, types) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{what}: its state holds a {type(value).__name__}; expected numbers, texts, None, tensors, lists and dicts"
    )


def whole(value: Any, tensors: Sequence[Tensor] = ()) -> Any:
    """Returns what `plain` was given; tuples as lists, and copies of tensors."""
    if isinstance(value, dict) and _TENSOR in value:
        told = value[_TENSOR]
        return tensors[told].clone() if isinstance(told, int) else _tensor_of(*told)
    if isinstance(value, dict):
        return {key: whole(each, tensors) for key, each in value["__dict__"]}
    if isinstance(value, list):
        return [whole(each, tensors) for each in value]
    return value


def _text_of(value: Tensor) -> list[Any]:
    flat: Any = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    text = base64.b64encode(flat.tobytes()).decode()
    return [str(value.dtype).removeprefix("torch."), list(value.shape), text]


def _tensor_of(dtype: str, shape: list[int], text: str) -> Tensor:
    if not text:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    data = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(shape).clone()
