"""The ``holdfast`` command: answers signals first, and only then loads what takes long to load."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType

__all__ = ["main"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Args:
        argv: what follows the name of the command; None takes the process's own arguments, and its signals.
    """
    if argv is None:
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job in the background: left to whoever set it
                signal.signal(number, _end)
    from holdfast.cli.commands import run_command  # not before: it loads a second's worth of code

    return run_command(argv)


def _end(number: int, frame: FrameType | None) -> None:
    """Ends this process, which nothing outlives: the kernel ends whatever it started together with it."""
    os.write(2, _last_line(number))
    os._exit(128 + number)


def _last_line(number: int) -> bytes:
    fresh = "\r\x1b[K" if os.isatty(2) else ""  # instead of a progress line that may stand there
    return f"{fresh}holdfast: {signal.Signals(number).name}: every process is ended\n".encode()
