"""From what a job says of devices to the devices."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from holdfast.devices.cuda import Cuda, visible
from holdfast.devices.device import HOST, Device
from holdfast.errors import ConfigError

__all__ = ["arithmetic", "check_alike", "choose", "is_target", "opened"]

_CPU, _CUDA, _AUTO = "cpu", "cuda", "auto"


def choose(wanted: str, workers: int) -> tuple[str, tuple[str, ...]]:
    """Returns what a job computes on, ``auto`` decided, and the names of the visible GPUs if it uses any.

    Asks the driver, unless it is the CPU: not in a process that others are forked from.

    Args:
        wanted: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``; or what makes a device, which stays as it is.
        workers: how many are to have a GPU each.
    """
    gpus = () if wanted == _CPU or is_target(wanted) else visible()
    if wanted == _AUTO:
        wanted = _CUDA if len(gpus) >= workers else _CPU
    return wanted, () if wanted == _CPU else gpus


def is_target(name: str) -> bool:
    """Whether a device is named by what makes it, in a person's own code."""
    return ":" in name and not name.startswith(f"{_CUDA}:")


def check_alike(chosen: str, gpus: Sequence[str], workers: int) -> None:
    """Checks that workers which have a GPU each have GPUs of one model: others do not compute the same bits.

    Args:
        chosen: what the job computes on, as ``choose`` says.
        gpus: the names of those that are visible.
        workers: how many there are to be.

    Raises:
        ConfigError: they are of several models.
    """
    kinds = list(dict.fromkeys(gpus[:workers])) if chosen == _CUDA else []
    if len(kinds) > 1:
        raise ConfigError(
            "train.device: with numerics exact all workers compute on GPUs of one model, and of the first "
            f"{workers} here some are {' and some '.join(kinds)}; expected that CUDA_VISIBLE_DEVICES shows those of "
            "one, or numerics fast"
        )


def arithmetic(device: Device) -> str:
    """Returns what two processes must have in common to compute the same bits, in words.

    It is not all: libraries may go by more than the kind of a processor; audits compare what is computed.
    """
    vendor = next((line.partition(":")[2].strip() for line in _processor() if line.startswith("vendor_id")), "")
    capability = torch.backends.cpu.get_cpu_capability()
    host = " ".join(filter(None, (platform.machine(), vendor, capability)))
    gpu = f", {device.identity}" if device.apart else ""
    return f"torch {torch.__version__}, {host}{gpu}"


def _processor() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def opened(name: str, *, exact: bool, alone: bool = False, key: str = "train.device") -> Device:
    """Returns a device, ready for the first operation of this process.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:N``, by its number among those that the process may see.
        exact: whether operations have to give the same bits every time.
        alone: whether the process is to see no other GPU.
        key: where it was asked for, for people.

    Raises:
        ConfigError: there is no such device.
    """
    kind, _, number = name.partition(":")
    if kind == _CPU:
        return HOST
    try:
        device = (Cuda.alone if alone else Cuda)(int(number or 0))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    if exact:
        device.settle()
    return device
