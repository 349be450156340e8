"""What of a script decides bits, beside its first weights: its optimizers and schedulers, its data, its source files.

All are keys with plain values, as those of a job file are: a checkpoint tells them, and so does the process that tries
the script, and whoever goes on from the one or joins the other is compared with them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.config.deciding import spelled
from holdfast.data.feeds import Source
from holdfast.data.streams import Stream
from holdfast.optim.digest import tensor_sha256

__all__ = ["OF_PROGRESS", "data_facts", "facts_path", "of_group", "optimizer_facts", "scheduler_facts", "source_files"]

_ORDERED = 8
"""The order of so many items tells one order from another."""
_SHOWN = 16
"""So much of a digest is enough to tell two apart, and people see it."""
_DERIVED = ("initial_lr", "swa_lr")
OF_PROGRESS = ("base_lrs", "_last_lr", "last_epoch", "_step_count", "_get_lr_called_within_step", "_is_initial")
"""What of a scheduler's state tells how far it is, and from where."""


def facts_path(section: str, index: int, of: int) -> str:
    """Returns the key of one optimizer or scheduler of several: ``optimizer``, or ``optimizer.0``."""
    return section if of == 1 else f"{section}.{index}"


def optimizer_facts(optimizers: Sequence[Optimizer], model: nn.Module) -> dict[str, Any]:
    """Returns the class of each optimizer, and of its groups the parameters by name and the settings.

    A setting that is not the same in all groups is a dict by the group's number. Learning rates are those before a
    schedule.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {}
    for index, optimizer in enumerate(optimizers):
        path, groups = facts_path("optimizer", index, len(optimizers)), optimizer.param_groups
        found[f"{path}.kind"] = _kind(optimizer)
        found[f"{path}.groups"] = [[names[id(p)] for p in group["params"]] for group in groups]
        keys = dict.fromkeys(key for group in groups for key in group if key not in ("params", *_DERIVED))
        found |= {f"{path}.{key}": _in_groups([_setting(group, key) for group in groups]) for key in keys}
    return found


def _setting(group: Mapping[str, Any], key: str) -> Any:
    return _described(group.get("initial_lr", group["lr"]) if key == "lr" else group.get(key))


def _in_groups(values: Sequence[Any]) -> Any:
    first, *others = values
    return {str(index): value for index, value in enumerate(values)} if any(first != each for each in others) else first


def of_group(facts: Mapping[str, Any], path: str, index: int) -> Any:
    """Returns what `optimizer_facts` tell of one group's setting; None if nothing."""
    value = facts.get(path)
    return value.get(str(index)) if isinstance(value, dict) else value


def scheduler_facts(schedulers: Sequence[Any]) -> dict[str, Any]:
    """Returns the class of each scheduler and its settings: its state without what tells how far it is."""
    found: dict[str, Any] = {}
    for index, scheduler in enumerate(schedulers):
        path = facts_path("scheduler", index, len(schedulers))
        found[f"{path}.kind"] = _kind(scheduler)
        found |= {f"{path}.{key}": value for key, value in _standing(scheduler.state_dict()).items()}
    return found


def _standing(state: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): _described(value) for key, value in state.items() if key not in OF_PROGRESS}


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _described(value: Any) -> Any:
    """A value for people and for comparison; of what is no plain value, its type."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"{value.dtype} {tuple(value.shape)} {tensor_sha256(value)}"
    if isinstance(value, Mapping):
        return _standing(value)
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    plain = value is None or isinstance(value, bool | int | float | str)
    return spelled(value) if plain else _kind(value)


# --- data -------------------------------------------------------------------------------------------------------------


def data_facts(source: Source, sample: Callable[[int], Any]) -> dict[str, Any]:
    """Returns the dataset's class and length, the order of its first items, and a digest of three samples.

    The first, the middle and the last one; of a stream, those of its first item. Of what is another one every time,
    though everything is seeded before, shapes and types count.

    Args:
        source: of the loop's samples.
        sample: returns a sample by its number, with everything seeded that it may be drawn by.
    """
    dataset, size = source.dataset, len(source.dataset)
    if isinstance(dataset, Stream):
        samples = _digest([[source.read(source.ask(0, 0))]] * 2)
        return {"data.kind": dataset.name, "data.length": size, "data.samples": samples}
    order = hashlib.sha256(repr([source.ask(item, 0) for item in range(_ORDERED)]).encode()).hexdigest()[:_SHOWN]
    rounds: list[list[Any]] = [[], []]
    for index in (0, size // 2, size - 1):
        for each in rounds:
            each.append(sample(index))
    return {
        "data.kind": _kind(dataset),
        "data.length": size,
        "data.order": order,
        "data.samples": _digest(rounds),
    }


def _digest(rounds: Sequence[Sequence[Any]]) -> str:
    """A digest of what two rounds have in common."""
    digest = hashlib.sha256()
    for (form, bits), again in zip(*map(parts, rounds), strict=False):
        digest.update(form + (bits if (form, bits) == again else b""))
    return digest.hexdigest()[:_SHOWN]


def parts(value: Any) -> Iterator[tuple[bytes, bytes]]:
    """Yields the form and the bits of whatever a sample or a batch holds."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        yield f"{value.dtype} {tuple(value.shape)}".encode(), tensor_sha256(value).encode()
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield repr(key).encode(), b""
            yield from parts(each)
    elif isinstance(value, list | tuple):
        yield f"{len(value)}".encode(), b""
        for each in value:
            yield from parts(each)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield type(value).__name__.encode(), repr(value).encode()
    elif isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array_interface__"):  # also pictures
        array = np.ascontiguousarray(value)
        yield f"{array.dtype} {array.shape}".encode(), b"" if array.dtype.hasobject else array.tobytes()
    else:
        yield _kind(value).encode(), b""


# --- source files -----------------------------------------------------------------------------------------------------


def source_files(script: str) -> dict[str, str]:
    """Returns a digest of the script and of each module that it has imported from its own folder, by path in there."""
    path = Path(script).resolve()
    files = {path, *(file for file in map(_file_of, list(sys.modules.values())) if path.parent in file.parents)}
    own = sorted(each for each in files if "site-packages" not in each.parts and each.is_file())
    return {str(each.relative_to(path.parent)): hashlib.sha256(each.read_bytes()).hexdigest() for each in own}


def _file_of(module: object) -> Path:
    return Path(getattr(module, "__file__", None) or "/").resolve()
