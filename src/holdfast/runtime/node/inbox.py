"""What the thread that supervises a node is told, by whatever thread."""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.control.messages import Command
from holdfast.errors import ConfigError, CoordinatorUnavailable

__all__ = ["EventQueue", "Item", "Preempt"]


class Preempt(enum.Enum):
    """What a notice to end leads to."""

    BEGIN = enum.auto()
    GIVE_UP = enum.auto()
    LEAVE = enum.auto()
    LEFT = enum.auto()


Item = Command | ConfigError | CoordinatorUnavailable | Preempt | Callable[[], None]
"""What the coordinator says, how its connection has ended, what comes of a notice, or what is to be done."""


@dataclass(slots=True)
class EventQueue:
    """A queue of items; what it hands out is handled by one thread."""

    _items: queue.SimpleQueue[Item | None] = field(default_factory=queue.SimpleQueue)

    def put(self, item: Item) -> None:
        """Adds one; may be called by a signal handler."""
        self._items.put(item)

    def wake(self) -> None:
        """Whoever waits looks about."""
        self._items.put(None)

    def put_later(self, delay_s: float, item: Item) -> None:
        """Adds one after a while; meanwhile whatever else comes is handled."""
        timer = threading.Timer(min(delay_s, threading.TIMEOUT_MAX), self.put, (item,))
        timer.daemon = True
        timer.start()

    def get(self, limit_s: float) -> Item | None:
        """Returns the next one; None if there is none within so many seconds, or somebody is to look about."""
        try:
            return self._items.get(timeout=limit_s)
        except queue.Empty:
            return None
