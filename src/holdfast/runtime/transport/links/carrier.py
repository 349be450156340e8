"""A second way between two workers: a process group of torch, which carries the bodies of long messages.

The link stays where everything is said: the header of a carried message goes over it as ever, and its body by the group
of the two, one behind the other as their headers go. So nothing needs a tag, whoever reads a header asks the group for
the next body, also if nobody wants it any more, and both ways stay in step whatever generation begins or ends. The
group is built in the background, over the link, and tried before it is used; what is sent meanwhile goes over the link.
A group that fails is a link that is broken: whoever waits is told, and the next one is not built at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import msgspec
import torch
import torch.distributed as dist

from holdfast.control.messages import Peer
from holdfast.core.ids import WorkerId
from holdfast.errors import HoldfastError
from holdfast.runtime.tensors import settle_thread
from holdfast.runtime.transport.links.inbox import Incoming
from holdfast.runtime.transport.links.wire import BadFrame, Chunk, Kind, Label

__all__ = ["CARRIED", "Carriers", "Carrying", "Group", "MakeGroup", "Work", "gloo_pair"]

CARRIED = frozenset((Kind.ACTIVATION, Kind.GRADIENT, Kind.PART, Kind.TOTAL))
_AGAIN_S = (60.0, 600.0, 3600.0)
"""How long it is from one failure to the next attempt; after these there is none."""
_BUILD_S = 30.0
_TRIAL = bytes(range(256))
_MOST_BYTES = 4096
"""Of what is told to build a group."""
_LONGEST = 1 << 36
_EVER = 1 << 62
"""What is told of groups belongs to no generation."""


class Work(Protocol):
    """Something that a group does; torch's works are such."""

    def wait(self) -> Any:
        """Waits until it is done; raises if it cannot be."""


class Group(Protocol):
    """Two workers, number 0 and number 1; torch's process groups are such."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int, /) -> Work:
        """Sends a tensor."""

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int, /) -> Work:
        """Receives the next one into a tensor."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """What a group would not even begin."""

    error: Exception

    def wait(self) -> None:
        """See Work."""
        raise self.error


class MakeGroup(Protocol):
    """Makes a group of two, and waits until both are there."""

    def __call__(self, store: Any, rank: int, limit_s: float) -> Group: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrying:
    """How bodies are carried.

    Attributes:
        make: makes groups.
        least_bytes: of a body; what is shorter goes over the link.
        after: so many bodies go over the link to a worker before a group with it is built.
    """

    make: MakeGroup
    least_bytes: int = 64 << 10
    after: int = 32


def gloo_pair(host: str) -> MakeGroup:
    """Returns what makes groups whose connections listen at an address of this machine."""

    def make(store: Any, rank: int, limit_s: float) -> Group:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timedelta(seconds=limit_s), 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return cast(Group, dist.ProcessGroupGloo(store, rank, 2, options))

    return make


class _Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one worker tells another of a group: a value under a key; or, without a key, that it is built and tried."""

    attempt: int
    key: str = ""
    value: bytes = b""


class _OverLink(dist.Store):  # type: ignore[name-defined, misc]
    """What two processes have to know of each other to build a group, told over their link."""

    def __init__(self, tell: Callable[[str, bytes], None], limit_s: float) -> None:
        super().__init__()
        self._tell, self._until = tell, time.monotonic() + limit_s
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._over = False

    def learn(self, key: str, value: bytes) -> None:
        """Takes what the other end has told."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody tells anything any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """Tells both ends."""
        told = value.encode() if isinstance(value, str) else bytes(value)
        self.learn(key, told)
        self._tell(key, told)

    def get(self, key: str) -> bytes:
        """Waits for a value."""
        with self._changed:
            while key not in self._values:
                left = self._until - time.monotonic()
                if self._over or left <= 0:
                    raise TimeoutError(f"nobody has told {key}")
                self._changed.wait(left)
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for values."""
        for key in keys:
            self.get(key)


class _Line:
    """What a group does in one direction, one thing behind the other, waited for by a thread.

    Args:
        name: of the thread.
        failed: called with the generation of what could not be done, and why; nothing is done behind that.
    """

    def __init__(self, name: str, failed: Callable[[int, str], None]) -> None:
        self._failed = failed
        self._works = queue.SimpleQueue[tuple[int, Work, Callable[[], object]] | None]()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, generation: int, work: Work, then: Callable[[], object]) -> None:
        """Calls ``then`` once something is done; what must stay as it is until then, it holds."""
        self._works.put((generation, work, then))

    def end(self) -> None:
        """Nothing more comes."""
        self._works.put(None)

    def _run(self) -> None:
        settle_thread()  # sums are folded here, too
        while (each := self._works.get()) is not None:
            generation, work, then = each
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - whatever torch raises, the group is of no use any more
                self._failed(generation, " ".join(str(error).split())[:200])
                return
            then()
            del each, work, then


