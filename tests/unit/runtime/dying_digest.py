"""What stands in for the process that computes a run's hashes, to see what becomes of one that dies: it really does."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

from holdfast.runtime.main.lookups import answering


def die_the_first_time(directory, answer):
    """Answers when it is asked again."""
    died = Path(directory) / "died"
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    answer.send_bytes(b"ok weights state")


def die_every_time(directory, answer):
    """Never answers."""
    note(directory, "died")
    os.kill(os.getpid(), signal.SIGKILL)


def raise_every_time(directory, answer):
    """The disk cannot be read."""
    note(directory, "raised")

    def work():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    answering(answer, work)


def hang_every_time(directory, answer):
    """Neither answers nor ends."""
    note(directory, str(os.getpid()))
    time.sleep(600)


def kill_the_server(directory, answer):
    """Dies with what it was forked from."""
    note(directory, "killed")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def note(directory, text):
    """Leaves a line."""
    with (Path(directory) / "deaths").open("a") as file:
        file.write(f"{text}\n")
