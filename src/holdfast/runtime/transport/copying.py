"""Giving a worker that enters the state of its peers: offers over the coordinator, bytes over links."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.core.ids import WorkerId
from holdfast.errors import PeerLost, StaleGeneration, StateUnavailable
from holdfast.protocol.effects import Serve
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.runtime.transport.links.slices import Slices
from holdfast.runtime.transport.transfer import StateOffer, fetch, offer

__all__ = ["StateCopier"]


@dataclass(slots=True)
class _Fetching:
    """A fetch under way in a thread of its own."""

    stop: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    states: dict[int, bytes] | None = None
    beside: bytes = b""
    error: BaseException | None = None


@dataclass(slots=True, kw_only=True)
class StateCopier:
    """Both ends of one worker's state transfers; nothing here blocks the thread that trains.

    Attributes:
        worker: who we are.
        exchange: tells offers to whoever enters.
        slices: what we keep for others, and fetch from them.
        tell: what goes beside the state of a step, such as from where data can be read on; nothing if it is empty.
        learn: called with that of some holder, in the thread that trains, before the state is taken.
    """

    worker: WorkerId
    exchange: RelayExchange
    slices: Slices
    tell: Callable[[int], bytes] = lambda step: b""
    learn: Callable[[bytes], None] = lambda told: None
    _served: dict[WorkerId, str] = field(default_factory=dict)
    _fetching: _Fetching | None = None

    def serve(self, serve: Serve) -> None:
        """Encodes, hashes and offers snapshots, in a thread of its own."""
        generation, target = serve.generation, serve.target
        key = f"{generation}/{target}"
        self._served[target] = key
        beside = self.tell(serve.step)

        def keep() -> None:
            made = StateOffer(key=key, layers=())
            try:
                layers = {layer: encode() for layer, encode in serve.snapshots.items()}
                made = offer(self.slices, key, layers, serve.inexact, beside)
            finally:  # also if it raises: nobody is to wait for one who gives nothing
                self.exchange.put(generation, _name(self.worker, target), msgspec.msgpack.encode(made), (target,))

        threading.Thread(target=keep, name=f"serve-{target}", daemon=True).start()

    def release(self, keep: tuple[WorkerId, ...]) -> None:
        """Drops the snapshots for all other workers, and a fetch of our own."""
        for target in [target for target in self._served if target not in keep]:
            self.slices.let_go(self._served.pop(target))
        if self._fetching is not None and self.worker not in keep:
            self._fetching.stop.set()
            self._fetching = None

    def fetch(self, generation: int, holders: Mapping[int, tuple[WorkerId, ...]]) -> None:
        """Begins to fetch layers, each from whoever holds it."""
        self._fetching = fetching = _Fetching()
        arguments = (fetching, generation, holders)
        threading.Thread(target=self._fetch, args=arguments, name="fetch", daemon=True).start()

    def fetched(self, generation: int, wait_s: float = 0.0) -> dict[int, bytes] | None:
        """Returns what was fetched; None while it is not complete, after ``wait_s`` seconds at most.

        Raises:
            PeerLost: nobody is left who could give some layer: to be tried again in another generation.
            ReplicaDiverged: exact holders of a layer hold different bits.
        """
        assert self._fetching is not None
        self._fetching.over.wait(wait_s)
        if isinstance(self._fetching.error, StateUnavailable):
            raise PeerLost("", generation, str(self._fetching.error))
        if self._fetching.error is not None:
            raise self._fetching.error
        if self._fetching.states is not None and self._fetching.beside:
            self.learn(self._fetching.beside)
        return self._fetching.states

    def _fetch(self, fetching: _Fetching, generation: int, holders: Mapping[int, tuple[WorkerId, ...]]) -> None:
        try:
            sources = {worker for workers in holders.values() for worker in workers}
            offers = {source: self._offer_of(generation, source) for source in sorted(sources)}
            fetching.beside = next((made.beside for made in offers.values() if made.beside), b"")
            fetching.states = fetch(self.slices, offers, holders, generation=generation, stop=fetching.stop)
        except StaleGeneration:
            return
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            fetching.error = error
        finally:
            fetching.over.set()

    def _offer_of(self, generation: int, source: WorkerId) -> StateOffer:
        data = self.exchange.get(generation, _name(source, self.worker))
        return msgspec.msgpack.decode(data, type=StateOffer)


def _name(source: WorkerId, target: WorkerId) -> str:
    return f"state/{source}>{target}"
