"""A transport around another one: whoever changes one thing of it says that thing only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.core.ids import WorkerId
from holdfast.core.summing import Contribution
from holdfast.core.tensorspec import TensorSpec
from holdfast.runtime.transport.port import Expected, MessageHandle, MessageKey, Sent, SumHandle, SumKey, Transport

if TYPE_CHECKING:
    import torch

__all__ = ["TransportAround"]


class TransportAround:
    """See :class:`holdfast.runtime.transport.port.Transport`; what it is asked for, the inner one does.

    Args:
        inner: what carries everything.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def build(
        self,
        generation: int,
        groups: tuple[tuple[WorkerId, ...], ...],
        neighbours: tuple[WorkerId, ...] = (),
        *,
        step: int | None = None,
        expected: Expected | None = None,
    ) -> None:
        """See Transport.build."""
        self._inner.build(generation, groups, neighbours, step=step, expected=expected)

    def send(self, key: MessageKey, peer: WorkerId, tensor: torch.Tensor) -> None:
        """See Transport.send."""
        self._inner.send(key, peer, tensor)

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> MessageHandle:
        """See Transport.receive."""
        return self._inner.receive(key, peer, spec)

    def all_reduce(self, key: SumKey, contribution: Contribution) -> SumHandle:
        """See Transport.all_reduce."""
        return self._inner.all_reduce(key, contribution)

    def hand_on(self) -> None:
        """See Transport.hand_on."""
        self._inner.hand_on()

    def straight(self, peers: Iterable[WorkerId], size: int) -> bool:
        """See Transport.straight."""
        return self._inner.straight(peers, size)

    def drain(self) -> None:
        """See Transport.drain."""
        self._inner.drain()

    @property
    def sent(self) -> Sent | None:
        """See Transport.sent."""
        return self._inner.sent

    def abort(self, generation: int) -> None:
        """See Transport.abort."""
        self._inner.abort(generation)

    def close(self) -> None:
        """See Transport.close."""
        self._inner.close()
