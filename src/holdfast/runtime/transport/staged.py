"""A transport for what is in a device's memory, over one that carries what is in the host's.

What is sent waits on the host for its computation, and is copied; what has come is copied back. Sums are made on the
host. Votes, and whatever else the host reads, stay there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.tensorspec import TensorSpec
from holdfast.runtime.transport.around import TransportAround
from holdfast.runtime.transport.port import MessageHandle, MessageKey, SumHandle, SumKey, Transport

if TYPE_CHECKING:
    import torch

    from holdfast.devices.device import Device

__all__ = ["StagedTransport"]

_COMPUTED = (Payload.ACTIVATION, Payload.GRADIENT)


class StagedTransport(TransportAround):
    """See :class:`holdfast.runtime.transport.port.Transport`.

    Args:
        inner: what carries everything.
        device: where the tensors are that are sent and summed, and where those are to be that come.
    """

    def __init__(self, inner: Transport, device: Device) -> None:
        super().__init__(inner)
        self._device = device

    def send(self, key: MessageKey, peer: WorkerId, tensor: torch.Tensor) -> None:
        """See Transport.send."""
        super().send(key, peer, self._device.on_host(tensor))

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> MessageHandle:
        """See Transport.receive."""
        handle = super().receive(key, peer, spec)
        return _Received(handle, self._device) if key.payload in _COMPUTED else handle

    def all_reduce(self, key: SumKey, tensor: torch.Tensor) -> SumHandle:
        """See Transport.all_reduce."""
        return _Summed(super().all_reduce(key, self._device.on_host(tensor)), self._device)


@dataclass(frozen=True, slots=True)
class _Received:
    _handle: MessageHandle
    _device: Device

    def wait(self) -> torch.Tensor:
        return self._device.brought(self._handle.wait())

    def kept(self) -> torch.Tensor | None:
        return self._handle.kept()


@dataclass(frozen=True, slots=True)
class _Summed:
    _handle: SumHandle
    _device: Device

    @property
    def ready(self) -> bool:
        return self._handle.ready

    def wait(self) -> torch.Tensor:
        return self._device.brought(self._handle.wait())
