"""What carries tensors, or what stands for them, between the workers of a simulated job. Nobody waits here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.summing import Contribution, Total
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import PeerLost, StaleGeneration
from holdfast.runtime.transport.port import Expected, MessageKey, SumKey
from holdfast.testing.mail import Group
from holdfast.testing.world import World, WouldBlock, copied

if TYPE_CHECKING:
    from holdfast.testing.virtual_worker import VirtualWorker

__all__ = ["VirtualTransport"]


class VirtualTransport:
    """See :class:`holdfast.runtime.transport.port.Transport`; where that waits, this raises WouldBlock.

    Args:
        process: whose end it is.
        world: that it is in.
    """

    def __init__(self, process: VirtualWorker, world: World) -> None:
        self._process = process
        self._world = world
        self._generation = self._aborted = 0
        self._gone: set[WorkerId] = set()

    def build(
        self,
        generation: int,
        groups: tuple[Group, ...],
        neighbours: Group = (),
        *,
        step: int | None = None,
        expected: Expected | None = None,
    ) -> None:
        """See Transport.build: the first call says to all that we have come, which takes its time."""
        if generation != self._generation:
            self._generation, self._gone = generation, set()
            self._world.after(self._world.scenario.delays.connect, lambda: self._arrive(generation, groups))
        mail, worker = self._world.mail, self._process.worker
        self.take(self._members(groups), lambda: mail.complete(generation, groups, worker) or None)

    def _arrive(self, generation: int, groups: tuple[Group, ...]) -> None:
        process = self._process
        if process.goes and not process.asleep.puts_off(lambda: self._arrive(generation, groups)):
            self._world.mail.join(generation, groups, process.worker)
            self._world.wake({process.worker, *self._members(groups)})

    def _members(self, groups: tuple[Group, ...]) -> frozenset[WorkerId]:
        return frozenset(peer for group in groups if self._process.worker in group for peer in group)

    def send(self, key: MessageKey, peer: WorkerId, tensor: Any) -> None:
        """See Transport.send."""
        world, value = self._world, copied(tensor)

        def arrive() -> None:
            world.mail.post(key, self._process.worker, peer, value)
            world.wake([peer])

        rates = world.scenario.rates
        if rates is None or key.payload not in (Payload.ACTIVATION, Payload.GRADIENT):
            return world.after(world.scenario.delays.message, arrive)
        size = rates.profile.layers[key.boundary - 1].boundary_bytes
        return world.time.after(rates.profile.link.seconds_of(size), arrive)

    def straight(self, peers: Iterable[WorkerId], size: int) -> bool:
        """There is no device."""
        return False

    def hand_on(self) -> None:
        """See Transport.hand_on: all that is given is sent at once."""

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> _Waiting:
        """See Transport.receive."""
        mail, worker = self._world.mail, self._process.worker
        return _Waiting(self, frozenset((peer,)), lambda: mail.collect(key, peer, worker))

    def all_reduce(self, key: SumKey, contribution: Contribution) -> _Summing:
        """See Transport.all_reduce."""
        world, members = self._world, key.reduction.workers
        value = replace(contribution, parts=tuple(map(copied, contribution.parts)))

        def arrive() -> None:
            world.mail.contribute(key, self._process.worker, value)
            world.wake(members)

        world.after(world.scenario.delays.message, arrive)
        return _Summing(self, frozenset(members), partial(self._total, key), partial(self._is_there, key))

    def _is_there(self, key: SumKey) -> bool:
        held = self._world.holding(key)
        withheld = held is not None and self._process.worker in held.held
        return not withheld and self._world.mail.has_all(key, key.reduction.workers)

    def _total(self, key: SumKey) -> Total | None:
        if not self._is_there(key):
            return None
        self._world.has_sum(key, self._process.worker)
        return self._world.mail.total(key, key.reduction.workers)

    def drain(self) -> None:
        """See Transport.drain: what was sent arrives, whatever becomes of us."""

    def abort(self, generation: int) -> None:
        """See Transport.abort."""
        self._aborted = max(self._aborted, generation)

    @property
    def sent(self) -> None:
        """See Transport.sent: nobody counts."""

    def close(self) -> None:
        """See Transport.close."""

    def lose(self, peer: WorkerId, generation: int) -> None:
        """The connection to a worker, whose process was in this generation, closes."""
        if generation == self._generation:
            self._gone.add(peer)

    def take(self, peers: frozenset[WorkerId], ready: Callable[[], Any]) -> Any:
        """Returns what comes from some workers.

        Raises:
            WouldBlock: it is not there yet.
            StaleGeneration, PeerLost: see Handle.wait.
        """
        if self._generation <= self._aborted:
            raise StaleGeneration(self._generation)
        found = ready()
        if found is not None:
            return found
        if gone := peers & self._gone:
            raise PeerLost(str(min(gone)), self._generation)
        raise WouldBlock


@dataclass(frozen=True, slots=True)
class _Waiting:
    transport: VirtualTransport
    peers: frozenset[WorkerId]
    found: Callable[[], Any]

    def wait(self) -> Any:
        return self.transport.take(self.peers, self.found)

    def kept(self) -> Any:
        return self.found()


@dataclass(frozen=True, slots=True)
class _Summing(_Waiting):
    there: Callable[[], bool]

    @property
    def ready(self) -> bool:
        return self.there()