class _Pair:
    """A group with one process of another worker, as it is built and used.

    Attributes:
        peer: the other process.
        attempt: how many there were before with that worker.
        other: its number in the group.
        store: what both have told each other.
        group: None while it is being built.
        tried: whether it has carried something both ways.
        there: whether the other end says so, too.
        over: whether it has failed, or the link that announces what is sent has ended.
        leaving: how many bodies have yet to leave.
    """

    def __init__(self, peer: Peer, attempt: int, other: int, store: _OverLink) -> None:
        self.peer, self.attempt, self.other, self.store = peer, attempt, other, store
        self.group: Group | None = None
        self.tried = self.there = self.over = False
        self.leaving = 0
        self.lines: dict[str, _Line] = {}

    def is_with(self, peer: Peer) -> bool:
        """Whether it is with this process."""
        return self.peer.here.nonce == peer.here.nonce

    def carries(self, peer: Peer) -> bool:
        """Whether what is sent to a process may go by it."""
        return self.tried and self.there and not self.over and self.is_with(peer)

    def end(self) -> None:
        """What is under way comes to its end; nothing more is sent."""
        self.over = True
        self.store.give_up()


@dataclass(slots=True)
class _Tries:
    """What has been tried with one process.

    Attributes:
        bodies: how many went to it over the link.
        begun: how many groups were begun.
        failed: how many of them have failed.
        not_before: when the next one may be begun.
    """

    bodies: int = 0
    begun: int = 0
    failed: int = 0
    not_before: float = 0.0


