"""What a solver's process is told, and how it answers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1
__all__ = ["Given", "answer"]


class Given:
    """A problem of :func:`holdfast.planning.solvers.process.given_of`; all times and memory are whole numbers.

    Attributes:
        given: the problem itself.
        visits: how many.
        part: the part of every visit.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.visits = len(given["worker_of"])
        self.part: list[int] = given["part_of"]

    def routes(self) -> dict[tuple[tuple[int, int], ...], list[int]]:
        """Returns the first visits of the micro-batches of every route: of equal workers and parts, in order."""
        found: dict[tuple[tuple[int, int], ...], list[int]] = {}
        visits = list(zip(self.given["worker_of"], self.part, strict=True))
        for first, stop in self.given["journeys"]:
            found.setdefault(tuple(visits[first:stop]), []).append(first)
        return found

    def visits_of_workers(self) -> dict[int, list[int]]:
        """Returns the visits to every worker that has any."""
        found: dict[int, list[int]] = {}
        for visit, worker in enumerate(self.given["worker_of"]):
            found.setdefault(worker, []).append(visit)
        return found

    def group_of(self, worker: int) -> int:
        """Returns the group of a worker."""
        return int(self.given["group_of"][worker])

    def first_step(self) -> int:
        """Returns the shortest optimizer step of those who have the first layer."""
        workers = self.given["worker_of"]
        return min(int(self.given["optimizer"][self.group_of(workers[visit])]) for visit, _ in self.given["journeys"])


def answer(solve: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Reads a problem as JSON from stdin, solves it and prints what was found, as JSON.

    Ends with the process that asks, whose number is the first argument: nobody else would read the answer.
    """
    with contextlib.suppress(AttributeError, OSError):  # where there is no such call, its time limit ends it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    json.dump(solve(json.load(sys.stdin)), sys.stdout)
