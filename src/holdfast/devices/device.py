"""One value for what a worker computes on, so that nothing else asks which kind it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from holdfast.devices.fresh import host_memory
from holdfast.devices.stamps import AtOnce

if TYPE_CHECKING:
    from holdfast.devices.pairs import MakeGroup

__all__ = ["HOST", "Device", "Host", "Mark", "Outgoing"]


class Mark(Protocol):
    """It has passed when all is done that was queued before it. torch's events are such."""

    def query(self) -> bool:
        """Whether it has passed."""

    def synchronize(self) -> None:
        """Waits until it has passed."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor that is to be sent.

    Attributes:
        tensor: in the host's memory, or where it was computed; of any content until the mark has passed.
        mark: behind what computes or copies it; None: it is there.
    """

    tensor: Tensor
    mark: Mark | None = None

    @property
    def ready(self) -> bool:
        """Whether it is there."""
        return self.mark is None or self.mark.query()

    def wait(self) -> Tensor:
        """Waits until it is there, and returns it."""
        if self.mark is not None:
            self.mark.synchronize()
        return self.tensor


class Device(ABC):
    """What a worker computes on.

    Attributes:
        torch: its name for torch.
        apart: whether it has a memory of its own: what is sent or summed with others is copied out of it.
    """

    torch: torch.device
    apart: bool = True

    @abstractmethod
    def settle(self) -> None:
        """Has operations give the same bits every time, before the first one of the process."""

    @abstractmethod
    def seed(self, value: int) -> None:
        """Seeds the generators that an operation may draw from: the host's, and its own."""

    @abstractmethod
    def memory(self, size: int) -> Tensor:
        """Returns so many bytes of the host's memory, of any content, for what comes from the device or goes there."""

    @abstractmethod
    def outgoing(self, tensor: Tensor) -> Outgoing:
        """Has the tensor copied to the host's memory once it is computed; itself where it is there.

        Nobody changes the one that is given until it is copied.
        """

    @abstractmethod
    def brought(self, tensor: Tensor) -> Tensor:
        """Returns the tensor in the device's memory; itself where it is there. Nobody changes the one that is given."""

    @abstractmethod
    def computed(self, tensor: Tensor) -> Outgoing:
        """Returns the tensor as it is, once it is computed, for what is done beside the computation.

        Nobody changes it any more.
        """

    @abstractmethod
    def beside(self) -> AbstractContextManager[object]:
        """Within it, this thread queues beside the computation: what is exchanged with others, and summed with theirs.

        In order with what any other thread queues so, and behind what was ``computed`` and waited for.
        """

    @abstractmethod
    def joined(self, tensor: Tensor) -> Tensor:
        """Returns a tensor that was made beside the computation, which goes on behind that."""

    @abstractmethod
    def pair(self, host: str) -> MakeGroup:
        """Returns what makes groups of two that carry tensors from one such memory to another.

        Args:
            host: an address of this machine, for connections.
        """

    @abstractmethod
    def check_stream(self) -> None:
        """Checks that what this thread queues is computed behind all else of the process.

        Raises:
            ConfigError: it is not: it queues on a stream of its own.
        """

    @abstractmethod
    def keep_pace(self) -> None:
        """Called behind each operation: waits until no more than a few are queued.

        So whoever watches how a worker gets on sees what its device does, and not how far ahead of it the host is.
        """

    @abstractmethod
    def stamp(self, now: float) -> Any:
        """See Stamps.stamp."""

    @abstractmethod
    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """See Stamps.seconds."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """What two must have in common to compute the same bits, in words."""


class Host(AtOnce, Device):
    """The host's processor: its memory is where messages come and go, and its operations are repeatable as they are."""

    apart = False

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def settle(self) -> None:
        """Nothing needs to be set."""

    def seed(self, value: int) -> None:
        """See Device.seed."""
        torch.default_generator.manual_seed(value)

    def memory(self, size: int) -> Tensor:
        """See Device.memory."""
        return host_memory(size)

    def outgoing(self, tensor: Tensor) -> Outgoing:
        """See Device.outgoing."""
        return Outgoing(tensor)

    def brought(self, tensor: Tensor) -> Tensor:
        """See Device.brought."""
        return tensor

    def computed(self, tensor: Tensor) -> Outgoing:
        """See Device.computed."""
        return Outgoing(tensor)

    def beside(self) -> AbstractContextManager[object]:
        """Nothing is queued."""
        return nullcontext()

    def joined(self, tensor: Tensor) -> Tensor:
        """See Device.joined."""
        return tensor

    def pair(self, host: str) -> MakeGroup:
        """See Device.pair: by gloo."""
        from holdfast.devices.pairs import gloo_pair

        return gloo_pair(host)

    def check_stream(self) -> None:
        """There is one."""

    def keep_pace(self) -> None:
        """An operation is done when it returns."""

    @property
    def identity(self) -> str:
        """See Device.identity."""
        return "cpu"


HOST = Host()
"""There is one, and nothing of it changes."""
