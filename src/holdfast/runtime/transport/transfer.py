"""State from worker to worker: layers that their holders pinned, fetched in stripes from all of them at once.

It knows no generations and shares nothing with the transport of tensors, so a failure elsewhere does not disturb it. A
holder answers slice by slice from what it pinned and goes on training; whoever fetches spreads the slices over all
holders, gives those of a holder that fails to the others, and accepts a layer only with the digest that was offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec

from holdfast.control.doorkeeper import TokenCheck, bounded
from holdfast.control.token import TOKEN_KEY
from holdfast.core.ids import WorkerId
from holdfast.errors import InternalError, ReplicaDiverged, StaleGeneration, StateUnavailable
from holdfast.runtime.hardening import LISTENING

__all__ = ["OfferedLayer", "StateOffer", "StateServer", "fetch"]

_SERVICE = "holdfast.State"
_METHOD = "Read"
_SLICE_KEY = "holdfast-slice-bin"
_POLL_S = 0.02
_ENVELOPE_BYTES = 4096
_SLICE_BYTES = 4 << 20
_STREAMS = 4
"""Calls of one connection at a time, and so slices in memory for it; whoever fetches makes one after another."""
_AGE = [("grpc.max_connection_age_ms", 60_000), ("grpc.max_connection_age_grace_ms", 10_000)]
"""So that what callers never read is let go; others open a new connection, and lose nothing by that."""
_T = TypeVar("_T")


class OfferedLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pinned layer: its index, its size in bytes, and the SHA-256 of these, in hexadecimal."""

    layer: int
    size: int
    sha256: str


class StateOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a holder has pinned as ``key``, and the ``address`` (``host:port``) where it can be had."""

    address: str
    key: str
    layers: tuple[OfferedLayer, ...]


class _Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The request: these bytes of a pinned layer."""

    key: str
    layer: int
    offset: int
    size: int


class StateServer:
    """Serves what a worker pinned, to whoever has the job's token.

    Args:
        host: the address to listen on, from the first pin on, at a free port.
        token: what callers must present.
        credentials: for TLS; None listens in the clear.
    """

    def __init__(self, host: str, token: str, credentials: grpc.ServerCredentials | None = None) -> None:
        self._host = host
        self._token = token
        self._credentials = credentials
        self._lock = threading.Lock()
        self._service: _Service | None = None
        self._pinned: dict[str, Mapping[int, bytes]] = {}

    def pin(self, key: str, layers: Mapping[int, bytes]) -> StateOffer:
        """Keeps layers to be fetched until :meth:`unpin`; they are not copied. What had the same key is replaced.

        Args:
            key: names what is pinned, in this server.
            layers: the bytes of each layer, by its index.

        Returns:
            What is to be handed to those who fetch.

        Cost: one SHA-256 over all bytes, in the calling thread.
        """
        offered = tuple(_offered(layer, layers[layer]) for layer in sorted(layers))
        with self._lock:
            address = self._listen()
            self._pinned[key] = dict(layers)
            return StateOffer(address=address, key=key, layers=offered)

    def unpin(self, key: str) -> None:
        """Lets go of what was pinned, if it was; who still fetches it is refused."""
        with self._lock:
            self._pinned.pop(key, None)

    def close(self) -> None:
        """Stops listening, ends calls under way and lets go of everything; may be repeated."""
        with self._lock:
            service, self._service = self._service, None
            self._pinned.clear()
        if service is not None:
            service.close()

    def _listen(self) -> str:
        if self._service is None:
            with LISTENING:
                self._service = _Service(self._host, self._token, self._credentials, self._slice)
        return self._service.address

    def _slice(self, wanted: _Slice) -> bytes:
        """One slice; only that is copied.

        Raises:
            LookupError: there is no such slice.
        """
        with self._lock:
            data = self._pinned.get(wanted.key, {}).get(wanted.layer)
        if data is None:
            raise LookupError(f"layer {wanted.layer} is not pinned as {wanted.key!r}")
        if min(wanted.offset, wanted.size) < 0 or wanted.offset + wanted.size > len(data):
            raise LookupError(f"layer {wanted.layer} has {len(data)} bytes only")
        if wanted.size > _SLICE_BYTES:
            raise LookupError(f"a slice has at most {_SLICE_BYTES} bytes, not {wanted.size}")
        return data[wanted.offset : wanted.offset + wanted.size]


