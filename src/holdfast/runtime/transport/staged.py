"""A transport for what is in a device's memory, over one that carries what is in the host's.

What is sent, or summed with others, is copied to the host once it is computed, while the device goes on; it is handed
on when the host is here again, at the latest before it waits. What comes, and sums, are in the host's memory: who
computes with them brings them to the device. What the inner one takes straight from the device is not copied, but
handed on like all else; what comes so is beside the computation, and is joined with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.core.ids import WorkerId
from holdfast.core.summing import Contribution, Total
from holdfast.devices.device import Outgoing
from holdfast.errors import StaleGeneration
from holdfast.runtime.transport.around import TransportAround
from holdfast.runtime.transport.port import MessageHandle, MessageKey, SumHandle, SumKey, Transport

if TYPE_CHECKING:
    import torch

    from holdfast.core.tensorspec import TensorSpec
    from holdfast.devices.device import Device

__all__ = ["StagedTransport"]


class StagedTransport(TransportAround):
    """See :class:`holdfast.runtime.transport.port.Transport`; nobody changes what is sent, even once ``send`` returns.

    Args:
        inner: what carries everything.
        device: where the tensors are that are sent and summed.
    """

    def __init__(self, inner: Transport, device: Device) -> None:
        super().__init__(inner)
        self._device = device
        self._staged: deque[_Staged] = deque()  # what is not handed on yet, in order
        self._aborted = 0  # by whoever aborts

    def send(self, key: MessageKey, peer: WorkerId, tensor: torch.Tensor) -> None:
        """See Transport.send."""
        copy = self._outgoing(tensor, (peer,), tensor.nbytes)
        if copy.mark is None and self._staged:  # behind others, and whoever gave it may change it
            copy = Outgoing(tensor.clone())
        self._stage(key.generation, [copy], lambda here: self._inner.send(key, peer, *here))

    def _outgoing(self, tensor: torch.Tensor, peers: tuple[WorkerId, ...], size: int) -> Outgoing:
        straight = self._inner.straight(peers, size)
        return self._device.computed(tensor) if straight else self._device.outgoing(tensor)

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> MessageHandle:
        """See Transport.receive."""
        return _Receiving(super().receive(key, peer, spec), self._device)

    def all_reduce(self, key: SumKey, contribution: Contribution) -> SumHandle:
        """See Transport.all_reduce; the sum of one worker alone stays where it is."""
        if len(key.reduction.workers) == 1:
            return super().all_reduce(key, contribution)
        summing = _Summing(self, key.generation)

        def start(parts: list[torch.Tensor]) -> None:
            summing.handle = self._inner.all_reduce(key, replace(contribution, parts=tuple(parts)))

        workers = key.reduction.workers
        copies = [self._outgoing(part, workers, part.nbytes) for part in contribution.parts]
        self._stage(key.generation, copies, start)
        return summing

    def hand_on(self) -> None:
        """See Transport.hand_on: waits until all is computed and copied."""
        self._hand_on(waits=True)
        super().hand_on()

    def abort(self, generation: int) -> None:
        """See Transport.abort."""
        self._aborted = max(self._aborted, generation)
        super().abort(generation)

    def _stage(self, generation: int, copies: list[Outgoing], then: Callable[[list[torch.Tensor]], object]) -> None:
        self._staged.append(_Staged(generation, copies, then))
        self._hand_on(waits=False)

    def _hand_on(self, *, waits: bool) -> None:
        """Hands on what is there, in order; what is of a generation that is over is dropped."""
        while self._staged:
            staged = self._staged[0]
            is_over = staged.generation <= self._aborted
            if not (waits or is_over or all(copy.ready for copy in staged.copies)):
                return
            self._staged.popleft()
            if not is_over:
                self._begin(staged)

    def _begin(self, staged: _Staged) -> None:
        """Hands something on; if that fails, nothing else of its generation is of use to anybody."""
        try:
            staged.then([copy.wait() for copy in staged.copies])
        except BaseException:
            self._staged.clear()
            raise


@dataclass(frozen=True, slots=True)
class _Staged:
    """What is yet to be computed or copied, and what is done with it then."""

    generation: int
    copies: list[Outgoing]
    then: Callable[[list[torch.Tensor]], object]


@dataclass(frozen=True, slots=True)
class _Receiving:
    handle: MessageHandle
    device: Device

    def wait(self) -> torch.Tensor:
        """See MessageHandle."""
        return self.device.joined(self.handle.wait())

    def kept(self) -> torch.Tensor | None:
        """See MessageHandle."""
        found = self.handle.kept()
        return None if found is None else self.device.joined(found)


class _Summing:
    def __init__(self, transport: StagedTransport, generation: int) -> None:
        self._transport, self._generation = transport, generation
        self.handle: SumHandle | None = None  # once it has begun

    @property
    def ready(self) -> bool:
        """See SumHandle."""
        self._transport._hand_on(waits=False)
        return self.handle is not None and self.handle.ready

    def wait(self) -> Total:
        """See SumHandle."""
        if self.handle is None:
            self._transport.hand_on()
        if self.handle is None:
            raise StaleGeneration(self._generation)
        total = self.handle.wait()
        return replace(total, total=self._transport._device.joined(total.total))
