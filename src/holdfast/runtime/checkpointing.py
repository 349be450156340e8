"""The worker's side of checkpoints: writes what was pinned while training goes on, and reads it back."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.control.messages import Message, ShardFailed, ShardWritten
from holdfast.core.faults import Point
from holdfast.core.ids import WorkerId
from holdfast.errors import StorageError
from holdfast.storage.blobs import open_store
from holdfast.storage.checkpoints import Checkpoints

__all__ = ["MAX_PENDING", "CheckpointWriter", "load_states"]

MAX_PENDING = 2
"""Checkpoints that a worker holds copies of: the one that is being written, and the next. More are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pinned:
    """The copies of some layers at one step; each function encodes one. Made at ``at``, within ``stall_s``."""

    generation: int
    step: int
    layers: dict[int, Callable[[], bytes]]
    stall_s: float
    at: float


class CheckpointWriter:
    """Writes a worker's layers into checkpoints, in a thread of its own.

    Args:
        worker: who we are.
        checkpoints: where to.
        send: queues a message to the coordinator.
        reach: called with every point that is reached.
    """

    def __init__(
        self,
        worker: WorkerId,
        checkpoints: Checkpoints,
        send: Callable[[Message], None],
        reach: Callable[[Point, int], None] = lambda point, step: None,
    ) -> None:
        self._worker = worker
        self._checkpoints = checkpoints
        self._send = send
        self._reach = reach
        self._work: queue.SimpleQueue[_Pinned | Callable[[], None]] = queue.SimpleQueue()
        # Under `_changed` only: whoever pins adds to it, the thread that writes takes from it, and anybody may wait for
        # `written`.
        self._pending = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    def pin(
        self, generation: int, step: int, layers: Iterable[int], snapshot: Callable[[int], Callable[[], bytes]]
    ) -> float:
        """Copies layers, to be written later; training waits for no more than the copies.

        Where ``MAX_PENDING`` earlier checkpoints are not written yet, this one is left out, and the coordinator told.

        Args:
            generation: under which the layers are pinned.
            step: that they are at.
            layers: which.
            snapshot: pins one layer and returns what encodes it.

        Returns:
            Seconds that the copies took.
        """
        with self._changed:
            crowded = self._pending >= MAX_PENDING
            self._pending += not crowded
        if crowded:
            detail = f"{MAX_PENDING} earlier checkpoints are not written yet"
            self._send(ShardFailed(worker=self._worker, generation=generation, step=step, detail=detail))
            return 0.0
        began = time.monotonic()
        copies = {layer: snapshot(layer) for layer in layers}
        at = time.monotonic()
        pinned = _Pinned(generation=generation, step=step, layers=copies, stall_s=at - began, at=at)
        self._work.put(pinned)
        return pinned.stall_s

    def then(self, act: Callable[[], None]) -> None:
        """Calls ``act``, in the writing thread, once all that was pinned before is written; returns at once."""
        self._work.put(act)

    def written(self, limit_s: float) -> bool:
        """Waits until all that was pinned is written or given up, ``limit_s`` seconds at most; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, limit_s)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if not isinstance(work, _Pinned):
                work()
                continue
            try:
                self._write(work)
            except StorageError as error:
                self._fail(work, str(error))
            except Exception as error:  # noqa: BLE001 - a thread's main: nobody else would notice
                self._fail(work, f"{type(error).__name__}: {error}")
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()

    def _write(self, pinned: _Pinned) -> None:
        """Writes one layer after another; whatever is raised ends this worker's part."""
        for index, layer in enumerate(sorted(pinned.layers)):
            encode = pinned.layers.pop(layer)  # its copy goes as soon as it is encoded
            shard = self._checkpoints.write_shard(pinned.step, layer, encode())
            if index == 0:
                self._reach(Point.CHECKPOINT, pinned.step)
            written = ShardWritten(
                worker=self._worker,
                generation=pinned.generation,
                step=pinned.step,
                shard=shard,
                stall_s=pinned.stall_s,
                write_s=time.monotonic() - pinned.at,
            )
            self._send(written)

    def _fail(self, pinned: _Pinned, detail: str) -> None:
        message = ShardFailed(worker=self._worker, generation=pinned.generation, step=pinned.step, detail=detail)
        self._send(message)


def load_states(url: str, step: int, layers: Iterable[int]) -> dict[int, bytes]:
    """Reads layers of a checkpoint, each verified against its digest.

    Args:
        url: of the checkpoints, see :func:`holdfast.storage.blobs.open_store`.
        step: of the checkpoint.
        layers: which.

    Returns:
        Per layer what a stage's ``snapshot`` encoded, for its ``restore``.

    Raises:
        StorageError: a layer is missing, changed, or cannot be read; the checkpoint is of no use, an older one may be.
        ConfigError: the url cannot be used.
    """
    checkpoints = Checkpoints(open_store(url))
    manifest = checkpoints.read(step)
    return {layer: checkpoints.read_shard(manifest, layer) for layer in layers}
