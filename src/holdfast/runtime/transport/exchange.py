"""The exchange of addresses between workers, passed on by the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.control.messages import Blob, Message
from holdfast.core.ids import WorkerId
from holdfast.errors import StaleGeneration

__all__ = ["RelayExchange"]


class RelayExchange:
    """The port :class:`holdfast.runtime.transport.port.Exchange`, over the coordinator."""

    def __init__(self, worker: WorkerId, send: Callable[[Message], None]) -> None:
        self._worker = worker
        self._send = send
        self._values: dict[tuple[int, str], bytes] = {}
        self._changed = threading.Condition()
        self._over = 0

    def put(self, generation: int, key: str, value: bytes, to: tuple[WorkerId, ...]) -> None:
        """See Exchange.put."""
        self.deliver(generation, key, value)
        self._send(Blob(worker=self._worker, generation=generation, key=key, value=value, to=to))

    def deliver(self, generation: int, key: str, value: bytes) -> None:
        """Takes a value that another worker put."""
        with self._changed:
            self._values[generation, key] = value
            self._changed.notify_all()

    def get(self, generation: int, key: str) -> bytes:
        """See Exchange.get."""
        with self._changed:
            while (generation, key) not in self._values:
                if generation <= self._over:
                    raise StaleGeneration(generation)
                self._changed.wait()
            return self._values[generation, key]

    def has(self, generation: int, key: str) -> bool:
        """See Exchange.has."""
        with self._changed:
            return (generation, key) in self._values

    def end(self, generation: int) -> None:
        """``generation`` and all before it are over: whoever waits gets StaleGeneration."""
        with self._changed:
            self._over = max(self._over, generation)
            self._values = {k: v for k, v in self._values.items() if k[0] > self._over}
            self._changed.notify_all()
