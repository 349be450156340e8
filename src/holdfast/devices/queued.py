"""A device whose operations are queued on streams, and what keeps those of several streams in order."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from holdfast.devices.device import Device, Mark, Outgoing
from holdfast.errors import ConfigError

__all__ = ["Queued", "Stream"]

_AHEAD = 2
"""Operations that may be queued behind the one that runs: calls take less time than they do."""


class Stream(Protocol):
    """Operations that run one after the other. torch's streams are such."""

    def wait_event(self, event: Any) -> None:
        """Has all that is queued from now on run behind a mark."""


class Queued(Device):
    """Four streams: one computes, one copies to the host's memory, one from there, one is for what others bring.

    Operations are queued by whoever calls them, in any thread, on the stream that computes. A copy to the host runs
    behind what is queued at that moment, while what is queued later is computed; what is queued behind a copy from the
    host waits for it, and the copy for nothing. What goes to other devices and comes from there, and sums with
    theirs, are beside the computation: no stream that computes ever waits for another worker.

    Args:
        compute: the stream that computes: that on which every thread queues unless it says otherwise.
        out: the stream that copies to the host.
        back: the stream that copies from there.
        beside: the stream for what is exchanged with other devices, and summed with theirs.
    """

    def __init__(self, compute: Stream, out: Stream, back: Stream, beside: Stream) -> None:
        self._compute, self._out, self._back, self._beside = compute, out, back, beside
        self._pace: deque[Mark] = deque()  # behind the operations that are queued

    @property
    @abstractmethod
    def _current(self) -> Stream:
        """The stream on which this thread queues."""

    @abstractmethod
    def _mark(self, stream: Stream) -> Mark:
        """Sets a mark behind all that is on a stream."""

    @abstractmethod
    def _on(self, stream: Stream) -> AbstractContextManager[object]:
        """Has this thread queue on another stream meanwhile."""

    @abstractmethod
    def _hold(self, tensor: Tensor, stream: Stream) -> None:
        """Keeps a tensor's memory, once it is freed, until that stream has done what is queued there now."""

    @abstractmethod
    def _timed(self) -> Mark:
        """Sets a mark on the stream that computes, of which can be told when it has passed."""

    @abstractmethod
    def _between_s(self, first: Mark, last: Mark) -> float:
        """How many seconds have gone by between two such marks, which have passed."""

    def outgoing(self, tensor: Tensor) -> Outgoing:
        """See Device.outgoing."""
        if tensor.device != self.torch:
            return Outgoing(tensor)
        dense = tensor.detach().contiguous()
        here = self.memory(dense.nbytes).view(dense.dtype).view(dense.shape)
        self._out.wait_event(self._mark(self._compute))
        with self._on(self._out):
            here.copy_(dense, non_blocking=True)
        self._hold(dense, self._out)
        return Outgoing(here, self._mark(self._out))

    def brought(self, tensor: Tensor) -> Tensor:
        """See Device.brought: torch keeps pinned memory from being used again until it is copied."""
        if tensor.device == self.torch:
            return tensor
        with self._on(self._back):
            there = tensor.to(self.torch, non_blocking=True)
        self._compute.wait_event(self._mark(self._back))
        self._hold(there, self._compute)
        return there

    def computed(self, tensor: Tensor) -> Outgoing:
        """See Device.computed: once the host has waited, what is beside the computation need not."""
        if tensor.device != self.torch:
            return Outgoing(tensor)
        dense = tensor.detach().contiguous()
        self._hold(dense, self._beside)
        return Outgoing(dense, _Behind(self._mark(self._compute), self._beside))

    def beside(self) -> AbstractContextManager[object]:
        """See Device.beside."""
        return self._on(self._beside)

    def joined(self, tensor: Tensor) -> Tensor:
        """See Device.joined; one in the host's memory is as it is."""
        if tensor.device == self.torch:
            self._compute.wait_event(self._mark(self._beside))
            self._hold(tensor, self._compute)
        return tensor

    def check_stream(self) -> None:
        """See Device.check_stream."""
        if self._current != self._compute:
            raise ConfigError(
                "an item ended on a stream of the script's own, and its gradients are summed on torch's default one; "
                "expected that what is run on another stream ends within the item: with torch.cuda.stream(...): around "
                "a part of it, and torch.cuda.current_stream().wait_stream(...) behind that"
            )

    def keep_pace(self) -> None:
        """See Device.keep_pace."""
        self._pace.append(self._mark(self._compute))
        if len(self._pace) > _AHEAD:
            self._pace.popleft().synchronize()

    def stamp(self, now: float) -> tuple[float, Mark]:
        """See Device.stamp."""
        return now, self._timed()

    def seconds(self, stamps: Sequence[tuple[float, Mark]]) -> list[float]:
        """See Device.seconds: no mark passes before it is set, and one that finds nothing queued does at once."""
        if not stamps:
            return []
        stamps[-1][1].synchronize()
        since = [self._between_s(stamps[0][1], mark) for _, mark in stamps]
        first = max(now - later for (now, _), later in zip(stamps, since, strict=True))
        return [first + later for later in since]


@dataclass(frozen=True, slots=True)
class _Behind:
    """A mark; once it has passed, what is queued on a stream is behind it without delay."""

    mark: Mark
    stream: Stream

    def query(self) -> bool:
        """See Mark."""
        return self.mark.query()

    def synchronize(self) -> None:
        """See Mark."""
        self.mark.synchronize()
        self.stream.wait_event(self.mark)
