"""The model with a variable for every start: exact for any costs, and slow beyond some hundred operations."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from holdfast.planning.solvers.child import Given

__all__ = ["StartsModel", "solve"]


def solve(given: dict[str, Any]) -> dict[str, Any]:
    """Returns ``{"status", "value", "bound", "starts"}``; ``starts`` is empty if nothing was found.

    Args:
        given: as :func:`holdfast.planning.solvers.process.given_of` makes it.
    """
    model = _Whole(given)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = given["time_limit_s"]
    solver.parameters.num_workers = given["threads"]
    solver.parameters.random_seed = 0
    status = solver.solve(model.model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return {
        "status": solver.status_name(status),
        "value": round(solver.objective_value) if found else None,
        "bound": round(solver.best_objective_bound),
        "starts": model.found(solver) if found else [],
    }


class StartsModel:
    """A problem as CP-SAT reads it.

    Args:
        given: as :func:`holdfast.planning.solvers.process.given_of` makes it.

    Attributes:
        model: the model.
        starts: a variable per operation, by its number.
        value: what is to be small.
        firsts: when every window begins, if optimizer steps are staggered.
        windows: how long every one takes then, the optimizer step included.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._p, shared = given, Given(given)
        self._visits, self._kinds = shared.visits, shared.kinds
        self._length, self._shared = shared.length, shared
        self._horizon = given["horizon"]
        self.model = cp_model.CpModel()
        self.starts: list[Any] = [self._start(number) for number in range(3 * self._visits)]
        self.value = self.model.new_int_var(given["goal"], self._horizon + max(given["optimizer"]), "value")
        self.firsts: list[Any] = []
        self.windows: list[Any] = []
        self._add_needs()
        self._add_workers()
        self._add_objective()

    def found(self, solver: cp_model.CpSolver) -> list[int]:
        """Returns all starts in what a solver found."""
        return [solver.value(start) if isinstance(start, cp_model.IntVar) else start for start in self.starts]

    def _start(self, number: int) -> Any:
        """A variable; W where the backward is coupled is no operation."""
        return self.model.new_int_var(0, self._horizon, "") if number < self._kinds * self._visits else 0

    def _end(self, number: int) -> Any:
        return self.starts[number] + self._length(number)

    def _add_needs(self) -> None:
        for visit in range(self._visits):
            back = visit + self._visits
            if visit not in self._shared.ends:
                delay = self._shared.delay(visit)
                self.model.add(self.starts[visit + 1] >= self._end(visit) + delay)
                self.model.add(self.starts[back] >= self._end(back + 1) + delay)
            else:
                self.model.add(self.starts[back] >= self._end(visit))
            if self._kinds == 3:
                self.model.add(self.starts[back + self._visits] >= self._end(back))

    def _add_workers(self) -> None:
        """What keeps every worker at one operation at a time, and within its memory."""
        raise NotImplementedError

    def _in_turn(self, numbers: list[int]) -> None:
        """These operations run one at a time, in any order."""
        self.model.add_no_overlap(
            [self.model.new_fixed_size_interval_var(self.starts[n], self._length(n), f"i{n}") for n in numbers]
        )

    def _add_objective(self) -> None:
        value = self.value
        after = 2 if self._kinds == 3 else 1
        ends = [self._end(visit + after * self._visits) for visit in range(self._visits)]
        if not self._p["staggered"]:
            for end in ends:
                self.model.add(value >= end)
        visits = self._shared.visits_of_groups()
        for nth, (opening, waits_for, step) in enumerate(self._p["windows"] if self._p["staggered"] else ()):
            first = self.model.new_int_var(0, self._horizon, f"first{nth}")
            window = self.model.new_int_var(0, self._horizon + max(self._p["optimizer"]), f"window{nth}")
            for visit in visits[opening]:
                self.model.add(first <= self.starts[visit])
            for visit in (visit for group in waits_for for visit in visits[group]):
                self.model.add(window >= ends[visit] + step - first)
            self.model.add(value >= window)
            self.firsts.append(first)
            self.windows.append(window)
        self.model.minimize(value)


class _Whole(StartsModel):
    """All operations in any order."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self._add_interchangeable()
        self._add_hint()

    def _add_workers(self) -> None:
        for worker, row in self._shared.visits_of_workers().items():
            numbers = [visit + kind * self._visits for visit in row for kind in range(self._kinds)]
            self._in_turn(numbers)
            self._add_memory(self._shared.group_of(worker), row)

    def _add_memory(self, group: int, row: list[int]) -> None:
        room = self._p["room"][group]
        if room is None:
            return
        spans: list[Any] = []
        demands: list[int] = []
        for visit in row:
            takes, gives_input, gives_weight = self._p["memory"][self._shared.part[visit]]
            kept = takes - gives_input - gives_weight
            back = visit + self._visits
            last = back + (self._visits if self._kinds == 3 else 0)
            for demand, end in ((gives_input, self._end(back)), (gives_weight, self._end(last)), (kept, self._horizon)):
                if demand:
                    size = self.model.new_int_var(0, self._horizon, "")
                    stop = self.model.new_int_var(0, self._horizon, "")
                    self.model.add(stop == end)
                    spans.append(self.model.new_interval_var(self.starts[visit], size, stop, ""))
                    demands.append(demand)
        self.model.add_cumulative(spans, demands, room)

    def _add_interchangeable(self) -> None:
        """Micro-batches with equal routes may keep the order of their numbers in all that they do.

        If one overtakes another, let them exchange names from there on: the one that was first everywhere before is
        ready for the earlier turn, the other for the later one, and workers hold as many micro-batches as they did.
        """
        for route, entries in self._shared.routes().items():
            for before, entry in pairwise(entries):
                for offset in self._offsets(len(route)):
                    self.model.add(self.starts[entry + offset] >= self._end(before + offset))

    def _offsets(self, length: int) -> list[int]:
        """From a first visit to all operations of a micro-batch with so many visits."""
        return [kind * self._visits + place for kind in range(self._kinds) for place in range(length)]

    def _add_hint(self) -> None:
        """The hint, in the order in which micro-batches with equal routes have to be."""
        hints = list(self._p["hint"])
        for route, entries in self._shared.routes().items():
            for offset in self._offsets(len(route)):
                turns = sorted(hints[entry + offset] for entry in entries)
                for entry, turn in zip(entries, turns, strict=True):
                    hints[entry + offset] = turn
        for start, hint in zip(self.starts, hints, strict=False):
            if isinstance(start, cp_model.IntVar):
                self.model.add_hint(start, hint)
