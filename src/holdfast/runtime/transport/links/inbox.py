"""What one worker is sent: parked until it is asked for, or put right where it was asked to go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch

from holdfast.core.ids import WorkerId
from holdfast.devices.fresh import Memory, host_memory
from holdfast.errors import InternalError, PeerLost, StaleGeneration
from holdfast.runtime.transport.links.allowance import Allowance
from holdfast.runtime.transport.links.wire import NO_STEP, BadFrame, Chunk, Kind, Label

__all__ = ["Inbox", "Incoming"]

_NEVER = (0, NO_STEP)


@dataclass(slots=True, eq=False)
class Incoming:
    """A message that is coming.

    Attributes:
        data: where it goes, bytes; None before that is known, and if its size is wrong.
        size: how many bytes whoever asked for it expects; None while nobody has, or if it may have any size.
        came: how much of it has come.
        total: how long the sender says that it is; None while nothing has come.
        then: called with it once it is complete.
    """

    data: torch.Tensor | None = None
    size: int | None = None
    came: int = 0
    total: int | None = None
    then: Callable[[Incoming], None] | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return self.total is not None and self.came == self.total

    @property
    def wrong(self) -> bool:
        """Whether its size is not the one that is expected."""
        return None not in (self.size, self.total) and self.size != self.total

    def place(self, chunk: Chunk) -> memoryview | None:
        """Where a part of it goes; None: nowhere."""
        data = self.data  # which another thread may take
        return None if data is None else data.numpy().data[chunk.offset : chunk.offset + chunk.size]

    def let_go(self) -> None:
        """Calls nobody any more: who asked for this holds it, too, and a circle would live until it is looked for."""
        self.then = None


@dataclass(slots=True)
class Inbox:
    """What was sent to a worker, of the generation that it is in; any thread may use it.

    A message is put into memory when its first part comes, or when it is asked for, whichever is first.

    Attributes:
        memory: gives that of what comes before it is asked for.
    """

    memory: Memory = host_memory
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _allowance: Allowance = field(default_factory=Allowance)
    _generation: int = 0
    _aborted: int = 0
    _entered: dict[WorkerId, tuple[int, int]] = field(default_factory=dict)
    _broken: dict[WorkerId, str] = field(default_factory=dict)
    _messages: dict[tuple[WorkerId, Label], Incoming] = field(default_factory=dict)
    _waiting: int = 0
    _failure: BaseException | None = None

    # What the thread that reads does

    def begin(self, source: WorkerId, chunk: Chunk) -> Incoming | None:
        """Returns the message that a chunk goes on with; None if it is of a generation that is over.

        Raises:
            BadFrame: it is none that could come now.
        """
        label = chunk.label
        with self._changed:
            if label.kind is Kind.ENTER:
                self._enters(source, chunk)
                return None
            if label.generation <= self._aborted or label.generation < self._generation:
                return None
            if label.generation > self._generation:
                raise BadFrame(f"{label} before all had come to that generation")
            incoming = self._messages.get((source, label))
            if incoming is None:
                self._allowance.park(source, label, chunk.total)
                incoming = self._messages[source, label] = Incoming()
            if incoming.total is None:
                incoming.total = chunk.total
                if incoming.wrong:  # whoever waits for it is told; its bytes go nowhere
                    incoming.data = None
                    self._wake()
                elif incoming.data is None:
                    if incoming.size is None:
                        self._allowance.check(source, label, chunk.total)
                    if not chunk.carried:  # what carries it finds it a place
                        incoming.data = self.memory(chunk.total)
            if chunk.total != incoming.total or chunk.offset != incoming.came:
                text = f"{chunk.size} bytes from {chunk.offset} on of {chunk.total}, after {incoming.came}"
                raise BadFrame(f"{label}: {text}")
            return incoming

    def _enters(self, source: WorkerId, chunk: Chunk) -> None:
        if chunk.total:
            raise BadFrame(f"{chunk.label} with {chunk.total} bytes")
        self._entered[source] = max(self._entered.get(source, _NEVER), (chunk.label.generation, chunk.label.step))
        self._wake()

    def add(self, incoming: Incoming, chunk: Chunk) -> None:
        """A chunk has come whole."""
        with self._changed:
            incoming.came += chunk.size
            if not incoming.complete:
                return
            then = incoming.then
            incoming.let_go()
            self._wake()
        if then is not None:
            then(incoming)

    def lose(self, peer: WorkerId, reason: str, since: int) -> None:
        """A connection with ``peer`` is broken: whoever waits for it, in this generation, is told.

        Args:
            peer: the other end.
            reason: for people.
            since: the newest generation in which something was said on it.
        """
        with self._changed:
            if since >= self._generation:
                self._broken[peer] = reason
                self._wake()

    def await_anew(self, workers: Iterable[WorkerId]) -> None:
        """These have other processes from now on, which have not come to any generation yet."""
        with self._changed:
            for worker in workers:
                self._entered.pop(worker, None)

    def fail(self, error: BaseException) -> None:
        """Nothing comes any more, by a fault of ours: whoever waits is told."""
        with self._changed:
            self._failure = error
            self._wake()

    def wake(self) -> None:
        """Lets whoever waits look again."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    # What the worker does

    def enter(self, generation: int, allowance: Allowance) -> None:
        """Begins a generation: what came for those before it is dropped.

        Args:
            generation: greater than any before.
            allowance: how much of it may come before it is asked for.

        Raises:
            StaleGeneration: it is over already.
        """
        with self._changed:
            self._refuse_stale(generation)
            self._generation = generation
            self._allowance = allowance
            for incoming in self._messages.values():
                incoming.let_go()
            self._messages.clear()
            self._broken.clear()

    def wait_for(self, generation: int, step: int | None, peers: frozenset[WorkerId]) -> None:
        """Waits until all these have come to a generation, which is ours.

        Args:
            generation: which.
            step: before which we come to it; None if that is not known yet.
            peers: the others.

        Raises:
            StaleGeneration: aborted meanwhile.
            PeerLost: the connection with one of them broke.
            InternalError: one comes before another step.
        """
        self.wait(generation, lambda: [peer for peer in peers if self._entered.get(peer, _NEVER) < (generation,)])
        for peer in sorted(peers):
            theirs = self._entered.get(peer, _NEVER)[1]  # forgotten meanwhile if it has another process
            if step is not None and theirs not in (step, NO_STEP):
                raise InternalError(f"{peer} comes to generation {generation} before step {theirs}, we before {step}")

    def expect(
        self,
        source: WorkerId,
        label: Label,
        data: torch.Tensor | None,
        then: Callable[[Incoming], None] | None = None,
        *,
        size: int | None = None,
    ) -> Incoming:
        """Asks for a message: it goes into ``data``, if it has not begun to come already, and no other way carries it.

        Args:
            source: who sends it.
            label: which.
            data: contiguous bytes, as many as it is to have; None: it finds a place when it comes.
            then: called with it once it is complete, in the thread that reads, or at once.
            size: how many bytes it is to have where there is no place yet; None: any number.
        """
        with self._changed:
            incoming = self._messages.setdefault((source, label), Incoming())
            if incoming.total is not None and incoming.size is None:
                self._allowance.ask(incoming.total)
            incoming.size = size if data is None else data.numel()
            if incoming.data is None and not incoming.wrong:
                incoming.data = data
            if not incoming.complete:
                incoming.then, then = then, None
        if then is not None:
            then(incoming)
        return incoming

    def take(self, source: WorkerId, label: Label, incoming: Incoming) -> torch.Tensor:
        """Waits for a message that was asked for, and returns its bytes.

        Raises:
            StaleGeneration: aborted meanwhile.
            PeerLost: the connection with its sender broke.
            InternalError: it has another size.
        """
        self.wait(label.generation, lambda: () if incoming.complete or incoming.wrong else (source,))
        self.forget(source, label, incoming)
        assert incoming.data is not None, "what was asked for whole has a place"
        return incoming.data

    def forget(self, source: WorkerId, label: Label, incoming: Incoming) -> None:
        """A message that was asked for is taken.

        Raises:
            InternalError: it has another size.
        """
        with self._changed:
            self._messages.pop((source, label), None)
        if incoming.wrong:
            raise InternalError(f"expected {label} of {incoming.size} bytes from {source}, got {incoming.total} bytes")

    def wait(self, generation: int, missing: Callable[[], Collection[WorkerId]]) -> None:
        """Waits until nobody is missing, as long as all who are can be reached.

        Args:
            generation: ours.
            missing: for whom we still wait; asked again whenever something has come.

        Raises:
            StaleGeneration: the generation was aborted meanwhile, or another one has begun.
            PeerLost: the connection with one who is missing broke.
        """
        with self._changed:
            while True:
                self._refuse_other(generation)
                if not (left := missing()):
                    return
                self._refuse_broken(left)
                self._waiting += 1
                try:
                    self._changed.wait()
                finally:
                    self._waiting -= 1

    def abort(self, generation: int) -> None:
        """Ends a generation and all before it: whoever waits is woken."""
        with self._changed:
            self._aborted = max(self._aborted, generation)
            self._wake()

    def check(self, generation: int, peers: Collection[WorkerId] = ()) -> None:
        """Raises what a wait for these would raise now."""
        with self._changed:
            self._refuse_other(generation)
            self._refuse_broken(peers)

    def _refuse_broken(self, peers: Collection[WorkerId]) -> None:
        if self._failure is not None:
            raise InternalError(f"the links have ended: {self._failure!r}") from self._failure
        if lost := self._broken.keys() & peers:
            peer = min(lost)
            raise PeerLost(str(peer), self._generation, self._broken[peer])

    def _refuse_other(self, generation: int) -> None:
        self._refuse_stale(generation)
        if generation != self._generation:
            raise StaleGeneration(generation)

    def _refuse_stale(self, generation: int) -> None:
        if generation <= self._aborted:
            raise StaleGeneration(generation)
