"""How tensors are cut along their first dimension, one part per rank, as FSDP2 cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["message_length", "part_of", "part_shape", "scattered", "taken_apart", "together", "whole"]

Shape = Sequence[int]


def _rows(shape: Shape, ranks: int) -> int:
    """Rows of each part; the last ones may have fewer, or none."""
    return -(-shape[0] // ranks)


def _padded(shape: Shape, ranks: int) -> int:
    return _rows(shape, ranks) * prod(shape[1:])


def message_length(shapes: Sequence[Shape], ranks: int) -> int:
    """Returns how many elements the message of one rank's parts of tensors of these shapes has."""
    return sum(_padded(shape, ranks) for shape in shapes)


def part_of(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a rank's part of a tensor, which shares its memory; it may be empty."""
    rows = _rows(tensor.shape, ranks)
    return tensor[min(rank * rows, tensor.shape[0]) : min((rank + 1) * rows, tensor.shape[0])]


def part_shape(shape: Shape, rank: int, ranks: int) -> tuple[int, ...]:
    """Returns the shape of a rank's part.

    >>> [part_shape((3, 4), rank, 2) for rank in range(2)]
    [(2, 4), (1, 4)]
    """
    rows = _rows(shape, ranks)
    return (max(0, min(rows, shape[0] - rank * rows)), *shape[1:])


def together(parts: Sequence[Tensor], shapes: Sequence[Shape], ranks: int) -> Tensor:
    """Returns one rank's parts of several tensors as one message, equally long on every rank: ``[elements]``."""
    room = torch.zeros(message_length(shapes, ranks))
    start = 0
    for part, shape in zip(parts, shapes, strict=True):
        room[start : start + part.numel()] = part.reshape(-1)
        start += _padded(shape, ranks)
    return room


def whole(messages: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """Returns the tensors of which every rank has told its parts by `together`."""
    found, start = [], 0
    for shape in shapes:
        stop = start + _padded(shape, len(messages))
        flat = torch.cat([message[start:stop] for message in messages])
        found.append(flat[: prod(shape)].view(tuple(shape)))
        start = stop
    return found


def scattered(tensors: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Returns for every rank the message of its parts of these tensors."""
    shapes = [tensor.shape for tensor in tensors]
    return [together([part_of(tensor, rank, ranks) for tensor in tensors], shapes, ranks) for rank in range(ranks)]


def taken_apart(message: Tensor, shapes: Sequence[Shape], rank: int, ranks: int) -> list[Tensor]:
    """Returns a rank's parts of tensors of these shapes, which share the message's memory."""
    found, start = [], 0
    for shape in shapes:
        own = part_shape(shape, rank, ranks)
        found.append(message[start : start + prod(own)].view(own))
        start += _padded(shape, ranks)
    return found
