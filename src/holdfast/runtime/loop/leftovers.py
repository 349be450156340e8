"""Calls of ``torch.distributed`` that a script has left in from when torch's own launcher started it.

Holdfast connects the workers and shares out the items, so most of these calls have nothing left to do. Unmet, they
would wait for processes that never come, or fail with words about an environment that nobody has set. Each is met by
what is harmless, and says in one line, once, what becomes of it. What would be wrong without others, such as a sum over
all processes, is an error that says what to write instead.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import parallel
from torch.utils.data.distributed import DistributedSampler

from holdfast.errors import ConfigError

__all__ = ["meet_leftovers", "replace_imported"]

_STARTS = {
    "init_process_group": "does nothing: Holdfast connects the workers",
    "destroy_process_group": "does nothing: Holdfast ends the workers",
    "barrier": "does nothing: workers wait for one another between two steps only",
    "monitored_barrier": "does nothing: workers wait for one another between two steps only",
    "broadcast": "does nothing: all workers run the same script, from the same seed",
    "broadcast_object_list": "does nothing: all workers run the same script, from the same seed",
    "new_group": "makes none: Holdfast connects the workers",
}
"""What becomes of calls that return None, as those of torch do or may."""
_SUMS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
_MESSAGES = (
    "batch_isend_irecv",
    "irecv",
    "isend",
    "recv",
    "recv_object_list",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
)
_OURS = ("torch", "holdfast")
"""Packages whose modules keep the functions that they have imported."""

_Tell = Callable[[str], None]

_met: list[_Tell] = []
"""Who is told, of each line once; nobody until calls are met, then one."""


def meet_leftovers(say: Callable[[str], None], is_first: Callable[[], bool] = lambda: True) -> None:
    """Replaces public functions of ``torch.distributed``, and what scripts wrap models and datasets in.

    Also those that modules outside of torch have imported by name. For this process, to its end; a second call does
    nothing.

    Args:
        say: told what becomes of a call, in a line, once for each kind of call.
        is_first: whether this worker is the one that prints and saves.
    """
    if _met:
        return
    told = cache(say)
    _met.append(told)
    functions: dict[str, Callable[..., Any]] = {
        **{name: _nothing(name, what, told) for name, what in _STARTS.items()},
        **{name: _refused(name, "step.log(name, value) in an item, and step.logged[name] behind it") for name in _SUMS},
        **{name: _refused(name, "nothing of the kind: an item depends on no other worker") for name in _MESSAGES},
        **_identity(told, is_first),
    }
    replaced: dict[int, Any] = {}
    for name, function in functions.items():
        if (original := getattr(dist, name, None)) is not None:
            replaced[id(original)] = function
            setattr(dist, name, function)
    wrapper = _wrapper(told)
    replaced[id(parallel.DistributedDataParallel)] = wrapper
    parallel.DistributedDataParallel = parallel.distributed.DistributedDataParallel = wrapper  # type: ignore[misc, assignment]
    replace_imported(replaced)
    _sample_all(told)


def _nothing(name: str, what: str, told: _Tell) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> None:
        told(f"torch.distributed.{name} {what}")

    return call


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> None:
        raise ConfigError(
            f"torch.distributed.{name}: workers have no process group, since some of it may be lost at any time; "
            f"expected {instead}"
        )

    return call


def _identity(told: _Tell, is_first: Callable[[], bool]) -> dict[str, Callable[..., Any]]:
    """Who a process is told to be: one by itself, of which others that print and save nothing are copies."""

    def get_rank(*args: Any, **options: Any) -> int:
        told("torch.distributed.get_rank is 0 in the worker that prints and saves, hf.is_first, and 1 in all others")
        return 0 if is_first() else 1

    def get_world_size(*args: Any, **options: Any) -> int:
        told("torch.distributed.get_world_size is 1: what a script says holds for the whole step, whoever runs it")
        return 1

    def is_initialized() -> bool:
        """Only scripts believe it, who guard `get_rank` by it; torch's own modules would use the process group."""
        return _is_asked_by_script()

    def get_backend(*args: Any, **options: Any) -> str:
        return "gloo"

    return {
        "get_rank": get_rank,
        "get_node_local_rank": get_rank,
        "get_world_size": get_world_size,
        "is_initialized": is_initialized,
        "get_backend": get_backend,
    }


def _wrapper(told: _Tell) -> type:
    class DistributedDataParallel:
        """Returns the model that it is given, which can still be reached as ``model.module``."""

        def __new__(cls, module: nn.Module, *args: Any, **options: Any) -> nn.Module:  # type: ignore[misc]
            told("DistributedDataParallel(model) is the model itself, as is model.module: hf.prepare sums gradients")
            more = {"module": module, "no_sync": _no_sync}
            for name, value in more.items():
                if not hasattr(module, name):
                    module.__dict__[name] = value  # not as a submodule, which would be one more name in its state
            return module

    return DistributedDataParallel


def _no_sync() -> contextlib.AbstractContextManager[None]:
    """As a model has it behind ``DDP(model)``; of this module, as it is saved with the model."""
    for told in _met:
        told("model.no_sync() does nothing: gradients are summed once, when a step's items are over")
    return contextlib.nullcontext()


def _sample_all(told: _Tell) -> None:
    make, set_epoch = DistributedSampler.__init__, DistributedSampler.set_epoch

    def __init__(
        self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *args: Any, **options: Any
    ) -> None:
        told("DistributedSampler draws from all samples: hf.steps shares a step's items out among the workers")
        make(self, dataset, 1, 0, *args, **options)

    def of_epoch(self: Any, epoch: int) -> None:
        if _is_asked_by_script():
            told("DistributedSampler.set_epoch goes for nothing: hf.steps sets each epoch before it reads it")
        set_epoch(self, epoch)

    DistributedSampler.__init__ = __init__  # type: ignore[method-assign]
    DistributedSampler.set_epoch = of_epoch  # type: ignore[method-assign]


def replace_imported(replaced: dict[int, Any]) -> None:
    """Replaces what modules have imported by name: ``replaced`` are the replacements, by the identity of what was."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict and not _is_ours(str(names.get("__name__", ""))):
            for name, value in list(names.items()):
                if id(value) in replaced:
                    names[name] = replaced[id(value)]


def _is_asked_by_script() -> bool:
    """Whether who calls the function that asks this is neither torch nor Holdfast."""
    return not _is_ours(sys._getframe(2).f_globals.get("__name__", ""))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in _OURS
