"""Processes that are forked from a process which does nothing else, and end with it.

It is forked from the script's process once, before that has threads or connections, and forks others from what it was
then: they hold the script's datasets, and nothing of the job's. One that died is forked anew from the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import InternalError, describe_exit
from holdfast.parent import end_with

__all__ = ["Nursery"]

_ASKED = struct.Struct("<q")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""May be sent to a whole group of processes: what they mean, the worker alone decides."""
_TRIES = 3
_NOT_MINE = 1 << 16
"""In place of a status: this process was forked by a predecessor, and ended with it."""


@dataclass(slots=True)
class Nursery:
    """Forks processes on request.

    Attributes:
        serve: what each of them does: it is given its connection and its number.
    """

    serve: Callable[[socket.socket, int], None]
    _pid: int = -1
    _link: socket.socket | None = None

    def start(self) -> None:
        """Forks the process that forks all others; it is sound as long as this one has no other thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def run() -> None:
            ours.close()  # else it would never see it closed
            _fork_others(theirs, self.serve)

        with theirs:
            self._pid = _fork(run)
        self._link = ours

    def spawn(self, number: int) -> tuple[int, socket.socket]:
        """Returns a new process, and the connection to it.

        Raises:
            InternalError: no process can be forked.
        """
        for _ in range(_TRIES):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                pid = self._ask(number, [theirs.fileno()])
            if pid is not None:
                return pid, ours
            ours.close()
            self.close()
            self.start()  # somebody has killed it; what has begun since then is inherited, as from a DataLoader's fork
        raise InternalError("loader processes cannot be forked")

    def ended(self, pid: int) -> str:
        """Waits until a process has ended; says how it did, for people."""
        status = self._ask(pid, [])
        return "with what had forked it" if status in (None, _NOT_MINE) else f"by {describe_exit(status)}"

    def close(self) -> None:
        """Has all of them end."""
        if self._link is not None:
            self._link.close()
            self._link = None
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _ask(self, number: int, descriptors: list[int]) -> int | None:
        assert self._link is not None, "it was started"
        try:
            socket.send_fds(self._link, [_ASKED.pack(number)], descriptors)
            told = self._link.recv(_ASKED.size)
        except ConnectionError:
            return None
        return int(_ASKED.unpack(told)[0]) if told else None


def _fork(run: Callable[[], None]) -> int:
    """Returns a child that ends with this process, and behind ``run``."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        if pid := os.fork():
            return pid
        _live(parent, run)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    raise InternalError("a child outlived its end")


def _live(parent: int, run: Callable[[], None]) -> None:
    try:
        end_with(parent)
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        run()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a process main: the stack belongs to the process that has forked it
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(1)


def _fork_others(link: socket.socket, serve: Callable[[socket.socket, int], None]) -> None:
    children: set[int] = set()
    while True:
        asked, descriptors, _, _ = socket.recv_fds(link, _ASKED.size, 1)
        if not asked:
            return
        (number,) = _ASKED.unpack(asked)
        if descriptors:
            children.add(answer := _fork_one(link, serve, descriptors[0], number))
        else:
            answer = _end(number) if number in children else _NOT_MINE
            children.discard(number)
        link.send(_ASKED.pack(answer))


def _end(child: int) -> int:
    os.kill(child, signal.SIGKILL)  # it may have closed its connection, and live
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fork_one(link: socket.socket, serve: Callable[[socket.socket, int], None], descriptor: int, number: int) -> int:
    with socket.socket(fileno=descriptor) as theirs:

        def run() -> None:
            link.close()
            serve(theirs, number)

        return _fork(run)
