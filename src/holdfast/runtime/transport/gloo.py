"""Transport over torch's Gloo process groups (CPU), with an abort that really unblocks.

One small process group per link and per set of peers, built anew in every generation. Gloo's own ``abort`` and
``shutdown`` leave waiting threads waiting; what ends their wait is shutting down the connected sockets beneath them, so
the sockets that appear while the groups are built are remembered (Linux: /proc/self/fd). One wait does not end even
then, so all are made in a thread that can be left behind.

Gloo asks nobody who it is: whoever connects to its listener costs a descriptor, and takes a slot whose number is easily
guessed. The listener lives as long as a group of its device, so every generation has a device of its own, and once its
groups stand (or will not) a filter on the listening socket drops whatever comes: to connect is no longer possible.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist

from holdfast.core.ids import WorkerId
from holdfast.core.lower import Payload
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import InternalError, PeerLost, StaleGeneration
from holdfast.runtime.hardening import LISTENING
from holdfast.runtime.sockets import duplicates, let_nobody_in, listens, sockets
from holdfast.runtime.tensors import num_bytes
from holdfast.runtime.transport.framing import framed, unframed
from holdfast.runtime.transport.port import Exchange, Expected, MessageKey, Ready, SumHandle, SumKey

__all__ = ["GlooTransport"]

_Gloo: Any = dist.ProcessGroupGloo  # torch's type hints leave its methods out
_JOIN_S = 0.01
_CONNECT_S = 60.0
_STUCK_S = 0.05
_Awaited = tuple[Any, Future[None]]
_abandoned: list[object] = []
_SOURCE_PLACE = re.compile(r"^\[\S+:\d+\] ")
_HEADER = struct.Struct("<6q16x")  # before the payload: 64 bytes, so that the payload stays aligned
_PAYLOADS = {payload: index for index, payload in enumerate(Payload)}
_LOG = logging.getLogger(__name__)


class GlooTransport:
    """Gloo groups on one network address; see :class:`holdfast.runtime.transport.port.Transport`.

    Args:
        worker: who we are.
        exchange: how addresses are told.
        host: the address that the groups listen on.
        timeout_s: limit for any single operation; a safety net, not a failure detector.
        note: told when a thread is left behind.
    """

    def __init__(
        self,
        worker: WorkerId,
        exchange: Exchange,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 1800.0,
        note: Callable[[str], None] = _LOG.warning,
    ) -> None:
        self._worker = worker
        self._exchange = exchange
        self._timeout = timedelta(seconds=timeout_s)
        self._host = host
        self._note = note
        self._lock = threading.Lock()
        self._generation = 0
        self._aborted = 0
        self._known_sockets: set[str] = set()
        self._own_sockets: set[str] | None = set()  # None while a generation is built
        self._groups: dict[tuple[WorkerId, ...], Any] = {}
        self._sent: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self._works = _start_waiting()
        self._awaited = Future[None]()

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
        ours = [group for group in groups if self._worker in group]
        self._bury()
        with self._lock:
            self._refuse_stale(generation)
            self._generation = generation
            self._known_sockets = set(sockets())
            self._own_sockets = None if ours else set()
        if not ours:
            return
        device, listener = _listen(self._host)
        built: dict[tuple[WorkerId, ...], Any] = {}
        errors: list[BaseException] = []

        def connect(group: tuple[WorkerId, ...]) -> None:
            try:
                built[group] = self._connect(generation, group, device)
            except (RuntimeError, StaleGeneration) as error:
                errors.append(error)

        threads = [threading.Thread(target=connect, args=(group,), daemon=True) for group in ours]
        for thread in threads:
            thread.start()
        self._join(threads, generation, errors)
        let_nobody_in(listener)
        with self._lock:
            self._groups.update(built)
            self._own_sockets = self._new_sockets()
            self._refuse_stale(generation)
        if errors:
            raise PeerLost("", generation, _first_sentence(errors[0]))

    def _join(self, threads: list[threading.Thread], generation: int, errors: list[BaseException]) -> None:
        """Waits for the threads that connect, until the generation is aborted or a member turns out dead.

        Then nothing can hurry a thread that waits for a member which will never come: it is left behind, holds nothing
        that anybody needs, and ends at the time limit for connecting.
        """
        for thread in threads:
            while thread.is_alive():
                thread.join(_JOIN_S)
                if errors or self._aborted >= generation:
                    with self._lock:
                        _shut(self._new_sockets())
                    return

    def _connect(self, generation: int, group: tuple[WorkerId, ...], device: object) -> Any:
        options = _Gloo._Options()
        options._devices = [device]
        options._threads = 1
        options._timeout = timedelta(seconds=_CONNECT_S)
        others = tuple(worker for worker in group if worker != self._worker)
        prefix = "+".join(map(str, group))
        store = _ExchangeStore(self._exchange, generation, prefix, others)
        built = _Gloo(store, group.index(self._worker), len(group), options)
        built._set_default_timeout(self._timeout)
        return built

    def send(self, key: MessageKey, peer: WorkerId, tensor: torch.Tensor) -> None:
        """See Transport.send: the tensor is copied behind a header that tells what it is."""
        buffer = framed(_header(key, tensor.numel() * tensor.element_size()), tensor)
        group = self._link(peer)
        with self._failing(peer):
            work = group.send([buffer], self._rank(group, peer), _tag(key))
        self._keep(key.step, work, buffer)

    def _keep(self, step: int, work: Any, buffer: torch.Tensor) -> None:
        """Keeps a sent buffer until it has arrived: by the step after next every message of a step was taken."""
        if step not in self._sent:
            self._settle([past for past in self._sent if past < step - 1])
            self._sent[step] = []
        self._sent[step].append((work, buffer))

    def _settle(self, steps: list[int]) -> None:
        for step in steps:
            for done, _ in self._sent.pop(step):
                with self._failing(None):
                    done.wait()

    def drain(self) -> None:
        """See Transport.drain."""
        self._settle(list(self._sent))

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> _Receiving:
        """See Transport.receive."""
        buffer = torch.empty(_HEADER.size + num_bytes(spec), dtype=torch.uint8)  # aligned, which numpy's are not
        frame = buffer.numpy()
        group = self._link(peer)
        with self._failing(peer):
            work = group.recv([buffer], self._rank(group, peer), _tag(key))
        return _Receiving(self, work, frame, unframed(frame, _HEADER.size, spec), key, peer)

    def all_reduce(self, key: SumKey, tensor: torch.Tensor) -> SumHandle:
        """See Transport.all_reduce."""
        members = key.reduction.workers
        if len(members) == 1:
            return Ready(tensor)
        total = tensor.clone()
        with self._failing(None):
            work = self._group(members).allreduce([total])
        return _Reducing(self, work, total)

    def _link(self, peer: WorkerId) -> Any:
        return self._group(tuple(sorted((self._worker, peer))))

    def _group(self, members: tuple[WorkerId, ...]) -> Any:
        try:
            return self._groups[members]
        except KeyError:
            self._refuse_stale(self._generation)
            names = ", ".join(map(str, members))
            raise InternalError(
                f"worker {self._worker}: no group of {names} in generation {self._generation}"
            ) from None

    def _rank(self, group: Any, peer: WorkerId) -> int:
        return int(peer > self._worker)

    def _refuse_stale(self, generation: int) -> None:
        if generation <= self._aborted:
            raise StaleGeneration(generation)

    @contextlib.contextmanager
    def _failing(self, peer: WorkerId | None) -> Iterator[None]:
        """Turns Gloo's RuntimeError into StaleGeneration (aborted) or PeerLost."""
        try:
            yield
        except RuntimeError as error:
            self._refuse_stale(self._generation)
            raise PeerLost(str(peer or ""), self._generation, _first_sentence(error)) from None

    @property
    def sent(self) -> None:
        """See Transport.sent: nobody counts."""

    def abort(self, generation: int) -> None:
        """See Transport.abort; takes well under a millisecond."""
        with self._lock:
            self._aborted = max(self._aborted, generation)
            if 0 < self._generation <= generation:
                _shut(self._new_sockets() if self._own_sockets is None else self._own_sockets)
                threading.Timer(_STUCK_S, self._awaited.cancel).start()

    def _new_sockets(self) -> set[str]:
        """Identities of the sockets that were opened since the building of this generation began."""
        return sockets().keys() - self._known_sockets

    def _bury(self) -> None:
        """Drops the groups of the generation before, in a thread of its own: it takes about 10 ms per peer.

        Called by the thread that used them, so that nobody waits on them any more.
        """
        graveyard = [self._groups, self._sent]
        self._groups, self._sent = {}, {}
        if graveyard[0]:
            threading.Thread(target=graveyard.clear, daemon=True).start()

    def await_(self, work: Any, peer: WorkerId | None) -> None:
        """Waits for a work of Gloo's, in a thread that is left behind should it sleep through an abort.

        Gloo forgets to wake a receive whose payload had arrived in part when its connection went, and nothing else can.

        Raises:
            StaleGeneration, PeerLost: see Handle.wait.
        """
        self._awaited = awaited = Future[None]()
        self._refuse_stale(self._generation)  # now that an abort finds what to cancel
        self._works.put((work, awaited))
        try:
            with self._failing(peer):
                awaited.result()
        except CancelledError:
            self._leave_behind()
            raise StaleGeneration(self._generation) from None

    def _leave_behind(self) -> None:
        """Another thread waits from now on. The groups are kept: dropping them would wait for that thread, too."""
        self._note("a receive was not woken when its connection went; its thread is left behind")
        _abandoned.append((self._groups, self._sent))
        self._groups, self._sent = {}, {}
        self._works.put(None)
        self._works = _start_waiting()

    def close(self) -> None:
        """See Transport.close."""
        self.abort(self._generation)
        self._works.put(None)


