"""The processes that this one started: each attended to its end, when all that was held for it is given back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from holdfast.runtime.node.forks import SERVER, ForkedProcess, is_gone
from holdfast.runtime.node.kin import below, end_all, in_session, send

__all__ = ["KILLED_S", "Child", "Children"]

KILLED_S = 3.0
"""The kernel ends what is killed within milliseconds; a machine on which all wait for the processor needs longer."""
_LOOK_S = 0.02


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A process that was started.

    Attributes:
        pid: its number.
        name: what it is, for people.
        ended: set once it has ended, and ``status`` is known.
        status: its exit code, or minus the signal's number; None while it lives.
    """

    pid: int
    name: str
    ended: threading.Event = field(default_factory=threading.Event)
    status: int | None = None


@dataclass(slots=True, kw_only=True)
class Children:
    """All processes that were started here and have not ended; others are not even remembered.

    Attributes:
        process: makes one, given what :class:`multiprocessing.Process` is given.
    """

    process: Callable[..., BaseProcess] = ForkedProcess
    _living: dict[Child, BaseProcess] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, main: Callable[..., None], *arguments: Any, name: str) -> Child:
        """Starts a process; it is to be attended to next."""
        process = self.process(target=main, args=arguments, name=f"holdfast-{name}", daemon=True)
        process.start()
        child = Child(pid=process.pid or 0, name=name)
        with self._changed:
            self._living[child] = process
        return child

    def attend(self, child: Child, on_end: Callable[[Child], None] = lambda child: None) -> None:
        """From now on, takes note of its end within milliseconds; calls ``on_end`` then, in a thread of its own.

        Whatever else is left in its session is ended next.
        """
        thread = threading.Thread(target=self._attend, args=(child, on_end), name=f"reaper-{child.name}", daemon=True)
        thread.start()

    def _attend(self, child: Child, on_end: Callable[[Child], None]) -> None:
        process = self._living[child]
        wait([process.sentinel])
        process.join()
        child.status = process.exitcode or 0
        child.ended.set()
        on_end(child)
        end_all(partial(in_session, child.pid))  # what it has started ends with it
        with self._changed:
            SERVER.forget(child.pid)
            del self._living[child]
            process.close()
            self._changed.notify_all()

    def kill(self, child: Child) -> None:
        """Ends it, unless it has ended."""
        with self._changed:
            if child in self._living:
                self._living[child].kill()

    def terminate(self, child: Child) -> None:
        """Tells it to go (SIGTERM), unless it has ended."""
        with self._changed:
            if child in self._living and not child.ended.is_set():
                self._living[child].terminate()

    def end(self, grace_s: float = 0.0) -> tuple[Child, ...]:
        """Ends all, and all that they have started, in limited time, whatever state they or their server are in.

        Args:
            grace_s: how long they may take to end by themselves.

        Returns:
            Those that not even the kernel could end.
        """
        with self._changed:
            left = tuple(self._living)
        if not self._all_ended(grace_s):
            for child in left:
                self.kill(child)
        if self._all_ended(KILLED_S):
            SERVER.end_orphans()
            return ()
        started = () if SERVER.pid is None else below(SERVER.pid)
        SERVER.kill()  # it is stopped, so nobody hears of anybody's end; nor can it serve anyone
        for each in started:
            send(each, signal.SIGKILL)
        until = time.monotonic() + KILLED_S
        while time.monotonic() < until and not all(is_gone(child.pid) for child in left):
            time.sleep(_LOOK_S)
        return tuple(child for child in left if not is_gone(child.pid))

    def _all_ended(self, limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._living, limit_s)
