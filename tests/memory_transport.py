"""The in-memory transport: what the workers of one process use instead of sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from holdfast.core.ids import WorkerId
from holdfast.core.summing import Contribution, Total
from holdfast.core.tensorspec import TensorSpec
from holdfast.data.items import spec_of
from holdfast.errors import InternalError, PeerLost, StaleGeneration
from holdfast.runtime.transport.port import Expected, MessageKey, SumKey
from holdfast.testing.mail import Group, Mail

__all__ = ["MemoryHub", "MemoryTransport"]

T = TypeVar("T")


class MemoryHub:
    """What connects the memory transports of one process: mail, the dead, and a lock."""

    def __init__(self) -> None:
        self.mail: Mail[torch.Tensor] = Mail()
        self.dead: set[WorkerId] = set()
        self.changed = threading.Condition()

    def kill(self, worker: WorkerId) -> None:
        """Whoever waits for ``worker`` from now on gets PeerLost."""
        with self.changed:
            self.dead.add(worker)
            self.changed.notify_all()


class MemoryTransport:
    """One worker's end of a hub, for threads; see :class:`holdfast.runtime.transport.port.Transport`."""

    def __init__(self, worker: WorkerId, hub: MemoryHub) -> None:
        self._worker = worker
        self._hub = hub
        self._generation = 0
        self._aborted = 0

    def build(
        self,
        generation: int,
        groups: tuple[Group, ...],
        neighbours: tuple[WorkerId, ...] = (),
        *,
        step: int | None = None,
        expected: Expected | None = None,
    ) -> None:
        """See Transport.build."""
        self._generation = generation
        members = {worker for group in groups if self._worker in group for worker in group}
        with self._hub.changed:
            self._refuse_stale()
            self._hub.mail.join(generation, groups, self._worker)
            self._hub.changed.notify_all()
        self._wait(members, lambda: self._hub.mail.complete(generation, groups, self._worker) or None)

    def send(self, key: MessageKey, peer: WorkerId, tensor: torch.Tensor) -> None:
        """See Transport.send."""
        with self._hub.changed:
            self._refuse_stale()
            self._hub.mail.post(key, self._worker, peer, tensor.clone())
            self._hub.changed.notify_all()

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> _Receiving:
        """See Transport.receive."""

        def take() -> torch.Tensor:
            tensor = self._wait({peer}, lambda: self._hub.mail.collect(key, peer, self._worker))
            if spec_of(tensor) != spec:
                raise InternalError(f"expected {spec} under {key} from {peer}, got {spec_of(tensor)}")
            return tensor

        return _Receiving(take, lambda: self._hub.mail.collect(key, peer, self._worker))

    def all_reduce(self, key: SumKey, contribution: Contribution) -> _Summing:
        """See Transport.all_reduce."""
        members = key.reduction.workers
        with self._hub.changed:
            self._refuse_stale()
            self._hub.mail.contribute(key, self._worker, contribution)
            self._hub.changed.notify_all()

        def total() -> Total | None:
            return self._hub.mail.total(key, members)

        return _Summing(lambda: self._wait(set(members), total), total)

    def straight(self, peers: Iterable[WorkerId], size: int) -> bool:
        """All is in the host's memory."""
        return False

    def hand_on(self) -> None:
        """See Transport.hand_on: all that is given is sent at once."""

    @property
    def sent(self) -> None:
        """See Transport.sent: nobody counts."""

    def abort(self, generation: int) -> None:
        """See Transport.abort."""
        with self._hub.changed:
            self._aborted = max(self._aborted, generation)
            self._hub.changed.notify_all()

    def close(self) -> None:
        """See Transport.close."""
        self.abort(self._generation)

    def _refuse_stale(self) -> None:
        if self._generation <= self._aborted:
            raise StaleGeneration(self._generation)

    def _wait(self, peers: set[WorkerId], ready: Callable[[], T | None]) -> T:
        with self._hub.changed:
            while True:
                self._refuse_stale()
                found = ready()
                if found is not None:
                    return found
                dead = peers & self._hub.dead
                if dead:
                    raise PeerLost(str(min(dead)), self._generation)
                self._hub.changed.wait()


class _Waiting:
    def __init__(self, take: Callable[[], Any]) -> None:
        self._take = take

    def wait(self) -> Any:
        return self._take()


class _Receiving(_Waiting):
    def __init__(self, take: Callable[[], torch.Tensor], kept: Callable[[], torch.Tensor | None]) -> None:
        super().__init__(take)
        self.kept = kept


class _Summing(_Waiting):
    def __init__(self, take: Callable[[], Total], total: Callable[[], Total | None]) -> None:
        super().__init__(take)
        self._total = total

    @property
    def ready(self) -> bool:
        return self._total() is not None
