"""A transport for what is in a device's memory, over one that carries what is in the host's.

What is sent, or summed with others, waits on the host for its computation, and is copied. What comes, and sums, are in
the host's memory: who computes with them brings them to the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.core.ids import WorkerId
from holdfast.core.summing import Contribution
from holdfast.runtime.transport.around import TransportAround
from holdfast.runtime.transport.port import MessageKey, SumHandle, SumKey, Transport

if TYPE_CHECKING:
    import torch

    from holdfast.devices.device import Device

__all__ = ["StagedTransport"]


class StagedTransport(TransportAround):
    """See :class:`holdfast.runtime.transport.port.Transport`.

    Args:
        inner: what carries everything.
        device: where the tensors are that are sent and summed.
    """

    def __init__(self, inner: Transport, device: Device) -> None:
        super().__init__(inner)
        self._device = device

    def send(self, key: MessageKey, peer: WorkerId, tensor: torch.Tensor) -> None:
        """See Transport.send."""
        super().send(key, peer, self._device.on_host(tensor))

    def all_reduce(self, key: SumKey, contribution: Contribution) -> SumHandle:
        """See Transport.all_reduce; the sum of one worker alone stays where it is."""
        if len(key.reduction.workers) > 1:
            contribution = replace(contribution, parts=tuple(map(self._device.on_host, contribution.parts)))
        return super().all_reduce(key, contribution)
