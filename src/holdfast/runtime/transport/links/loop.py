"""One thread that waits: for sockets, for moments, and for what other threads want done."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

__all__ = ["READ", "WRITE", "Connection", "EventLoop", "LoopTimer", "watched"]

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Connection(Protocol):
    """What a loop has to know of a socket."""

    def fileno(self) -> int:
        """Returns its descriptor; -1: it is closed."""

    def close(self) -> None:
        """Closes it."""


@dataclass(slots=True, eq=False)
class LoopTimer:
    """Something that is done later: ``work``, at ``moment`` of the monotonic clock, seconds."""

    moment: float
    work: Callable[[], None]


class EventLoop:
    """What one thread does from ``run`` to ``end``. Only ``do`` and ``end`` are for other threads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._todo: deque[Callable[[], None]] = deque()
        self._timers: dict[LoopTimer, None] = {}
        self._ended = False
        _loops.add(self)
        self._alarm, alarmed = socket.socketpair()
        for end in (self._alarm, alarmed):
            end.setblocking(False)
        self.watch(alarmed, READ, lambda _: alarmed.recv(4096))

    def do(self, work: Callable[[], None]) -> None:
        """Has something done by the loop's thread, after what has arrived by then."""
        self._todo.append(work)
        with contextlib.suppress(OSError):  # it has been woken often enough; or it is no more
            self._alarm.send(b"!")

    def end(self) -> None:
        """Lets ``run`` return."""
        self._ended = True
        self.do(lambda: None)

    def run(self) -> None:
        """Serves all sockets and timers until ``end``; raises what any of them raises."""
        while not self._ended:
            for key, events in self._selector.select(self._patience()):
                if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # else one before it has closed it
                    key.data(events)
            for _ in range(len(self._todo)):
                self._todo.popleft()()
            if self._timers:
                self._pass_time()

    def descriptors(self) -> tuple[int, ...]:
        """Returns the descriptors of all sockets that are watched."""
        return tuple(key.fd for key in list((self._selector.get_map() or {}).values()))

    def close(self) -> None:
        """Closes all sockets that are watched."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._alarm.close()
        self._selector.close()

    def watch(self, connection: Connection, events: int, then: Callable[[int], object]) -> None:
        """Calls ``then`` whenever a socket is ready for some of ``events``, READ and WRITE, with these."""
        if connection in self._selector.get_map():
            self._selector.modify(connection, events, then)
        else:
            self._selector.register(connection, events, then)

    def forget(self, connection: Connection) -> None:
        """Watches a socket no more, if it did."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def hang_up(self, connection: Connection) -> None:
        """Watches a socket no more, and closes it."""
        self.forget(connection)
        connection.close()

    def after(self, seconds: float, work: Callable[[], None]) -> LoopTimer:
        """Has something done once so many seconds are over."""
        timer = LoopTimer(time.monotonic() + seconds, work)
        self._timers[timer] = None
        return timer

    def cancel(self, timer: LoopTimer) -> None:
        """Has it not done, if it was not yet."""
        self._timers.pop(timer, None)

    def _patience(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(timer.moment for timer in self._timers) - time.monotonic())

    def _pass_time(self) -> None:
        now = time.monotonic()
        for timer in [each for each in self._timers if each.moment <= now]:
            if timer in self._timers:  # none before it has cancelled it
                del self._timers[timer]
                timer.work()


_loops: WeakSet[EventLoop] = WeakSet()


def watched() -> tuple[int, ...]:
    """Returns the descriptors that the loops of this process watch."""
    return tuple(descriptor for loop in list(_loops) for descriptor in loop.descriptors())
