"""The child process that solves a schedule with the paper's mixed-integer programme: for the tiniest cases.

A problem as JSON on stdin, the best found on stdout, as in :mod:`holdfast.planning.solvers.cp_sat`. There is one
ordering variable for every two operations of a worker, so a hundred operations per worker are too many.

Source:
    SlipStream, section 4.2.2, equations 1 to 6, with the staggered period as another objective. Equation 2 needs the
    forward of the stage before, 3 the backward of the stage after, 4 has W after I, 5 forbids overlaps with a large
    constant, 6 limits the memory at every F by what comes before it.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from ortools.linear_solver import pywraplp

from holdfast.planning.solvers.child import Problem, answer

__all__ = ["solve"]


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Returns ``{"status", "value", "bound", "starts"}``; ``starts`` is empty if nothing was found.

    Args:
        problem: as :func:`holdfast.planning.solvers.process.problem_of` makes it.
    """
    model = _Model(problem)
    model.solver.set_time_limit(int(problem["time_limit_s"] * 1000))
    status = model.solver.Solve()
    found = status in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE)
    objective = model.solver.Objective()
    return {
        "status": "OPTIMAL" if status == pywraplp.Solver.OPTIMAL else "FEASIBLE" if found else "UNKNOWN",
        "value": round(objective.Value()) if found else None,
        "bound": -int(-objective.BestBound() // 1) if found else 0,
        "starts": model.starts() if found else [],
    }


class _Model:
    def __init__(self, problem: dict[str, Any]) -> None:
        self._p, shared = problem, Problem(problem)
        self._visits, self._stages, self._kinds = shared.visits, shared.stages, shared.kinds
        self._length, self._shared = shared.length, shared
        self._large = problem["horizon"]
        self.solver = pywraplp.Solver.CreateSolver("SCIP")
        count = self._kinds * self._visits
        self._ends = [self.solver.NumVar(self._length(n), self._large, f"e{n}") for n in range(count)]
        self._after: dict[tuple[int, int], Any] = {}
        self._add_needs()
        self._add_workers()
        self._add_objective()

    def starts(self) -> list[int]:
        """The starts of all operations as whole numbers, for orders as solved."""
        found = [round(end.solution_value()) - self._length(number) for number, end in enumerate(self._ends)]
        return found + [0] * (3 * self._visits - len(found))

    def _follows(self, later: int, earlier: int, delay: int) -> None:
        self.solver.Add(self._ends[later] >= self._ends[earlier] + delay + self._length(later))

    def _add_needs(self) -> None:
        for visit in range(self._visits):
            stage, back = visit % self._stages, visit + self._visits
            if stage < self._stages - 1:
                self._follows(visit + 1, visit, self._p["comm"][stage])
                self._follows(back, back + 1, self._p["comm"][stage])
            self._follows(back, visit, 0)
            if self._kinds == 3:
                self._follows(back + self._visits, back, 0)

    def _add_workers(self) -> None:
        for worker, visits in self._shared.visits_of_workers().items():
            row = [visit + kind * self._visits for visit in visits for kind in range(self._kinds)]
            for first, second in combinations(row, 2):
                self._add_order(first, second)
            self._add_memory(self._shared.stage_of(worker), row)

    def _add_order(self, first: int, second: int) -> None:
        after = self.solver.BoolVar(f"o{first},{second}")
        self._after[first, second] = after
        large = self._large
        self.solver.Add(self._ends[second] >= self._ends[first] + self._length(second) - large * (1 - after))
        self.solver.Add(self._ends[first] >= self._ends[second] + self._length(first) - large * after)

    def _is_before(self, earlier: int, later: int) -> Any:
        if (earlier, later) in self._after:
            return self._after[earlier, later]
        return 1 - self._after[later, earlier]

    def _add_memory(self, stage: int, row: list[int]) -> None:
        room = self._p["room"][stage]
        if room is None:
            return
        takes, gives_input, gives_weight = self._p["memory"][stage]
        change = (takes, -gives_input - (0 if self._kinds == 3 else gives_weight), -gives_weight)
        for number in row:
            if number < self._visits:
                held = [change[n // self._visits] * self._is_before(n, number) for n in row if n != number]
                self.solver.Add(sum(held) + takes <= room)

    def _add_objective(self) -> None:
        value = self.solver.NumVar(0, 2 * self._large, "value")
        last = (self._kinds - 1) * self._visits
        if not self._p["staggered"]:
            for visit in range(self._visits):
                self.solver.Add(value >= self._ends[visit + last])
        for stage in range(self._stages) if self._p["staggered"] else ():
            first = self.solver.NumVar(0, self._large, f"first{stage}")
            for visit in range(stage, self._visits, self._stages):
                self.solver.Add(first <= self._ends[visit] - self._length(visit))
            for visit in self._shared.waited_for(stage):
                self.solver.Add(value >= self._ends[visit + last] + self._p["optimizer"][stage] - first)
        self.solver.Minimize(value)


if __name__ == "__main__":
    answer(solve)
