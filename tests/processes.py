"""Processes, and their names, for tests."""

import psutil

from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process

NODE = NodeId(name="here", nonce=16 * "a")


def process_of(worker: WorkerId | None, number: int) -> Process:
    """Returns a process of a worker, or of the agent; all have the same pid, as those in containers may."""
    pipeline, stage = (0, 0) if worker is None else (1 + worker.pipeline, worker.stage)
    return Process(NODE, 7, f"{pipeline:05x}{stage:05x}{number:06x}")


def named(process: Process) -> tuple[WorkerId, int]:
    """Returns what ``process_of`` was given."""
    pipeline, stage, number = (
        int(digits, 16) for digits in (process.nonce[:5], process.nonce[5:10], process.nonce[10:])
    )
    return WorkerId(pipeline - 1, stage), number


def lives(process):
    """Whether a process (one of psutil's, or its pid) is neither gone nor dead; it may go while it is looked at."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
