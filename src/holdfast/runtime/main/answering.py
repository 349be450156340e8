"""Signals that are answered at once, in a thread of their own.

The kernel may hand a signal to any thread, and Python runs its handler in the main one, once that runs again. While
that waits, which the one of a spare does for hours, a notice to go would not be heard.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

__all__ = ["AnsweringThread"]


class AnsweringThread:
    """Waits for signals; made in the main thread, once in a process.

    What this process forks is not heard for it.
    """

    def __init__(self) -> None:
        self._answers: dict[int, Callable[[], None]] = {}
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        self._take_descriptor(self._told.fileno())
        os.register_at_fork(after_in_child=self._let_go)
        threading.Thread(target=self._answer_all, name="signals", daemon=True).start()

    def answer(self, number: int, answer: Callable[[], None]) -> None:
        """From now on answers a signal; ``answer`` is called in any thread, and may be interrupted by nothing."""
        self._answers[number] = answer
        signal.signal(number, self._in_main_thread)

    def _answer_all(self) -> None:
        while numbers := self._heard.recv(64):
            for number in numbers:
                if (answer := self._answers.get(number)) is not None:
                    answer()

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        """Where a script has the descriptor for itself, as asyncio may take it, nobody else has heard it."""
        ours = self._told.fileno()
        if (taken := self._take_descriptor(ours)) != ours:
            self._take_descriptor(taken)
            self._answers[number]()

    def _let_go(self) -> None:
        with suppress(ValueError):  # it was another interpreter's
            if (taken := self._take_descriptor(-1)) != self._told.fileno():
                self._take_descriptor(taken)

    @staticmethod
    def _take_descriptor(descriptor: int) -> int:
        """Which one is told the number of each signal from now on; returns the one before."""
        return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
