"""The transport over links."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from holdfast.control.messages import Here, Peer
from holdfast.core.ids import WorkerId
from holdfast.core.summing import Contribution
from holdfast.core.tensorspec import TensorSpec
from holdfast.devices.device import HOST
from holdfast.devices.fresh import Memory, host_memory
from holdfast.errors import InternalError
from holdfast.runtime.tensors import num_bytes, torch_dtype
from holdfast.runtime.transport.framing import body_of
from holdfast.runtime.transport.links.allowance import Allowance
from holdfast.runtime.transport.links.connections import ConnectionManager
from holdfast.runtime.transport.links.inbox import Inbox, Incoming
from holdfast.runtime.transport.links.slices import Slices
from holdfast.runtime.transport.links.sums import Summing
from holdfast.runtime.transport.links.wire import MESSAGES, NO_STEP, Kind, Label, label_of
from holdfast.runtime.transport.port import Expected, MessageKey, ReadySum, Sent, SumHandle, SumKey

if TYPE_CHECKING:
    from holdfast.runtime.transport.links.carrier import Carrying

__all__ = ["LinkTransport"]

_NOTHING = memoryview(b"")
_MOST_AHEAD = 64
"""With how many workers a link is made before there is anything to say."""


class LinkTransport:
    """See :class:`holdfast.runtime.transport.port.Transport`.

    Args:
        worker: who we are.
        host: the address that we listen on.
        silent_s: see ConnectionManager.
        sealed: see ConnectionManager.
        carrying: see ConnectionManager.
        memory: of the messages and sums that come.
    """

    def __init__(
        self,
        worker: WorkerId,
        *,
        host: str = "127.0.0.1",
        silent_s: float = 1.0,
        sealed: bool = False,
        carrying: Carrying | None = None,
        memory: Memory = host_memory,
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._device = HOST if carrying is None else carrying.device
        self._inbox = Inbox(memory)
        self._connections = ConnectionManager(
            worker, self._inbox, host=host, silent_s=silent_s, sealed=sealed, carrying=carrying
        )
        self._generation = 0
        self._peers: frozenset[WorkerId] = frozenset()

    @property
    def here(self) -> Here:
        """What others have to know to find us."""
        return self._connections.here

    @property
    def slices(self) -> Slices:
        """What goes over the same links when nothing else does."""
        return self._connections.slices

    def meet(self, peers: Iterable[Peer]) -> None:
        """Learns who the other workers' processes are now, in any thread."""
        self._connections.meet(peers)

    def build(
        self,
        generation: int,
        groups: tuple[tuple[WorkerId, ...], ...],
        neighbours: tuple[WorkerId, ...] = (),
        *,
        step: int | None = None,
        expected: Expected | None = None,
    ) -> None:
        """See Transport.build: says to all others of our groups that we have come, and waits for theirs."""
        self._inbox.enter(generation, Allowance.of(self._worker, generation, expected))
        self._generation = generation
        ours = (group for group in groups if self._worker in group)
        self._peers = frozenset(worker for group in ours for worker in group) - {self._worker}
        for peer in sorted(self._peers):
            self._connections.send(peer, Label(generation, NO_STEP if step is None else step, Kind.ENTER), _NOTHING)
        self._inbox.wait_for(generation, step, self._peers)
        self._connections.warm_up(neighbours[:_MOST_AHEAD])

    def send(self, key: MessageKey, peer: WorkerId, tensor: torch.Tensor) -> None:
        """See Transport.send: what cannot be sent at once is copied."""
        self._check(key.generation, peer)
        self._inbox.check(key.generation, (peer,))
        self._connections.send(peer, label_of(key), body_of(tensor), lent=tensor.is_cpu)

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> _Receiving:
        """See Transport.receive."""
        self._check(key.generation, peer)
        size, label = num_bytes(spec), label_of(key)
        incoming = self._inbox.expect(peer, label, None, size=size)
        return _Receiving(self._inbox, peer, label, incoming, spec)

    def all_reduce(self, key: SumKey, contribution: Contribution) -> SumHandle:
        """See Transport.all_reduce."""
        if len(key.reduction.workers) == 1:
            return ReadySum(contribution)
        self._check(key.generation, *(peer for peer in key.reduction.workers if peer != self._worker))
        summing = Summing(
            key, self._worker, contribution, self._inbox, self._connections.send, self._memory, self._device
        )
        summing.start()
        return summing

    def straight(self, peers: Iterable[WorkerId], size: int) -> bool:
        """See Transport.straight."""
        return self._connections.straight((peer for peer in peers if peer != self._worker), size)

    def _check(self, generation: int, *peers: WorkerId) -> None:
        self._inbox.check(generation)
        if strangers := set(peers) - self._peers:
            raise InternalError(f"worker {self._worker}: not connected with {min(strangers)} in this generation")

    def hand_on(self) -> None:
        """See Transport.hand_on: all that is given is sent at once."""

    def drain(self) -> None:
        """See Transport.drain."""
        self._inbox.wait(self._generation, partial(self._connections.busy, sorted(self._peers), self._generation))

    @property
    def sent(self) -> Sent:
        """See Transport.sent."""
        by_kind = self._connections.sent()
        sums = sum(by_kind[kind] for kind in (Kind.HEADER, Kind.PART, Kind.TOTAL, Kind.SUM))
        messages = sum(by_kind[kind] for kind in MESSAGES)
        state, carried = by_kind[Kind.SLICE], self._connections.carried
        return Sent(messages=messages, sums=sums, state=state, carried=carried)

    def abort(self, generation: int) -> None:
        """See Transport.abort."""
        self._inbox.abort(generation)
        self._connections.drop(generation)

    def close(self) -> None:
        """See Transport.close."""
        self._connections.close()


class _Receiving:
    def __init__(self, inbox: Inbox, peer: WorkerId, label: Label, incoming: Incoming, spec: TensorSpec) -> None:
        self._inbox, self._peer, self._label, self._incoming, self._spec = inbox, peer, label, incoming, spec

    def wait(self) -> torch.Tensor:
        return self._shaped(self._inbox.take(self._peer, self._label, self._incoming))

    def kept(self) -> torch.Tensor | None:
        data = self._incoming.data
        return self._shaped(data) if data is not None and self._incoming.complete and not self._incoming.wrong else None

    def _shaped(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(torch_dtype(self._spec)).view(self._spec.shape)
