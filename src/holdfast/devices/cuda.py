"""A GPU: what has to be set so that it computes the same bits every time, and what it is."""

from __future__ import annotations

import os
from collections import deque

import torch
from torch import Tensor

from holdfast.devices.device import Device
from holdfast.errors import ConfigError

__all__ = ["Cuda", "shown_alone", "visible"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")
_AHEAD = 2
"""Operations that may be queued behind the one that runs: calls take less time than they do."""


class Cuda(Device):
    """One GPU, by its number among those that the process may see.

    Operations are queued on one stream, in the order in which they are called, by all threads of the process; whoever
    reads a result on the host waits for it.

    Args:
        number: of the GPU.

    Raises:
        ConfigError: torch sees no such GPU.
    """

    def __init__(self, number: int = 0) -> None:
        found = torch.cuda.device_count()
        if number >= found:
            raise ConfigError(f"there is no GPU cuda:{number}: {_seen(found)}; expected cpu, or one that is there")
        self.torch = torch.device("cuda", number)
        self._marks: deque[torch.cuda.Event] = deque()  # behind the operations that are queued
        torch.cuda.set_device(self.torch)

    @classmethod
    def alone(cls, number: int) -> Cuda:
        """Returns a GPU that is the only one which this process sees: ``cuda``, in every thread and library.

        Raises:
            ConfigError: torch sees no such GPU.
        """
        os.environ[_VISIBLE] = shown_alone(number, os.environ.get(_VISIBLE))
        return cls()

    def settle(self) -> None:
        """See Device.settle; what no setting makes repeatable raises in the operation, which names itself.

        TF32 and the like are as the job's own code leaves them: they round, but alike every time.

        Raises:
            ConfigError: the environment says otherwise.
        """
        workspace = os.environ.setdefault(_WORKSPACE, _REPEATABLE[0])
        if workspace not in _REPEATABLE:
            raise ConfigError(
                f"{_WORKSPACE}={workspace}: matrix products would not be repeatable; expected {_REPEATABLE[0]}, or that"
                " it is not set"
            )
        torch.use_deterministic_algorithms(True)  # attention's backward pass, too: it has no other switch
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False

    def seed(self, value: int) -> None:
        """See Device.seed."""
        torch.default_generator.manual_seed(value)
        torch.cuda.default_generators[self.torch.index].manual_seed(value)

    def memory(self, size: int) -> Tensor:
        """See Device.memory: pinned, which is copied four to forty times as fast; torch keeps what was once pinned."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def on_host(self, tensor: Tensor) -> Tensor:
        """See Device.on_host: waits for the copy, and with it for all that was queued before."""
        if not tensor.is_cuda:
            return tensor
        dense = tensor.detach().contiguous()
        here = self.memory(dense.nbytes).view(dense.dtype).view(dense.shape)
        here.copy_(dense, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return here

    def brought(self, tensor: Tensor) -> Tensor:
        """See Device.brought: torch keeps pinned memory from being used again until it is copied."""
        return tensor.to(self.torch, non_blocking=True)

    def keep_pace(self) -> None:
        """See Device.keep_pace."""
        self._marks.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._marks[-1].record()
        if len(self._marks) > _AHEAD:
            self._marks.popleft().synchronize()

    @property
    def identity(self) -> str:
        """See Device.identity."""
        of = torch.cuda.get_device_properties(self.torch)
        kind = f"{of.name}, {of.multi_processor_count} multiprocessors"
        return f"{kind}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {_cudnn()}"


def _cudnn() -> object:
    return torch.backends.cudnn.version()  # type: ignore[no-untyped-call]


def shown_alone(number: int, shown: str | None) -> str:
    """Returns how the environment shows one GPU alone.

    Args:
        number: of the GPU among those that are visible now.
        shown: which these are, as ``CUDA_VISIBLE_DEVICES`` says; None: all.

    Raises:
        ConfigError: that many are not visible.
    """
    if shown is None:
        return str(number)
    names = shown.split(",") if shown else []
    if number >= len(names):
        raise ConfigError(f"there is no GPU cuda:{number}: {len(names)} are visible, {_VISIBLE}={shown}")
    return names[number]


def visible() -> tuple[str, ...]:
    """Returns the names of the GPUs that torch sees, by number; asks the driver: not where others are forked from."""
    return tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))


def _seen(found: int) -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    shown = os.environ.get(_VISIBLE)
    return f"torch sees {found} GPUs" + ("" if shown is None else f" with {_VISIBLE}={shown}")
