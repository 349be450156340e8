"""Trackers that a job names: a process of their own, ``holdfast track``, tells them, and nothing waits for that."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

__all__ = ["SAID", "tracked"]

SAID = "trackers.log"
"""What that process says, in the run directory."""
_COMPLAINS = "holdfast: "
_END_S, _STOP_S, _LOOK_S = 8.0, 5.0, 0.1
"""Who asks for the summary meanwhile waits longer (train.py)."""


@contextlib.contextmanager
def tracked(
    run_dir: Path,
    names: Sequence[str],
    say: Callable[[str], None],
    waits: Callable[[], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Has trackers told of the run in a directory while the block runs; behind it they are waited for, not for ever.

    Args:
        run_dir: where the run will be; it exists.
        names: of the trackers; none: nothing is done.
        say: told what is wrong with them, in a thread of its own.
        waits: called when nothing but them is waited for.
        interrupted: whether even they are not to be waited for any more.
    """
    if not names:
        yield
        return
    try:
        told = _start(run_dir, names)
    except OSError as error:
        say(f"trackers: cannot be started: {error}")
        yield
        return
    ended = threading.Event()
    watching = threading.Thread(target=_watch, args=(told, run_dir / SAID, say, ended), name="trackers", daemon=True)
    watching.start()
    try:
        yield
    except BaseException:
        _stop(told, ended)
        raise
    if not ended.is_set():
        waits()
    until = time.monotonic() + _END_S
    while not ended.wait(_LOOK_S) and not interrupted() and time.monotonic() < until:
        pass
    if not ended.is_set():
        say(f"trackers have not been told all within {_END_S:g} s: `holdfast track {run_dir}` goes on with them")
        _stop(told, ended)


def _start(run_dir: Path, names: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "holdfast", "track", str(run_dir.absolute())]
    command += [part for name in names for part in ("--to", name)]
    with (run_dir / SAID).open("ab") as out:  # a Ctrl-C is for us, who end it
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def _watch(told: subprocess.Popen[bytes], said: Path, say: Callable[[str], None], ended: threading.Event) -> None:
    """Says so once it has ended otherwise than it should: it has complained, or there was no time for that."""
    code, lines = told.wait(), list[str]()
    with contextlib.suppress(OSError):
        lines = said.read_text(errors="replace").splitlines()
    complaints = [line.removeprefix(_COMPLAINS) for line in lines if line.startswith(_COMPLAINS)]
    if code not in (0, 1, 128 + signal.SIGTERM, -signal.SIGTERM):
        complaints = complaints or [*lines[-1:], f"exit status {code}"]
    if complaints:
        say(f"trackers: {'; '.join(complaints[-3:])} ({said})")
    ended.set()


def _stop(told: subprocess.Popen[bytes], ended: threading.Event) -> None:
    """Ends it, with time to close its trackers."""
    told.terminate()
    if not ended.wait(_STOP_S):
        told.kill()
        ended.wait(_STOP_S)
