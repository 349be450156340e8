"""The state of layers on its way in a simulated job: to workers that follow them, and into checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_struct

from holdfast.control.messages import ShardWritten
from holdfast.core.faults import Point
from holdfast.core.ids import WorkerId
from holdfast.errors import PeerLost
from holdfast.protocol.effects import Serve
from holdfast.runtime.transport.transfer import chosen_offer, offered_layer
from holdfast.storage.checkpoints import Shard
from holdfast.testing.scenario import VirtualPin
from holdfast.testing.world import World, WouldBlock

if TYPE_CHECKING:
    from holdfast.testing.virtual_worker import VirtualWorker

__all__ = ["VirtualCopier", "VirtualWriter"]

_AGAIN_S = 0.1
"""How soon state is asked for again that nobody gives yet."""


class VirtualCopier:
    """See :class:`holdfast.runtime.driver.Copier`.

    Args:
        process: whose.
        world: that it is in.
    """

    def __init__(self, process: VirtualWorker, world: World) -> None:
        self._process = process
        self._world = world
        self._fetched: dict[int, bytes] | PeerLost | None = None

    def serve(self, serve: Serve) -> None:
        """See Copier.serve."""
        made = {layer: (encode(), layer not in serve.inexact) for layer, encode in serve.snapshots.items()}
        self._world.served.setdefault((serve.generation, serve.target), {})[self._process.worker] = made

    def release(self, keep: tuple[WorkerId, ...]) -> None:
        """See Copier.release: who wants something has it from this generation only."""

    def fetch(self, generation: int, holders: Mapping[int, tuple[WorkerId, ...]]) -> None:
        """See Copier.fetch."""
        self._fetched = None
        rates, time = self._world.scenario.rates, self._world.time
        copying_s = rates.copying_s(holders) if rates is not None and holders else 0.0
        delay_s = time.draw(self._world.scenario.delays.copy) + copying_s
        time.after(delay_s, lambda: self._attempt(generation, holders))

    def _attempt(self, generation: int, holders: Mapping[int, tuple[WorkerId, ...]]) -> None:
        """Copies if every layer has a living holder that serves it; which bits, is chosen as between real workers."""
        world, process = self._world, self._process
        if not process.alive or process.driver.protocol.generation != generation:
            return
        if world.breaks_copy(process.worker):
            self._fetched = PeerLost("", generation, "nobody gives it the state of its layers")
            return
        served = world.served.get((generation, process.worker), {})
        states = {}
        for layer, sources in holders.items():
            found = {source: served[source][layer] for source in sources if source in served and world.living(source)}
            if not found:
                world.time.after(_AGAIN_S, lambda: self._attempt(generation, holders))
                return
            offered = {source: offered_layer(layer, made[0], exact=made[1]) for source, made in found.items()}
            chosen = chosen_offer(offered, layer)
            states[layer] = next(found[source][0] for source in offered if offered[source].sha256 == chosen.sha256)
        self._fetched = states

    def fetched(self, generation: int, wait_s: float) -> dict[int, bytes] | None:
        """See Copier.fetched."""
        if isinstance(self._fetched, PeerLost):
            raise self._fetched
        if self._fetched is None and self._process.has_waited_less(wait_s):
            raise WouldBlock
        return self._fetched


class VirtualWriter:
    """See :class:`holdfast.runtime.driver.Writer`: one write after another, unless the worker dies first.

    Args:
        process: whose.
        world: that it is in.
        reach: called with every point that is reached.

    Attributes:
        writing: whether it is at work right now.
        stalled: whether it does nothing any more.
    """

    def __init__(self, process: VirtualWorker, world: World, reach: Callable[[Point, int], None]) -> None:
        self.writing = self.stalled = False
        self._process = process
        self._world = world
        self._reach = reach
        self._unwritten = 0

    def pin(
        self, generation: int, step: int, layers: Iterable[int], snapshot: Callable[[int], Callable[[], bytes]]
    ) -> float:
        """See Writer.pin."""
        world, worker, at = self._world, self._process.worker, self._world.time.now
        for index, layer in enumerate(layers):
            world.pinned.append(VirtualPin(worker=worker, generation=generation, step=step, layer=layer))
            data = world.stored[step, layer] = snapshot(layer)()
            digest = hashlib.sha256(data).hexdigest()
            shard = Shard(
                layer=layer, name=f"layer-{layer:04d}-{digest[:16]}.safetensors", sha256=digest, size=len(data)
            )
            written = ShardWritten(worker=worker, generation=generation, step=step, shard=shard)
            self.then(partial(self._write, written, at, first=index == 0))
        return 0.0

    def _write(self, written: ShardWritten, pinned_at: float, *, first: bool) -> None:
        if first:
            self.writing = True
            self._reach(Point.CHECKPOINT, written.step)
            self.writing = False
        if self._process.alive and not self.stalled:
            self._process.say(replace_struct(written, write_s=self._world.time.now - pinned_at))

    def then(self, act: Callable[[], None]) -> None:
        """See Writer.then."""
        process = self._process
        self._unwritten += 1

        def write() -> None:
            if process.alive and not self.stalled and not process.asleep.puts_off(write):
                act()
                self._unwritten -= not self.stalled
                process.look()

        self._world.after(self._world.scenario.delays.store, write, channel=("writer", process.process))

    def written(self, limit_s: float) -> bool:
        """See Writer.written."""
        if self._unwritten and self._process.has_waited_less(limit_s):
            raise WouldBlock
        return not self._unwritten
