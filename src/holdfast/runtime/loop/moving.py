"""The tensors of a batch, where what computes takes them from: in pinned memory, or on the device already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from holdfast.data.feeds import Feed
from holdfast.devices.device import Device

__all__ = ["mover"]


def mover(feed: Feed, device: Device) -> Callable[[Any], Any] | None:
    """Returns what moves a batch without anybody waiting for the device; None if it stays as it is.

    Tensors in tuples, lists and dictionaries are moved; with ``to_device`` also whatever else has a method ``to``.

    Args:
        feed: says where its batches are to be.
        device: that computes with them.
    """
    if not device.apart or not (feed.to_device or feed.pin_memory):
        return None

    def move(value: Any) -> Any:
        if type(value) is Tensor and value.is_cpu and value.layout is torch.strided and value.numel():
            pinned = _pinned(value, device)
            return device.brought(pinned) if feed.to_device else pinned
        if feed.to_device and callable(getattr(value, "to", None)):
            return value.to(device.torch)
        return value

    return lambda batch: tree_map(move, batch)


def _pinned(tensor: Tensor, device: Device) -> Tensor:
    """The same in memory for copies; of the same strides, unless elements overlap."""
    like = torch.empty_like(tensor, device="meta")
    pinned = device.memory(tensor.nbytes).view(tensor.dtype).as_strided(like.size(), like.stride())
    return pinned.copy_(tensor)
