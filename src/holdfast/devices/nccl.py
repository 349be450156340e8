"""Two GPUs that exchange tensors by NCCL, past the host's memory. Never run: no machine with two GPUs was at hand.

Each direction has a communicator of its own: of one, what is to be received would wait behind what is to leave, and
two that send to each other would wait for ever.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist

from holdfast.devices.pairs import MakeGroup, Work
from holdfast.errors import HoldfastError

__all__ = ["nccl_pair"]

_QUIET = ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING", "PROPAGATE_ERROR")
"""By these torch would end a process because another one is gone: links see that, and have the group aborted."""
_MOST_BLOCKS = 2
"""So many multiprocessors a message may take from the computation."""


def nccl_pair(device: torch.device) -> MakeGroup:
    """Returns what makes groups of a GPU's memory."""
    for name in _QUIET:
        os.environ.setdefault(f"TORCH_NCCL_{name}", "0")
    return lambda store, rank, limit_s: _Nccl(device, store, rank, limit_s)


class _Nccl:
    """See Group. A communicator is made by its first message, at both ends at once, while the host waits."""

    def __init__(self, device: torch.device, store: Any, rank: int, limit_s: float) -> None:
        self._rank, self._aborted = rank, Event()
        self._ways = [_one_way(_named(str(sender), store), rank, limit_s) for sender in (0, 1)]
        self._out, self._in = _stream(device), _stream(device)
        first = torch.zeros(1, device=device)
        for sender in (0, 1):
            (self.send if sender == rank else self.recv)(first).wait()

    def send(self, tensor: torch.Tensor) -> Work:
        """See Group."""
        return _Waited(self._ways[self._rank].send([tensor], 1 - self._rank, 0), self._out, self._aborted)

    def recv(self, tensor: torch.Tensor) -> Work:
        """See Group."""
        return _Waited(self._ways[1 - self._rank].recv([tensor], 1 - self._rank, 0), self._in, self._aborted)

    def abort(self) -> None:
        """See Group."""
        self._aborted.set()
        for way in self._ways:
            way.abort()


def _named(name: str, store: Any) -> Any:
    """The same with keys of their own."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _one_way(store: Any, rank: int, limit_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=limit_s)
    options.config.max_ctas = _MOST_BLOCKS
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Waited:
    """A work of torch, for which nothing that computes waits: a stream of its own does, and the host for that."""

    work: Any
    stream: torch.cuda.Stream
    aborted: Event

    def wait(self) -> None:
        """See Work."""
        behind = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            self.work.wait()
            behind.record()
        behind.synchronize()
        if self.aborted.is_set():  # before this had come to its end, as far as anybody knows
            raise HoldfastError("the group was aborted")