class Carriers:
    """The groups of one worker; any thread may use it.

    Args:
        worker: who we are.
        carrying: how bodies are carried.
        current: returns who a worker is now.
        say: sends to another worker over its link, and never waits.
        lost: told that the group with a process has failed, why, and in which generation.
        left: told whenever a body has left.
        add: takes a message that has come whole, as the inbox does.
    """

    def __init__(
        self,
        worker: WorkerId,
        carrying: Carrying,
        current: Callable[[WorkerId], Peer | None],
        say: Callable[[WorkerId, Label, memoryview], None],
        lost: Callable[[Peer, str, int], None],
        left: Callable[[], None],
        add: Callable[[Incoming, Chunk], None],
    ) -> None:
        self._worker, self._carrying, self._current = worker, carrying, current
        self._say, self._lost, self._left, self._add = say, lost, left, add
        # Under the lock, which is not held while a group is built or anything is said.
        self._lock = threading.Lock()
        self._pairs: dict[WorkerId, _Pair] = {}
        self._tries: dict[bytes, _Tries] = {}  # by the number of a process
        self.carried: Counter[WorkerId] = Counter()
        """Bytes that groups have carried to each worker."""

    # What senders do, under their locks

    def way(self, peer: Peer, label: Label, size: int) -> Callable[[torch.Tensor], None] | None:
        """Returns what carries a body; None if it goes over the link, as it is short, or nothing is built yet."""
        if size < self._carrying.least_bytes or label.kind not in CARRIED:
            return None
        with self._lock:
            pair = self._pairs.get(peer.worker)
            if pair is not None and pair.carries(peer):
                return partial(self._send, pair, label.generation)
            tries = self._tries_with(peer)
            tries.bodies += 1
            if self._worker < peer.worker and tries.bodies >= self._carrying.after and self._may_begin(peer, tries):
                self._begin(peer, tries.begun + 1)
        return None

    def _send(self, pair: _Pair, generation: int, body: torch.Tensor) -> None:
        """Sends the next body; its header goes over the link now."""
        assert pair.group is not None, "it is tried"
        with self._lock:
            self.carried[pair.peer.worker] += len(body)
            pair.leaving += 1
        try:
            work = pair.group.send([body], pair.other, 0)
        except Exception as error:  # noqa: BLE001 - whatever torch raises; told by the thread that waits
            work = _Refused(error)
        pair.lines["out"].add(generation, work, partial(self._has_left, pair, body))

    def _has_left(self, pair: _Pair, _: torch.Tensor) -> None:
        with self._lock:
            pair.leaving -= 1
        self._left()

    def busy(self, worker: WorkerId) -> bool:
        """Whether a body has yet to leave to a worker."""
        with self._lock:
            pair = self._pairs.get(worker)
            return pair is not None and not pair.over and pair.leaving > 0

    def forget(self, peer: Peer) -> None:
        """A link with a process has ended, and with it what was announced on it: nothing more is sent by its group."""
        with self._lock:
            pair = self._pairs.get(peer.worker)
        if pair is not None and pair.is_with(peer):
            pair.end()

    def close(self) -> None:
        """Ends all threads that wait for something that comes no more."""
        with self._lock:
            pairs = list(self._pairs.values())
        for pair in pairs:
            pair.end()
            for line in pair.lines.values():
                line.end()

    # What the links' thread does

    def begin(self, source: WorkerId, chunk: Chunk) -> Incoming:
        """Returns where something goes that another worker tells of a group.

        Raises:
            BadFrame: it is too long for that.
        """
        if chunk.offset or chunk.total > _MOST_BYTES:
            raise BadFrame(f"{chunk.label} of {chunk.total} bytes")
        told = torch.empty(chunk.total, dtype=torch.uint8)
        return Incoming(data=told, then=lambda _: self._heard(source, bytes(told.numpy())))

    def add(self, incoming: Incoming, chunk: Chunk) -> None:
        """It has come whole: nobody else has it."""
        incoming.came += chunk.size
        if incoming.then is not None:
            incoming.then(incoming)

    def _heard(self, source: WorkerId, data: bytes) -> None:
        try:
            told = msgspec.msgpack.decode(data, type=_Told)
        except msgspec.DecodeError as error:
            raise BadFrame(f"of a group: {error}") from None
        with self._lock:
            pair, peer = self._pairs.get(source), self._current(source)
            if peer is None:
                return
            if pair is None or not pair.is_with(peer) or pair.attempt < told.attempt:
                if not told.key or source > self._worker:
                    return
                pair = self._begin(peer, told.attempt)
            if pair.attempt != told.attempt:
                return
            pair.there |= not told.key
        if told.key:
            pair.store.learn(told.key, told.value)

    def receive(self, peer: Peer, chunk: Chunk, incoming: Incoming | None) -> None:
        """The header of a carried message has come: its body is the next that the group brings.

        Raises:
            BadFrame: there is no group, or the message is too long.
        """
        with self._lock:
            pair = self._pairs.get(peer.worker)
        if pair is None or pair.group is None or not pair.is_with(peer) or chunk.total > _LONGEST:
            raise BadFrame(f"{chunk.label} of {chunk.total} bytes is to be carried, by no group that is known here")
        place = None if incoming is None else incoming.data
        if place is None:  # nobody wants it any more; it comes all the same
            place = torch.empty(chunk.total, dtype=torch.uint8)
        work = pair.group.recv([place], pair.other, 0)
        whole = chunk._replace(size=chunk.total)
        then = place.size if incoming is None else partial(self._add, incoming, whole)
        pair.lines["in"].add(chunk.label.generation, work, then)

    # How a group is built

    def _tries_with(self, peer: Peer) -> _Tries:
        return self._tries.setdefault(peer.here.nonce, _Tries())

    def _may_begin(self, peer: Peer, tries: _Tries) -> bool:
        pair = self._pairs.get(peer.worker)
        if pair is not None and pair.is_with(peer) and not pair.over:
            return False  # it is being built
        return tries.failed <= len(_AGAIN_S) and time.monotonic() >= tries.not_before

    def _begin(self, peer: Peer, attempt: int) -> _Pair:
        """Builds a group in a thread of its own, under the lock."""
        self._tries_with(peer).begun = attempt
        rank = int(peer.worker < self._worker)
        tell = partial(self._tell, peer.worker, attempt)
        pair = self._pairs[peer.worker] = _Pair(peer, attempt, 1 - rank, _OverLink(tell, _BUILD_S))
        threading.Thread(target=self._build, args=(pair, rank), name="carrier", daemon=True).start()
        return pair

    def _build(self, pair: _Pair, rank: int) -> None:
        try:
            group = self._carrying.make(pair.store, rank, _BUILD_S)
            sent = torch.frombuffer(bytearray(_TRIAL), dtype=torch.uint8)
            came = torch.empty_like(sent)
            for work in (group.send([sent], pair.other, 0), group.recv([came], pair.other, 0)):
                work.wait()
            if not torch.equal(sent, came):
                raise HoldfastError("other bytes have come than were sent")
        except Exception:  # noqa: BLE001 - whatever torch raises: what is sent goes over the link, as before
            self._put_off(pair)
            return
        failed = partial(self._fail, pair)
        with self._lock:
            pair.lines = {way: _Line(f"carrier {way}", failed) for way in ("in", "out")}
            pair.group, pair.tried = group, True
        self._tell(pair.peer.worker, pair.attempt, "", b"")

    def _tell(self, worker: WorkerId, attempt: int, key: str, value: bytes) -> None:
        body = msgspec.msgpack.encode(_Told(attempt, key, value))
        self._say(worker, Label(_EVER, 0, Kind.CARRIER, place=attempt), memoryview(body))

    def _fail(self, pair: _Pair, generation: int, reason: str) -> None:
        before, pair.over = pair.over, True
        self._put_off(pair)
        if not before:
            self._lost(pair.peer, f"its carrier has failed: {reason}", generation)

    def _put_off(self, pair: _Pair) -> None:
        with self._lock:
            pair.over = True
            tries = self._tries_with(pair.peer)
            tries.not_before = time.monotonic() + _AGAIN_S[min(tries.failed, len(_AGAIN_S) - 1)]
            tries.failed += 1
