"""Processes of other systems, as benchmarks start them and wait for what they print."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator

import psutil

__all__ = ["PeerFailed", "Processes"]


class PeerFailed(Exception):
    """A run of another system did not come to its end."""


class Processes(contextlib.AbstractContextManager["Processes"]):
    """Processes that we start, and that are all gone at the end, with their children.

    What they print goes into a file unless it is for us, as a pipe that nobody reads would stop them once it is full.

    Args:
        limit_s: for all of them together, seconds.
        environment: what they are given.
    """

    def __init__(self, limit_s: float, environment: dict[str, str]) -> None:
        self._deadline = time.monotonic() + limit_s
        self._environment = environment
        self._started: list[subprocess.Popen[str]] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__

    def start(self, command: list[str], *, talks: bool = False) -> subprocess.Popen[str]:
        """Starts a command with a pipe to its standard input, and from its output if it ``talks`` to us."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if talks else self._errors,
            stderr=self._errors,
            text=True,
            env=self._environment,
        )
        self._started.append(process)
        return process

    def line(self, process: subprocess.Popen[str]) -> str:
        """Returns the next line that a process prints; empty if it ended, or was ended at the time limit."""
        assert process.stdout is not None
        timer = threading.Timer(self._left(), process.kill)
        timer.start()
        try:
            text = process.stdout.readline()
        finally:
            timer.cancel()
        return text.strip()

    def lines(self, processes: list[subprocess.Popen[str]], expected: str, *, may_die: int = 0) -> None:
        """Waits until every process has printed ``expected``; no more than ``may_die`` may end instead."""
        found = [self.line(process) for process in processes]
        if sum(text != expected for text in found) > may_die:
            raise PeerFailed(f"expected {expected!r} of every process, got {found}: {self._said()}")

    def release(self, processes: list[subprocess.Popen[str]]) -> None:
        """Lets those that wait for a line go on."""
        for process in processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("go\n")
                process.stdin.flush()

    def wait(self, processes: list[subprocess.Popen[str]], *, may_die: int) -> None:
        """Waits until all have ended; no more than ``may_die`` of them may end with anything but 0."""
        for process in processes:
            try:
                process.wait(self._left())
            except subprocess.TimeoutExpired:
                raise PeerFailed(f"not done at the time limit: {self._said()}") from None
        codes = [process.returncode for process in processes]
        if sum(code != 0 for code in codes) > may_die:
            raise PeerFailed(f"exit codes {codes}: {self._said()}")

    def _left(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def _said(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if "Error" in line or "error" in line]
        return (lines or ["no error was printed"])[-1][:300]

    def __exit__(self, *exception: object) -> None:
        for process in self._started:
            for child in _family(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._errors.close()


def _family(pid: int) -> Iterator[psutil.Process]:
    """A process and all that it started, the children first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        yield from process.children(recursive=True)
        yield process
