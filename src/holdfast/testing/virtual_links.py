"""The connections between a simulated coordinator and its processes: each delivers in order, until it breaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from holdfast.control.decider import Happening
from holdfast.control.membership import Closed
from holdfast.control.messages import Dormant, Heartbeat, Leaving, Message, Strike
from holdfast.testing.scenario import Range
from holdfast.testing.virtual_time import VirtualTime

__all__ = ["AGENT", "ControlLinks"]

AGENT = 0
"""The number of the agent's process."""


class ControlLinks:
    """What is on its way over a connection that breaks is lost, in both directions.

    Args:
        time: that a message takes.
        delay: how much of it.
        up: takes what the coordinator is sent.
        listens: whether there is a coordinator.
    """

    def __init__(
        self, time: VirtualTime, delay: Range, up: Callable[[Happening], None], listens: Callable[[], bool]
    ) -> None:
        self._time = time
        self._delay = delay
        self._up = up
        self._listens = listens
        self._open: set[int] = set()
        self._number: dict[int, int] = defaultdict(int)
        self._outboxes: dict[int, list[Message]] = defaultdict(list)

    def is_open(self, pid: int) -> bool:
        """Whether a process has a connection."""
        return pid in self._open

    def open(self, pid: int, hello: Message) -> None:
        """A process connects, if it can: it says where it stands, and what it could not say before."""
        if not self._listens():
            return
        if pid in self._open:  # a newer connection replaces it
            self.cut(pid)
        self._open.add(pid)
        for message in (hello, *self._outboxes.pop(pid, ())):
            self.say(pid, message)

    def say(self, pid: int, message: Message) -> None:
        """A process sends; while it has no connection, its messages wait, but for what its hello says too."""
        if pid in self._open:
            self._carry(pid, "up", lambda: self._up(message))
        elif pid != AGENT and not isinstance(message, Heartbeat | Strike | Leaving | Dormant):
            self._outboxes[pid].append(message)

    def tell(self, pid: int, deliver: Callable[[], None]) -> None:
        """The coordinator sends to a process that has a connection."""
        if pid in self._open:
            self._carry(pid, "down", deliver)

    def hang_up(self, pid: int, closed: Closed) -> None:
        """A process is gone: its connection closes, after what it had sent, before or after its end is told."""

        def close() -> None:
            self.cut(pid)
            self._up(closed)

        if pid in self._open:
            self._carry(pid, "up", close)

    def cut(self, pid: int) -> None:
        """A connection breaks."""
        self._open.discard(pid)
        self._number[pid] += 1

    def cut_all(self) -> None:
        """The coordinator is gone."""
        for pid in tuple(self._open):
            self.cut(pid)

    def _carry(self, pid: int, direction: str, act: Callable[[], None]) -> None:
        number = self._number[pid]

        def arrive() -> None:
            if number == self._number[pid]:
                act()

        self._time.after(self._time.draw(self._delay), arrive, channel=(direction, pid))