class _Service:
    """A gRPC server in a thread and an event loop of its own: a call that is not finished costs no thread.

    Args:
        host: the address to listen on.
        token: what callers must present.
        credentials: for TLS; None listens in the clear.
        give: returns a slice, or raises LookupError.

    Raises:
        InternalError: the address cannot be listened on.
    """

    def __init__(
        self, host: str, token: str, credentials: grpc.ServerCredentials | None, give: Callable[[_Slice], bytes]
    ) -> None:
        self._give = give
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="state-server", daemon=True)
        self._thread.start()
        self._server, port = self._run(self._start(host, token, credentials))
        self.address = f"{host}:{port}"

    def close(self) -> None:
        """Ends calls under way, and the thread."""
        self._run(self._server.stop(grace=None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(
        self, host: str, token: str, credentials: grpc.ServerCredentials | None
    ) -> tuple[grpc.aio.Server, int]:
        options = bounded(streams=_STREAMS, receive_bytes=_ENVELOPE_BYTES, send_bytes=_SLICE_BYTES + _ENVELOPE_BYTES)
        server = grpc.aio.server(interceptors=[TokenCheck(token)], options=[*options, *_AGE])
        handler = grpc.stream_stream_rpc_method_handler(self._answer)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})])
        address = f"{host}:0"
        try:
            port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        except RuntimeError as error:
            raise InternalError(f"state server: cannot listen on {host}: {error}") from None
        await server.start()
        return server, port

    async def _answer(self, request: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Answers one call. Which slice it wants is in its headers, so nobody waits for a caller to say it."""
        try:
            await context.write(self._give(_wanted(context.invocation_metadata())))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except LookupError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error.args[0]))


def _wanted(metadata: Iterable[tuple[str, str | bytes]]) -> _Slice:
    given = next((value for key, value in metadata if key == _SLICE_KEY and isinstance(value, bytes)), b"")
    return msgspec.msgpack.decode(given, type=_Slice)


def _offered(layer: int, data: bytes) -> OfferedLayer:
    return OfferedLayer(layer=layer, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def fetch(
    offers: Mapping[WorkerId, StateOffer],
    layers: Iterable[int],
    *,
    token: str,
    stop: threading.Event,
    credentials: grpc.ChannelCredentials | None = None,
    chunk_bytes: int = _SLICE_BYTES,
    timeout_s: float = 5.0,
    generation: int = 0,
) -> dict[int, bytes]:
    """Returns layers, taken from all holders in parallel.

    A holder that dies, that does not answer one slice in time or answers it wrongly is asked no more; what it owed
    comes from the others.

    Args:
        offers: what each holder has pinned; all of the same step.
        layers: indices of the layers to get.
        token: the job's token.
        stop: set it from any thread to give up.
        credentials: for TLS; None connects in the clear.
        chunk_bytes: size of a slice, at most 4 MiB; one slice per holder is under way at any time.
        timeout_s: how long a holder may take for one slice.
        generation: told in StaleGeneration.

    Raises:
        ReplicaDiverged: holders offer different bits of one layer; nothing was fetched.
        StateUnavailable: nobody is left who can give some layers; says what became of each holder.
        StaleGeneration: ``stop`` was set.

    After failure: nothing is kept and no call is under way; it may be repeated, with other offers too.
    """
    wanted = _agreed(offers, frozenset(layers))
    board = _Board(wanted, {worker: _indices(offer) for worker, offer in offers.items()}, chunk_bytes)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(offers) or 1, thread_name_prefix="fetch"))
        reads = {
            worker: stack.enter_context(_reading(offer, token, credentials, chunk_bytes, timeout_s))
            for worker, offer in offers.items()
        }
        stack.callback(board.end)  # leaving: no more to do for the threads, then their calls end, then they do
        futures = [pool.submit(_serve, board, worker, read) for worker, read in reads.items()]
        _wait(board, futures, stop, generation)
    return board.layers()


def _indices(offer: StateOffer) -> frozenset[int]:
    return frozenset(each.layer for each in offer.layers)


def _agreed(offers: Mapping[WorkerId, StateOffer], layers: frozenset[int]) -> dict[int, OfferedLayer]:
    """What all holders of each layer offer alike."""
    agreed: dict[int, OfferedLayer] = {}
    first: dict[int, WorkerId] = {}
    for worker, offer in offers.items():
        for each in offer.layers:
            if each.layer in layers and agreed.setdefault(each.layer, each) != each:
                raise ReplicaDiverged(
                    f"layer {each.layer}: worker {first[each.layer]} offers {_describe(agreed[each.layer])}, "
                    f"worker {worker} offers {_describe(each)}"
                )
            first.setdefault(each.layer, worker)
    if missing := layers - agreed.keys():
        raise StateUnavailable(tuple(sorted(missing)), "nobody offers them")
    return agreed


def _describe(offered: OfferedLayer) -> str:
    return f"{offered.size} bytes with SHA-256 {offered.sha256[:16]}..."


class _WrongAnswer(Exception):
    """A holder answered something that nobody asked for."""


_Read = Callable[["_Stretch"], bytes]


@contextlib.contextmanager
def _reading(
    offer: StateOffer, token: str, credentials: grpc.ChannelCredentials | None, chunk_bytes: int, timeout_s: float
) -> Iterator[_Read]:
    """A connection to one holder, as a function that reads a stretch slice by slice; leaving it cancels a call."""
    options = [
        ("grpc.max_receive_message_length", chunk_bytes + _ENVELOPE_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # another fetch's trouble with this address is not ours
    ]
    make = grpc.insecure_channel if credentials is None else grpc.secure_channel
    arguments = (offer.address,) if credentials is None else (offer.address, credentials)
    with make(*arguments, options=options) as channel:
        call = channel.unary_unary(f"/{_SERVICE}/{_METHOD}")

        def read_slice(layer: int, offset: int, size: int) -> bytes:
            wanted = msgspec.msgpack.encode(_Slice(key=offer.key, layer=layer, offset=offset, size=size))
            data: bytes = call(b"", timeout=timeout_s, metadata=((TOKEN_KEY, token), (_SLICE_KEY, wanted)))
            if len(data) != size:
                raise _WrongAnswer(f"answered {len(data)} bytes of layer {layer} instead of {size}")
            return data

        def read(stretch: _Stretch) -> bytes:
            cuts = _cut(stretch.size, chunk_bytes)
            return b"".join(read_slice(stretch.layer, stretch.offset + start, size) for start, size in cuts)

        yield read


def _cut(size: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Start and size of every chunk; an empty layer is one empty chunk."""
    return [(start, min(chunk_bytes, size - start)) for start in range(0, max(size, 1), chunk_bytes)]


def _serve(board: _Board, worker: WorkerId, read: _Read) -> None:
    """Gets from one holder what it is to give, until all is there or the holder is dropped."""
    while (stretch := board.take(worker)) is not None:
        try:
            board.put(worker, stretch, read(stretch))
        except grpc.RpcError as error:
            board.drop(worker, f"{error.code().name.lower()}: {error.details()}", stretch)
        except _WrongAnswer as error:
            board.drop(worker, str(error), stretch)


def _wait(board: _Board, futures: list[Future[None]], stop: threading.Event, generation: int) -> None:
    """Waits until every layer is there.

    Raises:
        StateUnavailable, StaleGeneration: see :func:`fetch`.
    """
    while not board.wait(_POLL_S):
        if stop.is_set():
            raise StaleGeneration(generation)
        if missing := board.out_of_reach():
            raise StateUnavailable(missing, board.obituary())
        for future in futures:
            if future.done():
                future.result()  # a bug in a thread is raised here, instead of waiting for it forever


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Adjacent bytes of a layer, to be had from one holder."""

    layer: int
    offset: int
    size: int


class _Board:
    """What is to be fetched, what is there, and who was dropped: shared by the threads, one per holder.

    Args:
        wanted: the layers to get, by index.
        held: the layers that each holder has.
        chunk_bytes: size of a stretch in the first attempt at a layer.
    """

    def __init__(
        self, wanted: Mapping[int, OfferedLayer], held: Mapping[WorkerId, frozenset[int]], chunk_bytes: int
    ) -> None:
        self._wanted = wanted
        self._held = held
        self._changed = threading.Condition()
        self._over = False
        self._dropped: dict[WorkerId, str] = {}
        self._parts: dict[int, dict[_Stretch, tuple[WorkerId, bytes]]] = {}
        self._done: dict[int, bytes] = {}
        self._queue: deque[_Stretch] = deque()
        for layer in sorted(wanted):
            cuts = _cut(wanted[layer].size, chunk_bytes)
            self._begin(layer, [_Stretch(layer=layer, offset=start, size=size) for start, size in cuts])

    def _begin(self, layer: int, stretches: list[_Stretch]) -> None:
        self._parts[layer] = {}
        self._queue.extend(stretches)

    def take(self, worker: WorkerId) -> _Stretch | None:
        """The next stretch that a holder can give, as soon as there is one; None when it has no more to do."""
        with self._changed:
            while not self._finished(worker):
                for stretch in self._queue:
                    if stretch.layer in self._held[worker]:
                        self._queue.remove(stretch)
                        return stretch
                self._changed.wait()
            return None

    def _finished(self, worker: WorkerId) -> bool:
        return self._over or worker in self._dropped or len(self._done) == len(self._wanted)

    def put(self, worker: WorkerId, stretch: _Stretch, data: bytes) -> None:
        """Takes what a holder gave; with the last stretch of a layer, checks the layer."""
        with self._changed:
            parts = self._parts[stretch.layer]
            parts[stretch] = (worker, data)
            if sum(part.size for part in parts) < self._wanted[stretch.layer].size:
                return
        self._check(stretch.layer, parts)

    def _check(self, layer: int, parts: Mapping[_Stretch, tuple[WorkerId, bytes]]) -> None:
        """Accepts a whole layer, or fetches it anew, from one holder alone: then it is known who gives wrong bits."""
        data = b"".join(parts[stretch][1] for stretch in sorted(parts, key=lambda stretch: stretch.offset))
        sound = hashlib.sha256(data).hexdigest() == self._wanted[layer].sha256  # may take long: without the lock
        givers = {worker for worker, _ in parts.values()}
        with self._changed:
            self._parts[layer] = {}
            if sound:
                self._done[layer] = data
            else:
                self._begin(layer, [_Stretch(layer=layer, offset=0, size=len(data))])
            self._changed.notify_all()
        if not sound and len(givers) == 1:
            self.drop(givers.pop(), f"gave layer {layer} with bits other than it offered")

    def drop(self, worker: WorkerId, reason: str, owed: _Stretch | None = None) -> None:
        """A holder failed: it is asked no more, and what it ``owed`` goes to the next."""
        with self._changed:
            self._dropped[worker] = reason
            if owed is not None:
                self._queue.appendleft(owed)
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody is given anything to do any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Whether everything is there, now or within ``limit_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._done) == len(self._wanted), limit_s)

    def layers(self) -> dict[int, bytes]:
        """What was fetched, by index."""
        with self._changed:
            return {layer: self._done[layer] for layer in sorted(self._done)}

    def out_of_reach(self) -> tuple[int, ...]:
        """The layers that are not there and that no holder is left to give."""
        with self._changed:
            living = [layers for worker, layers in self._held.items() if worker not in self._dropped]
            reachable = frozenset[int]().union(*living)
            return tuple(sorted(self._wanted.keys() - self._done.keys() - reachable))

    def obituary(self) -> str:
        """Why each holder was dropped."""
        with self._changed:
            return "; ".join(f"worker {worker}: {reason}" for worker, reason in sorted(self._dropped.items()))
