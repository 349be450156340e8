"""A second way between two workers: a group of torch, which carries the bodies of long messages.

The link stays where everything is said: the header of a carried message goes over it as ever, and its body by the group
of the two, one behind the other as their headers go. So nothing needs a tag, whoever reads a header asks the group for
the next body, also if nobody wants it any more, and both ways stay in step whatever generation begins or ends. The
group is built in the background, over the link, and tried before it is used; what is sent meanwhile goes over the link.
A group that fails ends the link, too, so that both ends know; one whose link ends is over. The next one is not built at
once, and only over a link: what is announced on one belongs to one group.

Groups carry what is in the host's memory, or, as NCCL's do, what is in a device's, which the host's never sees.
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
from typing import Annotated

import msgspec
import torch
import torch.distributed as dist

from holdfast.control.messages import Peer
from holdfast.core.ids import WorkerId
from holdfast.devices.device import HOST, Device
from holdfast.devices.fresh import Memory
from holdfast.devices.pairs import Group, MakeGroup, Work
from holdfast.errors import HoldfastError
from holdfast.runtime.tensors import settle_thread
from holdfast.runtime.transport.framing import Body, bytes_of
from holdfast.runtime.transport.links.inbox import Incoming
from holdfast.runtime.transport.links.wire import CARRIED, BadFrame, Chunk, Kind, Label

__all__ = ["Carriers", "Carrying"]

_AGAIN_S = (60.0, 600.0, 3600.0)
"""How long it is from one failure to the next attempt; after these there is none."""
_BUILD_S = 30.0
_TRIAL = bytes(range(256))
_MOST_BYTES = 4096
"""Of what is told to build a group."""
_LONGEST = 1 << 36
_EVER = 1 << 62
"""What is told of groups belongs to no generation."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """What a group would not even begin."""

    error: Exception

    def wait(self) -> None:
        """See Work."""
        raise self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrying:
    """How bodies are carried.

    Attributes:
        make: makes groups.
        device: in whose memory they find and put what they carry.
        least_bytes: of a body; what is shorter goes over the link.
        after: so many bodies go over the link to a worker before a group with it is built.
    """

    make: MakeGroup
    device: Device = HOST
    least_bytes: int = 64 << 10
    after: int = 32


class _Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one worker tells another of a group: a value under a key; or, without a key, that it is built and tried."""

    attempt: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
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

    def clone(self) -> _OverLink:
        """There is one."""
        return self

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
        failed: told why something could not be done; nothing is done behind that.
        broke: told what has been raised behind something that was done; nothing is done behind that.
    """

    def __init__(self, name: str, failed: Callable[[str], None], broke: Callable[[BaseException], None]) -> None:
        self._failed, self._broke = failed, broke
        self._works = queue.SimpleQueue[tuple[Work, Callable[[], object]] | None]()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, work: Work, then: Callable[[], object]) -> None:
        """Calls ``then`` once something is done; what must stay as it is until then, it holds."""
        self._works.put((work, then))

    def end(self) -> None:
        """Nothing more comes."""
        self._works.put(None)

    def _run(self) -> None:
        settle_thread()  # sums are folded here, too
        while (each := self._works.get()) is not None:
            work, then = each
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - whatever torch raises, the group is of no use any more
                self._failed(_short(error))
                return
            try:
                then()
            except BaseException as error:  # noqa: BLE001 - told to the thread that would wait for us for ever
                self._broke(error)
                return
            del each, work, then


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class _Pair:
    """A group with one process of another worker, as it is built and used.

    Attributes:
        peer: the other process.
        attempt: how many there were before with that worker.
        store: what both have told each other.
        group: None while it is being built.
        tried: whether it has carried something both ways.
        there: whether the other end says so, too.
        over: whether it has failed, or a link has ended on which it is announced what it carries.
        newest: the newest generation of which it was to carry anything.
        leaving: how many bodies have yet to leave, by generation.
    """

    def __init__(self, peer: Peer, attempt: int, store: _OverLink) -> None:
        self.peer, self.attempt, self.store = peer, attempt, store
        self.group: Group | None = None
        self.tried = self.there = self.over = False
        self.newest = 0
        self.leaving: Counter[int] = Counter()
        self.lines: dict[str, _Line] = {}

    def is_with(self, peer: Peer) -> bool:
        """Whether it is with this process."""
        return self.peer.here.nonce == peer.here.nonce

    def carries(self, peer: Peer) -> bool:
        """Whether what is sent to a process may go by it."""
        return self.tried and self.there and not self.over and self.is_with(peer)

    def end(self) -> None:
        """What is under way comes to its end; nothing more is sent or received."""
        self.over = True
        self.store.give_up()
        for line in self.lines.values():
            line.end()


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
    """The groups of one worker; any thread may use it, with locks held. With its own held nobody is called.

    Args:
        worker: who we are.
        carrying: how bodies are carried.
        current: returns who a worker is now.
        say: sends to another worker over its link, and never waits.
        lost: told that the group with a process has failed, why, and which generation is lost with it.
        left: told whenever a body has left.
        add: takes a message that has come whole, as the inbox does.
        broke: told what has been raised where nobody else would see it.
        memory: of what comes to the host's.
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
        broke: Callable[[BaseException], None],
        memory: Memory,
    ) -> None:
        self._worker, self._carrying, self._current = worker, carrying, current
        self._say, self._lost, self._left, self._add, self._broke = say, lost, left, add, broke
        self._device, self._memory = carrying.device, memory
        # Under the lock, which is not held while a group is built or anything is said.
        self._lock = threading.Lock()
        self._pairs: dict[WorkerId, _Pair] = {}
        self._tries: dict[bytes, _Tries] = {}  # by the number of a process
        self._made: list[Group] = []  # none is taken down while we live: that may wait for who is gone
        self.carried: Counter[WorkerId] = Counter()
        """Bytes that groups have carried to each worker."""

    # What senders do, under their locks

    def straight(self, worker: WorkerId, size: int) -> bool:
        """Whether what is so long goes to a worker from the device's memory."""
        if not self._device.apart or size < self._carrying.least_bytes:
            return False
        peer = self._current(worker)
        with self._lock:
            pair = self._pairs.get(worker)
            return peer is not None and pair is not None and pair.carries(peer)

    def way(self, peer: Peer, label: Label, body: Body, *, lent: bool) -> Callable[[], None] | None:
        """Returns what carries a body; None if it goes over the link: it is short, or elsewhere, or nothing is built.

        Args:
            peer: to whom.
            label: of the message.
            body: of it.
            lent: whether others may change it.
        """
        least = 1 if isinstance(body, torch.Tensor) else self._carrying.least_bytes
        if len(body) < least or label.kind not in CARRIED or (pair := self._pair_for(peer)) is None:
            return None
        if not isinstance(body, torch.Tensor):
            if self._device.apart:
                return None
            body = torch.frombuffer(bytearray(body) if lent else body, dtype=torch.uint8)
        return partial(self._send, pair, label.generation, body)

    def _pair_for(self, peer: Peer) -> _Pair | None:
        """The group that a body goes by; if there is none, one is begun when it is time."""
        with self._lock:
            pair = self._pairs.get(peer.worker)
            if pair is not None and pair.carries(peer):
                return pair
            tries = self._tries_with(peer)
            tries.bodies += 1
            if self._worker < peer.worker and tries.bodies >= self._carrying.after and self._may_begin(peer, tries):
                self._begin(peer, tries.begun + 1)
        return None

    def on_host(self, body: Body) -> memoryview:
        """Returns a body that goes over the link; waits until it is copied, if no group carries it any more."""
        if isinstance(body, memoryview):
            return body
        with self._device.beside():
            return bytes_of(body.cpu()).data

    def _send(self, pair: _Pair, generation: int, body: torch.Tensor) -> None:
        """Sends the next body; its header goes over the link now.

        Raises:
            ConnectionError: the group is over meanwhile: so is the link.
        """
        with self._lock:
            if pair.over:
                raise ConnectionAbortedError("the carrier is over")
            pair.newest = max(pair.newest, generation)
            pair.leaving[generation] += 1
            self.carried[pair.peer.worker] += len(body)
        work = self._begun(pair, lambda group: group.send(body))
        pair.lines["out"].add(work, partial(self._has_left, pair, generation, body))

    def _begun(self, pair: _Pair, call: Callable[[Group], Work]) -> Work:
        """What a group has begun; whatever torch raises is told by the thread that waits."""
        assert pair.group is not None, "it is tried"
        try:
            with self._device.beside():
                return call(pair.group)
        except Exception as error:  # noqa: BLE001
            return _Refused(error)

    def _has_left(self, pair: _Pair, generation: int, _: torch.Tensor) -> None:
        with self._lock:
            pair.leaving[generation] -= 1
            pair.leaving += Counter()  # forgets those that are done
        self._left()

    def busy(self, worker: WorkerId, generation: int) -> bool:
        """Whether a body of a generation has yet to leave to a worker, or was lost."""
        with self._lock:
            pair = self._pairs.get(worker)
            return pair is not None and pair.leaving[generation] > 0

    def forget(self, peer: Peer) -> None:
        """A link with a process has ended, and with it what was announced on it: its group is over."""
        with self._lock:
            pair = self._pairs.get(peer.worker)
            if pair is not None and pair.is_with(peer):
                self._end(pair)

    def _end(self, pair: _Pair) -> bool:
        """Ends a group, under the lock, and what waits on the device; returns whether it was over before."""
        before = pair.over
        pair.end()
        if not before and pair.group is not None and self._device.apart:  # in a thread of its own: it may take its time
            threading.Thread(target=pair.group.abort, name="carrier abort", daemon=True).start()
        return before

    def close(self) -> None:
        """Ends all threads that wait for something that comes no more."""
        with self._lock:
            for pair in self._pairs.values():
                self._end(pair)

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
        if (peer := self._current(source)) is None:
            return
        with self._lock:
            pair = self._pairs.get(source)
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
            BadFrame: there is no group, or it is over, or the message is too long.
        """
        with self._lock:
            pair = self._pairs.get(peer.worker)
            known = pair is not None and pair.tried and not pair.over and pair.is_with(peer)
            if pair is None or not known or chunk.total > _LONGEST:
                raise BadFrame(f"{chunk.label} of {chunk.total} bytes is to be carried, by no group that is known here")
            pair.newest = max(pair.newest, chunk.label.generation)
        place = None if incoming is None or self._device.apart else incoming.data
        where = self._room(chunk.total) if place is None else place
        work = self._begun(pair, lambda group: group.recv(where))
        pair.lines["in"].add(work, partial(self._came, where, incoming, chunk._replace(size=chunk.total)))

    def _room(self, size: int) -> torch.Tensor:
        if not self._device.apart:
            return self._memory(size)
        with self._device.beside():
            return torch.empty(size, dtype=torch.uint8, device=self._device.torch)

    def _came(self, place: torch.Tensor, incoming: Incoming | None, whole: Chunk) -> None:
        """A body has come; nobody may want it any more."""
        if incoming is not None:
            incoming.data = place
            self._add(incoming, whole)

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
        last = self._pairs.get(peer.worker)
        self._tries_with(peer).begun = attempt
        rank = int(peer.worker < self._worker)
        tell = partial(self._tell, peer.worker, attempt)
        pair = self._pairs[peer.worker] = _Pair(peer, attempt, _OverLink(tell, _BUILD_S))
        if last is not None:
            self._end(last)
            pair.leaving.update(last.leaving)  # what was lost is lost
        threading.Thread(target=self._build, args=(pair, rank), name="carrier", daemon=True).start()
        return pair

    def _build(self, pair: _Pair, rank: int) -> None:
        try:
            group = self._carrying.make(pair.store, rank, _BUILD_S)
            with self._lock:
                self._made.append(group)
                pair.group, over = group, pair.over
            if over:  # its link has ended meanwhile
                group.abort()
                return
            self._try(group)
        except Exception:  # noqa: BLE001 - whatever torch raises: what is sent goes over the link, as before
            self._put_off(pair)
            return
        failed = partial(self._fail, pair)
        with self._lock:
            if pair.over:
                return
            pair.lines = {way: _Line(f"carrier {way}", failed, self._broke) for way in ("in", "out")}
            pair.tried = True
        self._tell(pair.peer.worker, pair.attempt, "", b"")

    def _try(self, group: Group) -> None:
        with self._device.beside():
            sent = torch.frombuffer(bytearray(_TRIAL), dtype=torch.uint8).to(self._device.torch)
            came = torch.zeros_like(sent)
            works = group.send(sent), group.recv(came)
        for work in works:
            work.wait()
        with self._device.beside():
            if not torch.equal(sent, came):
                raise HoldfastError("other bytes have come than were sent")

    def _tell(self, worker: WorkerId, attempt: int, key: str, value: bytes) -> None:
        body = msgspec.msgpack.encode(_Told(attempt, key, value))
        self._say(worker, Label(_EVER, 0, Kind.CARRIER, place=attempt), memoryview(body))

    def _fail(self, pair: _Pair, reason: str) -> None:
        """What was under way is lost, with all that was to follow; unless the link has ended before, as was told."""
        if not self._put_off(pair):
            self._lost(pair.peer, f"its carrier has failed: {reason}", pair.newest)

    def _put_off(self, pair: _Pair) -> bool:
        """Ends a group, and begins no other for a while; returns whether it was over before."""
        with self._lock:
            if self._end(pair):
                return True
            tries = self._tries_with(pair.peer)
            tries.not_before = time.monotonic() + _AGAIN_S[min(tries.failed, len(_AGAIN_S) - 1)]
            tries.failed += 1
            return False
