"""What a process is told that is to be struck."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId

__all__ = ["WorkerFaults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFaults:
    """What is to happen to one worker.

    Attributes:
        faults: its own.
        steps: in which somebody is struck, who waits until all others are in it.
        witnesses: the workers that live through faults in the middle of sums; none if there are no such faults.
        fellows: of a worker that is struck there, those that are in the same step.
    """

    faults: tuple[Fault, ...]
    steps: frozenset[int] = frozenset()
    witnesses: tuple[WorkerId, ...] = ()
    fellows: tuple[WorkerId, ...] = ()
