"""What two workers may have between them besides their link: a group of torch that carries tensors of one memory."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Group", "MakeGroup", "Work", "gloo_pair"]

_LONG = timedelta(hours=1)
"""Who is gone breaks the connection, and who is stopped is for others to judge: this ends what nobody waits for."""


class Work(Protocol):
    """Something that a group does; torch's works are such."""

    def wait(self) -> Any:
        """Waits, on the host, until it is done; raises if it cannot be, or if the group was aborted meanwhile."""


class Group(Protocol):
    """Two workers, number 0 and number 1. Each direction is in order, and waits for nothing of the other one.

    What it is given is computed, or queued before on the stream that is beside the computation, on which it is called.
    """

    def send(self, tensor: torch.Tensor) -> Work:
        """Sends a tensor to the other one, which nobody changes until it has left."""

    def recv(self, tensor: torch.Tensor) -> Work:
        """Receives the next one into a tensor."""

    def abort(self) -> None:
        """The other one is gone, or the link to it: ends, in any thread, what waits for it on the device."""


class MakeGroup(Protocol):
    """Makes a group of two, and waits until both are there."""

    def __call__(self, store: Any, rank: int, limit_s: float) -> Group: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class _Patient:
    """A work of torch, which would else be given up after as long as a group may take to be built."""

    work: Any

    def wait(self) -> None:
        """See Work."""
        self.work.wait(_LONG)


class _Gloo:
    """Connections of the host, which break when the other end is gone."""

    def __init__(self, store: Any, rank: int, host: str, limit_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timedelta(seconds=limit_s), 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, options)
        self._other = 1 - rank

    def send(self, tensor: torch.Tensor) -> Work:
        """See Group."""
        return _Patient(self._group.send([tensor], self._other, 0))

    def recv(self, tensor: torch.Tensor) -> Work:
        """See Group."""
        return _Patient(self._group.recv([tensor], self._other, 0))

    def abort(self) -> None:
        """Nothing of it is on a device."""


def gloo_pair(host: str) -> MakeGroup:
    """Returns what makes groups of the host's memory, whose connections listen at an address of this machine."""
    return lambda store, rank, limit_s: _Gloo(store, rank, host, limit_s)
