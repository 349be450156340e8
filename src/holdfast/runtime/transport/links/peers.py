"""Who the other workers are now, as the coordinator has told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from holdfast.control.messages import Peer
from holdfast.core.ids import WorkerId
from holdfast.runtime.transport.links.handshake import mark

__all__ = ["Peers"]


class Peers:
    """The newest process of every other worker; for any thread."""

    def __init__(self) -> None:
        # Held during `if_current`, too, so that nobody learns of a newer process between the question and the act.
        self._lock = threading.Lock()
        self._newest: dict[WorkerId, Peer] = {}

    def learn(self, told: Iterable[Peer]) -> None:
        """What was known of these workers holds no more."""
        with self._lock:
            self._newest.update((peer.worker, peer) for peer in told)

    def of(self, worker: WorkerId) -> Peer | None:
        """Returns a worker's process; None if we were told of none."""
        with self._lock:
            return self._newest.get(worker)

    def known(self, worker: WorkerId, marked: bytes) -> Peer | None:
        """Returns a worker's process if it is the one whose nonce has this mark."""
        peer = self.of(worker)
        return peer if peer is not None and mark(peer.here.nonce) == marked else None

    def is_current(self, peer: Peer) -> bool:
        """Whether it is not one of the past."""
        now = self.of(peer.worker)
        return now is not None and now.here.nonce == peer.here.nonce

    def if_current(self, peer: Peer, act: Callable[[], None]) -> None:
        """Does something if a process is not one of the past; we learn of no other meanwhile."""
        with self._lock:
            current = self._newest.get(peer.worker)
            if current is not None and current.here.nonce == peer.here.nonce:
                act()
