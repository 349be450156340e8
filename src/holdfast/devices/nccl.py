"""Two GPUs that exchange tensors by NCCL, past the host's memory. Never run: no machine with two GPUs was at hand.

Each direction has a communicator of its own: of one, what is to be received would wait behind what is to leave, and
two that send to each other would wait for ever.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist

from holdfast.devices.pairs import MakeGroup
from holdfast.errors import ConfigError, HoldfastError

__all__ = ["nccl_pair"]

_QUIET = tuple(
    f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING", "PROPAGATE_ERROR")
)
"""By these torch would end a process because another one is gone: links see that, and have the group aborted."""
_LOOK_S = 200e-6
"""How often it is looked whether a work is done. No stream waits for one: torch has 32, and more groups would share."""
_MOST_BLOCKS = 2
"""So many multiprocessors a message may take from the computation."""


def nccl_pair(device: torch.device) -> MakeGroup:
    """Returns what makes groups of a GPU's memory.

    Raises:
        ConfigError: the environment has torch judge groups, too.
    """
    for name in _QUIET:
        if (said := os.environ.setdefault(name, "0")) != "0":
            raise ConfigError(
                f"{name}={said}: torch would end a worker because another one is lost; expected it not set"
            )
    return lambda store, rank, limit_s: _Nccl(device, store, rank, limit_s)


class _Nccl:
    """See Group. A communicator is made by its first message, at both ends at once, while the host waits.

    Raises:
        HoldfastError: the first messages have not come within ``limit_s``.
    """

    def __init__(self, device: torch.device, store: Any, rank: int, limit_s: float) -> None:
        self._rank, self._aborted = rank, Event()
        self._ways = [_one_way(_named(str(sender), store), rank, limit_s) for sender in (0, 1)]
        first, until = torch.zeros(1, device=device), time.monotonic() + limit_s
        for sender in (0, 1):
            try:
                (self.send if sender == rank else self.recv)(first).wait(until)
            except Exception:
                self.abort()
                raise

    def send(self, tensor: torch.Tensor) -> _Watched:
        """See Group."""
        return _Watched(self._ways[self._rank].send([tensor], 1 - self._rank, 0), self._aborted)

    def recv(self, tensor: torch.Tensor) -> _Watched:
        """See Group."""
        return _Watched(self._ways[1 - self._rank].recv([tensor], 1 - self._rank, 0), self._aborted)

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


@dataclass(frozen=True, slots=True)
class _Watched:
    """A work of torch."""

    work: Any
    aborted: Event

    def wait(self, until: float = math.inf) -> None:
        """See Work.

        Args:
            until: when it is given up, by ``time.monotonic``.
        """
        while not self.work.is_completed():
            if time.monotonic() > until:
                raise HoldfastError("what was sent first has not come")
            time.sleep(_LOOK_S)
        self.work.wait()  # raises what it has failed by
        if self.aborted.is_set():  # which may have been what ended it
            raise HoldfastError("the group was aborted")
