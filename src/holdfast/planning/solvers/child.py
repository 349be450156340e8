"""What the child processes of all solvers share: the problem as they read it, and how they answer."""

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
        kinds: kinds of operations: F and B, or F, I and W.
        begins: the first visits of all micro-batches.
        ends: their last visits.
        part: the part of every visit.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.visits = len(given["worker_of"])
        self.kinds = 2 if given["coupled"] else 3
        self.begins = frozenset(first for first, _ in given["journeys"])
        self.ends = frozenset(stop - 1 for _, stop in given["journeys"])
        self.part: list[int] = given["part_of"]

    def length(self, number: int) -> int:
        """Returns the time that an operation takes."""
        kind, visit = divmod(number, self.visits)
        return int(self.given["durations"][kind][self.part[visit]])

    def delay(self, visit: int) -> int:
        """Returns the time of a message between a visit and the next of the same micro-batch."""
        return int(self.given["comm"][self.part[visit]])

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

    def visits_of_groups(self) -> list[list[int]]:
        """Returns the visits to workers of group 0, 1, ..."""
        found: list[list[int]] = [[] for _ in self.given["optimizer"]]
        for visit, worker in enumerate(self.given["worker_of"]):
            found[self.group_of(worker)].append(visit)
        return found

    def group_of(self, worker: int) -> int:
        """Returns the group of a worker."""
        return int(self.given["group_of"][worker])

    def first_step(self) -> int:
        """Returns the shortest optimizer step of those who have the first layer."""
        workers = self.given["worker_of"]
        return min(int(self.given["optimizer"][self.group_of(workers[visit])]) for visit in self.begins)


def answer(solve: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Reads a problem as JSON from stdin, solves it and prints what was found, as JSON.

    Ends with the process that asks, whose number is the first argument: nobody else would read the answer.
    """
    with contextlib.suppress(AttributeError, OSError):  # where there is no such call, its time limit ends it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    json.dump(solve(json.load(sys.stdin)), sys.stdout)
