"""What signals mean to a job: its end at once, a notice of it, or a pause."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from holdfast.runtime.node.forks import SERVER
from holdfast.runtime.node.kin import send, stop_below

__all__ = ["ONE_NOTICE_S", "Interrupted", "Signals", "notice_from_cloud"]

ONE_NOTICE_S = 1.0
"""So long after the first one, more of them are the same notice: it is sent to a process and then to its group, say."""
_NOTICES = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What a service manager, a terminal that is closed or a batch system sends before it ends a job."""


class _Cloud:
    """Whether the next SIGTERM is a notice of :func:`notice_from_cloud`."""

    speaks = False


def notice_from_cloud() -> None:
    """Sends this process SIGTERM, for a cloud that takes its machine away: the system may send it for that, too."""
    _Cloud.speaks = True
    os.kill(os.getpid(), signal.SIGTERM)


class Interrupted(Exception):
    """The user or the system asked the job to end.

    Attributes:
        signal_number: SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2.
        told: what a person should know of it besides; empty if nothing.
    """

    def __init__(self, signal_number: int, told: str = "") -> None:
        self.signal_number = signal_number
        self.told = told
        super().__init__(signal.Signals(signal_number).name)


@dataclass(slots=True, kw_only=True)
class Signals:
    """The signals that a job's first process answers.

    Attributes:
        interrupted: what ends the job at once; None as long as nothing does.
        notice: the first signal that was a notice to end; None: there was none.
    """

    interrupted: Interrupted | None = None
    notice: int | None = None
    _noticed: float = -math.inf
    _on_notice: Callable[[], None] | None = None
    _wake: Callable[[], None] = lambda: None
    _thinking: bool = False
    _said_twice: bool = False
    """Whether one more SIGTERM is the notice that a cloud has given already."""

    def check(self) -> None:
        """Raises Interrupted if a signal came that ends the job."""
        if self.interrupted is not None:
            raise self.interrupted

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Turns signals into Interrupted in the waiting thread, or into a pause; only where we are the main thread.

        One that is ignored, as SIGINT is in a job that a shell started in the background, stays so; and a program that
        handles another one than SIGINT and SIGTERM itself goes on to.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: lambda number, _: self._interrupt(number),
            **dict.fromkeys(_NOTICES, lambda number, _: self._take_notice(number)),
            signal.SIGTSTP: lambda *_: _pause(),
        }
        before = {number: signal.getsignal(number) for number in handlers}
        taken = [number for number, handler in before.items() if _is_free(number, handler)]
        for number in taken:
            signal.signal(number, handlers[number])
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    @contextlib.contextmanager
    def heard(self, *, on_notice: Callable[[], None] | None, wake: Callable[[], None]) -> Iterator[None]:
        """Meanwhile somebody wants to know at once.

        Args:
            on_notice: called at the first notice, which then does not end the job; None: it ends it.
            wake: called at what ends the job.
        """
        self._on_notice, self._wake = on_notice, wake
        try:
            yield
        finally:
            self._on_notice, self._wake = None, lambda: None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Interrupts at once, wherever it may be, what takes long and holds nothing."""
        self._thinking = True
        try:
            self.check()
            yield
        finally:
            self._thinking = False

    def _take_notice(self, number: int) -> None:
        """A checkpoint is made first, where that can be. Of what comes within a moment of the first, it is all one."""
        now = time.monotonic()
        by_cloud, _Cloud.speaks = _Cloud.speaks, False
        self._said_twice = self._said_twice or by_cloud
        if now - self._noticed < ONE_NOTICE_S or (by_cloud and self.notice is not None):
            self._said_twice = self._said_twice and (by_cloud or number != signal.SIGTERM)
            return
        if (tell := self._on_notice) is not None:
            self._on_notice, self.notice, self._noticed = None, number, now
            tell()
        elif number == signal.SIGTERM and self.notice is not None and self._said_twice and not by_cloud:
            self._said_twice, self._noticed = False, now
        elif self.notice is None or number == signal.SIGTERM:  # the others are never sent twice to say it once more
            self._noticed = now
            self._interrupt(number)

    def _interrupt(self, number: int) -> None:
        """The job ends at once."""
        self.interrupted = Interrupted(number)
        self._wake()
        if self._thinking:
            raise self.interrupted


def _is_free(number: signal.Signals, handler: object) -> bool:
    """Whether we may answer a signal, given who does so now."""
    if number in (signal.SIGINT, signal.SIGTERM):
        return handler is not signal.SIG_IGN
    return handler is signal.SIG_DFL or getattr(handler, "__module__", "") == "holdfast.cli.main"


def _pause() -> None:
    """Ctrl-Z stops the job with us, whose processes the terminal does not signal, until we go on."""
    stopped = () if SERVER.pid is None else stop_below(SERVER.pid)
    os.kill(os.getpid(), signal.SIGSTOP)
    for each in stopped:
        send(each, signal.SIGCONT)
