"""The other processes of a worker of several GPUs: forked by it before anything else, and gone when it goes.

The worker and its companions are one: one name, one process that the agent knows, fenced as one. Companions ask the
kernel for SIGKILL when the worker ends. When one of them ends, so does the worker, and is lost.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.parent import end_with
from holdfast.runtime.engine.sharded.ranks import Ranks

__all__ = ["Companions", "fork_companions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """The companions of this process.

    Attributes:
        size: ranks of the stage, this process included.
        meeting: the file where they find one another.
        pids: their processes.
        told: by rank from 1 on, what reads why one has stopped; it ends with the process.
    """

    size: int
    meeting: Path
    pids: tuple[int, ...]
    told: tuple[int, ...]

    def watch(self, on_raised: Callable[[str], None], on_ended: Callable[[str], None]) -> None:
        """From now on calls ``on_raised`` with what a companion stopped of, or ``on_ended`` if it was ended."""
        for rank, (pid, reader) in enumerate(zip(self.pids, self.told, strict=True), start=1):
            arguments = (rank, pid, reader, on_raised, on_ended)
            threading.Thread(target=_watch, args=arguments, name=f"companion {rank}", daemon=True).start()

    def meet(self) -> Ranks:
        """Waits until all have come; returns the stage's ranks, of which this process leads."""
        try:
            return Ranks(0, self.size, self.meeting)
        finally:
            shutil.rmtree(self.meeting.parent, ignore_errors=True)


def fork_companions(size: int, accompany: Callable[[Ranks], None]) -> Companions:
    """Forks the companions of this process, which may not have any thread yet.

    Args:
        size: ranks of the stage, this process included.
        accompany: what a companion does, given its rank; it does not return.
    """
    meeting = Path(tempfile.mkdtemp(prefix="holdfast-stage-")) / "ranks"
    leader, pids, told = os.getpid(), [], []
    for rank in range(1, size):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            _be_companion(rank, size, meeting, leader, writer, accompany)
        os.close(writer)
        pids.append(pid)
        told.append(reader)
    return Companions(size=size, meeting=meeting, pids=tuple(pids), told=tuple(told))


def _be_companion(
    rank: int, size: int, meeting: Path, leader: int, writer: int, accompany: Callable[[Ranks], None]
) -> None:
    """Runs a companion to its end. What stops it is told to the leader, who ends it."""
    end_with(leader)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a notice to go is the leader's
    try:
        accompany(Ranks(rank, size, meeting))
    except BaseException as error:  # noqa: BLE001 - a process main: whatever it is, it is told
        with os.fdopen(writer, "w") as pipe, _whatever_comes():
            pipe.write(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    while True:
        signal.pause()


@contextmanager
def _whatever_comes() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # the leader is gone, and so are we in a moment
        print(f"holdfast: a companion cannot tell its leader: {error}", file=sys.stderr)


def _watch(rank: int, pid: int, reader: int, on_raised: Callable[[str], None], on_ended: Callable[[str], None]) -> None:
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    if text:
        on_raised(f"on GPU {rank} of its stage: {text}")
    else:
        on_ended(f"the process of GPU {rank} of its stage, {pid}, has ended")
