"""State from worker to worker: layers that their holders keep, fetched in stripes from all of them at once.

A holder answers slice by slice and goes on training; whoever fetches spreads what it needs over all holders, gives what
a holder that fails still owed to the others, and accepts a layer only with the digest that was offered.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from holdfast.core.ids import WorkerId
from holdfast.errors import ReplicaDiverged, StaleGeneration, StateUnavailable
from holdfast.runtime.transport.links.slices import NotGiven, Slices, SliceSource

__all__ = ["OfferedLayer", "StateOffer", "chosen_offer", "fetch", "offer", "offered_layer"]

_POLL_S = 0.02
_STRETCH_BYTES = 4 << 20


class OfferedLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One layer that is kept: its index, its size in bytes, and the SHA-256 of these, in hexadecimal.

    ``exact``: every other exact holder keeps the same bytes. One that is not is what an inverted step left.
    """

    layer: int
    size: int
    sha256: str
    exact: bool = True


class StateOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a holder keeps under ``key``; ``beside``: what helps with no bit of it, and may differ by holder."""

    key: str
    layers: tuple[OfferedLayer, ...]
    beside: bytes = b""


def offer(
    slices: Slices, key: str, layers: Mapping[int, bytes], inexact: Container[int] = (), beside: bytes = b""
) -> StateOffer:
    """Keeps layers for whoever fetches them, until ``slices.let_go(key)``; what had the same key is replaced.

    ``beside`` goes with the offer itself; ``inexact`` layers may be other bytes elsewhere.

    Returns:
        What is to be handed to those who fetch.

    Cost: one SHA-256 over all bytes, in the calling thread.
    """
    offered = tuple(offered_layer(layer, layers[layer], exact=layer not in inexact) for layer in sorted(layers))
    slices.keep(key, layers)
    return StateOffer(key=key, layers=offered, beside=beside)


def offered_layer(layer: int, data: bytes, *, exact: bool) -> OfferedLayer:
    """What is said of a layer's bytes."""
    return OfferedLayer(layer=layer, size=len(data), sha256=hashlib.sha256(data).hexdigest(), exact=exact)


def fetch(
    slices: Slices,
    offers: Mapping[WorkerId, StateOffer],
    layers: Iterable[int],
    *,
    generation: int,
    stop: threading.Event,
    stretch_bytes: int = _STRETCH_BYTES,
    timeout_s: float = 5.0,
) -> dict[int, bytes]:
    """Returns layers, taken from all holders of the same bytes in parallel.

    Where an inverted step left holders with other bytes, those that most of them keep are taken, and exact ones before
    all. A holder that dies, that does not answer one slice in time or answers it wrongly is asked no more; what it owed
    comes from the others.

    Args:
        slices: ours.
        offers: what each holder keeps; all of the same step.
        layers: indices of the layers to get.
        generation: ours; to be given up when that is aborted.
        stop: set it from any thread to give up.
        stretch_bytes: how much of a layer one holder is to give before it is seen who gives what follows.
        timeout_s: how long a holder may take for one slice.

    Raises:
        ReplicaDiverged: exact holders offer different bits of one layer; nothing was fetched.
        StateUnavailable: nobody is left who can give some layers; says what became of each holder.
        StaleGeneration: ``stop`` was set.

    After failure: nothing is held, and what still comes goes nowhere; it may be repeated, with other offers too.
    """
    offered = {layer: _offered_by(offers, layer) for layer in layers}
    if missing := sorted(layer for layer, by in offered.items() if not by):
        raise StateUnavailable(tuple(missing), "nobody offers them")
    wanted = {layer: chosen_offer(by, layer) for layer, by in offered.items()}
    board = _Board(wanted, {worker: _given(made, wanted) for worker, made in offers.items()}, stretch_bytes)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(offers) or 1, thread_name_prefix="fetch"))
        sources = [
            slices.source(worker, made.key, generation=generation, timeout_s=timeout_s)
            for worker, made in offers.items()
        ]
        for source in sources:
            stack.callback(source.close)
        stack.callback(board.end)  # leaving: no more to do for the threads, then their reading ends, then they do
        futures = [pool.submit(_follow, board, source) for source in sources]
        _wait(board, futures, stop, generation)
    return board.layers()


def _offered_by(offers: Mapping[WorkerId, StateOffer], layer: int) -> dict[WorkerId, OfferedLayer]:
    return {worker: each for worker, made in offers.items() for each in made.layers if each.layer == layer}


def _given(made: StateOffer, wanted: Mapping[int, OfferedLayer]) -> frozenset[int]:
    """The layers of an offer whose bytes are those that are wanted."""
    return frozenset(each.layer for each in made.layers if _same(each, wanted.get(each.layer)))


def _same(one: OfferedLayer, other: OfferedLayer | None) -> bool:
    return other is not None and (one.size, one.sha256) == (other.size, other.sha256)


def chosen_offer(offered: Mapping[WorkerId, OfferedLayer], layer: int) -> OfferedLayer:
    """Which bytes of a layer to take: what the exact holders have, else what most have; of equally many, the first.

    Args:
        offered: by holder; not empty.
        layer: its index.

    Raises:
        ReplicaDiverged: exact holders have different ones.
    """
    exact = [worker for worker in sorted(offered) if offered[worker].exact]
    found = [offered[worker] for worker in exact or sorted(offered)]
    for worker in exact:
        if not _same(offered[worker], found[0]):
            raise ReplicaDiverged(
                f"layer {layer}: worker {exact[0]} offers {_describe(found[0])}, worker {worker} offers "
                f"{_describe(offered[worker])}"
            )
    return max(found, key=lambda each: sum(_same(each, other) for other in found))


def _describe(offered: OfferedLayer) -> str:
    return f"{offered.size} bytes with SHA-256 {offered.sha256[:16]}..."


def _cut(size: int, stretch_bytes: int) -> list[tuple[int, int]]:
    """Start and size of every stretch; an empty layer is one empty stretch."""
    return [(start, min(stretch_bytes, size - start)) for start in range(0, max(size, 1), stretch_bytes)]


def _follow(board: _Board, source: SliceSource) -> None:
    """Gets from one holder what it is to give, until all is there or the holder is dropped."""
    while (stretch := board.take(source.worker)) is not None:
        try:
            board.put(source.worker, stretch, source.read(stretch.layer, stretch.offset, stretch.size))
        except NotGiven as error:
            board.drop(source.worker, str(error), stretch)


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
        stretch_bytes: size of a stretch in the first attempt at a layer.
    """

    def __init__(
        self, wanted: Mapping[int, OfferedLayer], held: Mapping[WorkerId, frozenset[int]], stretch_bytes: int
    ) -> None:
        self._wanted = wanted
        self._held = held
        # All that follows is changed under `_changed`: by a thread per holder, and by whoever waits for the whole.
        self._changed = threading.Condition()
        self._over = False
        self._dropped: dict[WorkerId, str] = {}
        self._parts: dict[int, dict[_Stretch, tuple[WorkerId, bytes]]] = {}
        self._done: dict[int, bytes] = {}
        self._queue: deque[_Stretch] = deque()
        for layer in sorted(wanted):
            cuts = _cut(wanted[layer].size, stretch_bytes)
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
