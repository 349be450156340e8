"""What workers tell each other through the coordinator, as what states they offer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.control.messages import Blob, Message
from holdfast.core.ids import WorkerId
from holdfast.errors import StaleGeneration

__all__ = ["RelayExchange"]


class RelayExchange:
    """Values under keys, each for the workers that it is meant for; they are gone with their generation."""

    def __init__(self, worker: WorkerId, send: Callable[[Message], None]) -> None:
        self._worker = worker
        self._send = send
        # Under `_changed`: the control thread delivers and ends generations; threads that serve state put, one that
        # fetches it waits.
        self._values: dict[tuple[int, str], bytes] = {}
        self._changed = threading.Condition()
        self._over = 0

    def put(self, generation: int, key: str, value: bytes, to: tuple[WorkerId, ...]) -> None:
        """Makes a value known to ``to`` and to ourselves."""
        self.deliver(generation, key, value)
        self._send(Blob(worker=self._worker, generation=generation, key=key, value=value, to=to))

    def deliver(self, generation: int, key: str, value: bytes) -> None:
        """Takes a value that another worker put."""
        with self._changed:
            self._values[generation, key] = value
            self._changed.notify_all()

    def get(self, generation: int, key: str) -> bytes:
        """Waits for a value; raises StaleGeneration once the generation is over."""
        with self._changed:
            while (generation, key) not in self._values:
                if generation <= self._over:
                    raise StaleGeneration(generation)
                self._changed.wait()
            return self._values[generation, key]

    def end(self, generation: int) -> None:
        """``generation`` and all before it are over: whoever waits gets StaleGeneration."""
        with self._changed:
            self._over = max(self._over, generation)
            self._values = {k: v for k, v in self._values.items() if k[0] > self._over}
            self._changed.notify_all()
