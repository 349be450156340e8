"""Trackers that a job names: a process of their own, ``holdfast track``, tells them, and nothing waits for that."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

__all__ = ["SAID", "tracked"]

SAID = "trackers.log"
"""What that process says, in the run directory."""
_END_S = 30.0
_STOP_S = 5.0


@contextlib.contextmanager
def tracked(
    run_dir: Path, names: Sequence[str], say: Callable[[str], None], waits: Callable[[], None]
) -> Iterator[None]:
    """Has trackers told of the run in a directory while the block runs; behind it they are waited for, not for ever.

    Args:
        run_dir: where the run will be; it exists.
        names: of the trackers; none: nothing is done.
        say: told what is wrong with them, in a thread of its own.
        waits: called when nothing but them is waited for.
    """
    if not names:
        yield
        return
    command = [sys.executable, "-m", "holdfast", "track", str(run_dir.absolute())]
    command += [part for name in names for part in ("--to", name)]
    with (run_dir / SAID).open("ab") as out:  # a Ctrl-C is for us, who end it
        told = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
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
    if not ended.wait(_END_S):
        say(f"trackers have not been told all within {_END_S:g} s: `holdfast track {run_dir}` goes on with them")
        _stop(told, ended)


def _watch(told: subprocess.Popen[bytes], said: Path, say: Callable[[str], None], ended: threading.Event) -> None:
    """Says so once it has ended otherwise than it should."""
    code = told.wait()
    if code not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
        with contextlib.suppress(OSError):
            lines = said.read_text(errors="replace").splitlines()
            complaints = [line for line in lines if line.startswith("holdfast: ")] or lines[-1:]
            say(f"trackers: {'; '.join(complaints[-3:]).replace('holdfast: ', '')} ({said})")
    ended.set()


def _stop(told: subprocess.Popen[bytes], ended: threading.Event) -> None:
    """Ends it, with time to close its trackers."""
    told.terminate()
    if not ended.wait(_STOP_S):
        told.kill()
        ended.wait(_STOP_S)
