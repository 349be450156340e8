"""What the child processes of all solvers share: the problem as they read it, and how they answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Problem", "answer"]


class Problem:
    """A problem of :func:`holdfast.planning.solvers.process.problem_of`; all times and memory are whole numbers.

    Attributes:
        given: the problem itself.
        visits: micro-batches times stages.
        stages: stages of a pipeline.
        kinds: kinds of operations: F and B, or F, I and W.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.visits = len(given["worker_of"])
        self.stages: int = given["stages"]
        self.kinds = 2 if given["coupled"] else 3

    def length(self, number: int) -> int:
        """Returns the time that an operation takes."""
        kind, visit = divmod(number, self.visits)
        return int(self.given["durations"][kind][visit % self.stages])

    def visits_of_workers(self) -> dict[int, list[int]]:
        """Returns the visits to every worker that has any."""
        found: dict[int, list[int]] = {}
        for visit, worker in enumerate(self.given["worker_of"]):
            found.setdefault(worker, []).append(visit)
        return found

    def waited_for(self, stage: int) -> list[int]:
        """Returns the visits to a stage and to those tied to it, which all come before its optimizer step."""
        return [visit for other in self.given["waits_for"][stage] for visit in range(other, self.visits, self.stages)]

    def stage_of(self, worker: int) -> int:
        """Returns the stage of a worker."""
        return int(worker // self.given["pipelines"])


def answer(solve: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Reads a problem as JSON from stdin, solves it and prints what was found, as JSON."""
    json.dump(solve(json.load(sys.stdin)), sys.stdout)
