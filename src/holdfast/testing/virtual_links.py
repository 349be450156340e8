"""The connections between a simulated coordinator and its processes: each delivers in order, until it breaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from holdfast.control.decider import Happening
from holdfast.control.membership import Closed
from holdfast.control.messages import Dormant, Heartbeat, Leaving, Message, Strike
from holdfast.core.nodes import NodeId, Process
from holdfast.testing.scenario import Range
from holdfast.testing.virtual_time import VirtualTime

__all__ = ["ControlLinks", "agent_number"]

_PID = 7
"""Of all processes, as in containers: nothing may go by it."""


def agent_number(number: int) -> Process:
    """Returns the process of an agent, counted from 0."""
    node = NodeId(name=f"node-{number}", nonce=f"{number:016x}")
    return Process(node, _PID, node.nonce)


def _is_agent(process: Process) -> bool:
    return process.nonce == process.node.nonce


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
        self._open: set[Process] = set()
        self._number: dict[Process, int] = defaultdict(int)
        self._outboxes: dict[Process, list[Message]] = defaultdict(list)

    def is_open(self, process: Process) -> bool:
        """Whether a process has a connection."""
        return process in self._open

    def open(self, process: Process, hello: Message) -> None:
        """A process connects, if it can: it says where it stands, and what it could not say before."""
        if not self._listens():
            return
        if process in self._open:  # a newer connection replaces it
            self.cut(process)
        self._open.add(process)
        for message in (hello, *self._outboxes.pop(process, ())):
            self.say(process, message)

    def say(self, process: Process, message: Message) -> None:
        """A process sends; while it has no connection, its messages wait, but for what its hello says too."""
        if process in self._open:
            self._carry(process, "up", lambda: self._up(message))
        elif not _is_agent(process) and not isinstance(message, Heartbeat | Strike | Leaving | Dormant):
            self._outboxes[process].append(message)

    def tell(self, process: Process, deliver: Callable[[], None]) -> None:
        """The coordinator sends to a process that has a connection."""
        if process in self._open:
            self._carry(process, "down", deliver)

    def hang_up(self, process: Process, closed: Closed) -> None:
        """A process is gone: its connection closes, after what it had sent, before or after its end is told."""

        def close() -> None:
            self.cut(process)
            self._up(closed)

        if process in self._open:
            self._carry(process, "up", close)

    def cut(self, process: Process) -> None:
        """A connection breaks."""
        self._open.discard(process)
        self._number[process] += 1

    def cut_all(self) -> None:
        """The coordinator is gone."""
        for process in tuple(self._open):
            self.cut(process)

    def _carry(self, process: Process, direction: str, act: Callable[[], None]) -> None:
        number = self._number[process]

        def arrive() -> None:
            if number == self._number[process]:
                act()

        self._time.after(self._time.draw(self._delay), arrive, channel=(direction, process))
