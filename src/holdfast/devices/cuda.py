"""A GPU: what has to be set so that it computes the same bits every time, and what it is."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from holdfast.devices.device import Mark
from holdfast.devices.queued import Queued, Stream
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.devices.pairs import MakeGroup

__all__ = ["Cuda", "shown_alone", "visible"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")


class Cuda(Queued):
    """One GPU, by its number among those that the process may see; whoever asks for a number waits for it.

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
        torch.cuda.set_device(self.torch)
        default = torch.cuda.default_stream(self.torch)
        out, back, beside = (_stream(self.torch) for _ in range(3))
        super().__init__(compute=default, out=out, back=back, beside=beside)

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

    def pair(self, host: str) -> MakeGroup:
        """See Device.pair: by NCCL, which finds its own addresses."""
        from holdfast.devices.nccl import nccl_pair

        return nccl_pair(self.torch)

    @property
    def _current(self) -> Stream:
        return torch.cuda.current_stream(self.torch)

    def _mark(self, stream: Stream) -> Mark:
        """The host sleeps while it waits: links and loaders need its processors."""
        return _recorded(torch.cuda.Event(blocking=True), stream)  # type: ignore[no-untyped-call]

    def _on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast("torch.cuda.Stream", stream))

    def _hold(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(cast("torch.cuda.Stream", stream))

    def _timed(self) -> Mark:
        return _recorded(torch.cuda.Event(enable_timing=True, blocking=True), self._compute)  # type: ignore[no-untyped-call]

    def _between_s(self, first: Mark, last: Mark) -> float:
        return float(cast("torch.cuda.Event", first).elapsed_time(cast("torch.cuda.Event", last))) * 1e-3

    @property
    def identity(self) -> str:
        """See Device.identity."""
        of = torch.cuda.get_device_properties(self.torch)
        kind = f"{of.name}, {of.multi_processor_count} multiprocessors"
        return f"{kind}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {_cudnn()}"


def _stream(device: torch.device) -> Stream:
    """A stream that no library is given as well: these take theirs from those without priority."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _recorded(event: torch.cuda.Event, stream: Stream) -> Mark:
    event.record(cast("torch.cuda.Stream", stream))
    return event


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