class _ExchangeStore(dist.Store):  # type: ignore[name-defined,misc]
    """A torch store over the exchange: what Gloo needs to tell its addresses to one group's members."""

    def __init__(self, exchange: Exchange, generation: int, prefix: str, others: tuple[WorkerId, ...]) -> None:
        super().__init__()
        self._exchange = exchange
        self._generation = generation
        self._prefix = prefix
        self._others = others

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._exchange.put(self._generation, f"{self._prefix}/{key}", data, self._others)

    def get(self, key: str) -> bytes:
        return self._exchange.get(self._generation, f"{self._prefix}/{key}")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._exchange.has(self._generation, f"{self._prefix}/{key}") for key in keys)

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """The exchange waits until the generation is over."""


class _Reducing:
    def __init__(self, transport: GlooTransport, work: Any, total: torch.Tensor) -> None:
        self._transport = transport
        self._work = work
        self._total = total

    @property
    def ready(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        self._transport.await_(self._work, None)
        return self._total


class _Receiving:
    def __init__(
        self,
        transport: GlooTransport,
        work: Any,
        frame: numpy.ndarray,
        tensor: torch.Tensor,
        key: MessageKey,
        peer: WorkerId,
    ) -> None:
        self._transport = transport
        self._work = work
        self._frame = frame
        self._tensor = tensor
        self._key = key
        self._peer = peer

    def kept(self) -> None:
        """See MessageHandle: what Gloo has in an aborted group nobody can tell."""

    def wait(self) -> torch.Tensor:
        self._transport.await_(self._work, self._peer)
        found, size = self._frame[: _HEADER.size].tobytes(), self._tensor.nbytes
        if found != _header(self._key, size):
            text = f"expected {self._key} of {size} bytes from {self._peer}, got header {_HEADER.unpack(found)}"
            raise InternalError(text)
        return self._tensor


def _start_waiting() -> queue.SimpleQueue[_Awaited | None]:
    """Returns where works are put for a new thread that waits for one after another, until there is None."""
    works: queue.SimpleQueue[_Awaited | None] = queue.SimpleQueue()
    threading.Thread(target=_wait_for_all, args=(works,), name="gloo-waits", daemon=True).start()
    return works


def _wait_for_all(works: queue.SimpleQueue[_Awaited | None]) -> None:
    while (pair := works.get()) is not None:
        work, awaited = pair
        with contextlib.suppress(InvalidStateError):  # cancelled: nobody waits for it any more
            try:
                work.wait()
            except RuntimeError as error:
                awaited.set_exception(error)
            else:
                awaited.set_result(None)


def _header(key: MessageKey, size: int) -> bytes:
    return _HEADER.pack(key.generation, key.step, _PAYLOADS[key.payload], key.microbatch, key.boundary, size)


def _tag(key: MessageKey) -> int:
    return key.microbatch * len(_PAYLOADS) + _PAYLOADS[key.payload]


def _first_sentence(error: BaseException) -> str:
    """What happened, without the place in Gloo's sources before it and the advice after it."""
    line, *_ = str(error).splitlines() or [""]
    return _SOURCE_PLACE.sub("", line).split(". ")[0] or type(error).__name__


def _listen(host: str) -> tuple[object, set[str]]:
    """A new Gloo device, and the identity of the socket that it listens on."""
    with LISTENING:  # so that what begins to listen meanwhile is this device
        before = sockets().keys()
        device = _Gloo.create_device(hostname=host)
        appeared = sockets().keys() - before
        listener = {identity for identity, found in duplicates(appeared) if listens(found)}
    if len(listener) != 1:
        raise InternalError(f"Gloo's new device listens on {len(listener)} sockets, expected one")
    return device, listener


def _shut(identities: set[str]) -> None:
    """Shuts down the connected TCP sockets among these (a listening one would end the process)."""
    for _, duplicate in duplicates(identities):
        with contextlib.suppress(OSError):
            if duplicate.family == socket.AF_INET and not listens(duplicate):
                duplicate.getpeername()
                duplicate.shutdown(socket.SHUT_RDWR)
