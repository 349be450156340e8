"""What stands in for the process that computes a run's hashes, to see what becomes of one that dies: it really does."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def die_the_first_time(directory, answer):
    """Answers when it is asked again."""
    died = Path(directory) / "died"
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    answer.send_bytes(b"ok weights state")


def die_every_time(directory, answer):
    """Never answers."""
    with (Path(directory) / "deaths").open("a") as file:
        file.write("died\n")
    os.kill(os.getpid(), signal.SIGKILL)
