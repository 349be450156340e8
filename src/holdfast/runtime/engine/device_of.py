"""The device that a job names: one of the built-in ones, or of a person's own code."""

from __future__ import annotations

import torch

from holdfast.devices.device import Device
from holdfast.devices.named import is_target, opened
from holdfast.errors import ConfigError
from holdfast.runtime.engine.foreign import call_target

__all__ = ["device_of"]


def device_of(name: str, *, exact: bool, alone: bool = False, key: str = "train.device") -> Device:
    """Returns a device, ready for the first operation of this process.

    Args:
        name: see :func:`holdfast.devices.named.opened`; or what makes a Device, as ``path/to/file.py:name``.
        exact: whether operations have to give the same bits every time.
        alone: whether the process is to see no other GPU.
        key: where it was asked for, for people.

    Raises:
        ConfigError: there is no such device, or what a person's code returns is none.
    """
    if not is_target(name):
        return opened(name, exact=exact, alone=alone, key=key)
    device = call_target(name, key, {})
    if not isinstance(device, Device):
        kind = type(device).__name__
        raise ConfigError(f"{key}: {name} returns {kind}; expected a holdfast.devices.device.Device (docs/gpu.md)")
    if (full := torch.empty(0, device=device.torch).device) != device.torch:
        raise ConfigError(f"{key}: {name} computes on {device.torch}; expected what torch calls it, {full}")
    if exact:
        device.settle()
    return device
