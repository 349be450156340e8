"""A model for CP-SAT that counts: when operations start, but not of which micro-batch; and the child that solves it.

Micro-batches with equal routes are all alike: whichever comes first may be called the first. So a schedule is known
from how many F and I of every route each worker has started by every moment, and how many W of any route, which only
its own memory and its own I concern. There is nothing left to exchange, and the relaxation is tight: seconds prove what
a variable per start does not prove in minutes. There is a variable per moment, so times have to be short and whole.

The model only decides: is there a schedule of at most this length? The answer no is a proof.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ortools.sat.python import cp_model

from holdfast.planning.solvers.child import Given, answer

__all__ = ["solve"]


def solve(given: dict[str, Any]) -> dict[str, Any]:
    """Returns ``{"status", "value", "bound", "starts"}``.

    Asks for something better than the hint, and than what it finds, until there is nothing, or no time.

    Args:
        given: as :func:`holdfast.planning.solvers.process.given_of` makes it.
    """
    until, unit = time.monotonic() + given["time_limit_s"], given["unit"]
    best, goal = given["value"], given["goal"]
    starts: list[int] = given["hint"]
    status = "OPTIMAL" if best <= goal else "FEASIBLE"
    while status == "FEASIBLE" and time.monotonic() < until:
        model = _Model(given, unit, -(-best // unit) - 1)
        found = model.solve(until - time.monotonic(), given["threads"])
        if found == cp_model.INFEASIBLE:
            status, goal = "OPTIMAL", best
        elif found not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        else:
            best, starts = model.limit * unit, model.starts()
            status = "OPTIMAL" if best <= goal else "FEASIBLE"
    return {"status": status, "value": best, "bound": goal, "starts": starts}


_Route = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Series:
    """Operations that are all alike.

    Attributes:
        starts: for every moment the variable that says whether one starts then; None where none can.
        counts: for every moment how many have started by then.
    """

    starts: list[Any]
    counts: list[Any]

    def by(self, moment: int) -> Any:
        return self.counts[min(moment, len(self.counts) - 1)] if moment >= 0 else 0

    def during(self, moment: int, length: int) -> list[Any]:
        """The variables of which one is set if an operation of this length runs at a moment."""
        return [start for start in self.starts[max(0, moment - length + 1) : moment + 1] if start is not None]


_Counted = tuple[_Series, int]


class _Model:
    """Asks for a period, or a makespan, of at most ``limit`` units; the first F of all starts at moment 0."""

    def __init__(self, given: dict[str, Any], unit: int, limit: int) -> None:
        self._p, self._shared, self.limit, self._unit = given, Given(given), limit, unit
        self._f, self._b, weight = ([length // unit for length in row] for row in given["durations"])
        self._w = [0] * len(weight) if given["coupled"] else weight
        self._comm = [delay // unit for delay in given["comm"]]
        self._workers = self._shared.visits_of_workers()
        self._routes = self._shared.routes()
        self._model = cp_model.CpModel()
        self._solver = cp_model.CpSolver()
        self._add_series()
        self._add_needs()
        for worker in self._workers:
            self._add_worker(worker)
        if given["staggered"]:
            self._add_windows()

    def solve(self, time_limit_s: float, threads: int) -> int:
        """Returns CP-SAT's status."""
        self._solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
        self._solver.parameters.num_workers = threads
        self._solver.parameters.random_seed = 0
        return int(self._solver.solve(self._model))

    def starts(self) -> list[int]:
        """Returns the starts of all operations: micro-batches of one route take turns in the order of their numbers."""
        visits = self._shared.visits
        found = [0] * (3 * visits)
        for route, entries in self._routes.items():
            for place in range(len(route)):
                for kind, series in enumerate((self._forward[route][place], self._back[route][place])):
                    for entry, start in zip(entries, self._times(series), strict=True):
                        found[kind * visits + entry + place] = start
        for (worker, part), series in self._weights.items():
            here = (visit for visit in self._workers[worker] if self._shared.part[visit] == part)
            order = sorted(here, key=lambda visit: found[visits + visit])
            for visit, start in zip(order, self._times(series), strict=True):
                found[2 * visits + visit] = start
        return found

    def _times(self, series: _Series) -> list[int]:
        return [
            moment * self._unit
            for moment, start in enumerate(series.starts)
            if start is not None and self._solver.boolean_value(start)
        ]

    def _reaches(self, route: _Route) -> list[tuple[int, int, int]]:
        """Returns when the first F of every visit can start, how long after an F its I can, and when the last I ends.

        The last I of a visit is followed by the way back and the W of the first visit, whose window begins at moment 0.
        """
        parts = [part for _, part in route]
        down = list(accumulate((self._f[part] + self._comm[part] for part in parts[:-1]), initial=0))
        back = list(accumulate((self._b[part] + self._comm[part] for part in parts[:-1]), initial=0))
        step = self._shared.first_step() // self._unit if self._p["staggered"] else 0
        turn = self._f[parts[-1]] + self._b[parts[-1]]
        return [
            (
                down[place],
                down[-1] - down[place] + turn + back[-1] - back[place] - self._b[part],
                self.limit - step - self._w[parts[0]] - back[place],
            )
            for place, part in enumerate(parts)
        ]

    def _add_series(self) -> None:
        """Makes the variables, each only for the moments at which an operation can start.

        The W of later visits may end late, but after the last I of a worker nothing keeps them apart.
        """
        reaches = {route: self._reaches(route) for route in self._routes}
        last_input, loads, ready = Counter[int](), Counter[int](), dict[tuple[int, int], int]()
        weights = Counter[tuple[int, int]]()
        for route, entries in self._routes.items():
            for (worker, part), (first, turn, last) in zip(route, reaches[route], strict=True):
                last_input[worker] = max(last_input[worker], last)
                loads[worker] += len(entries) * self._w[part]
                weights[worker, part] += len(entries)
                ready[worker, part] = min(first + turn + self._b[part], ready.get((worker, part), self.limit))
        latest = max(last_input[worker] + load for worker, load in loads.items())
        self._horizon = latest if self._p["staggered"] else self.limit
        self._forward: dict[_Route, list[_Series]] = {}
        self._back: dict[_Route, list[_Series]] = {}
        for route, entries in self._routes.items():
            spans = [(*span, self._b[part]) for (_, part), span in zip(route, reaches[route], strict=True)]
            self._forward[route] = [
                self._new(len(entries), first, last - length - turn) for first, turn, last, length in spans
            ]
            self._back[route] = [
                self._new(len(entries), first + turn, last - length) for first, turn, last, length in spans
            ]
        self._weights: dict[tuple[int, int], _Series] = {}
        for (worker, part), many in weights.items() if not self._p["coupled"] else ():
            self._weights[worker, part] = self._new(many, ready[worker, part], self._horizon - self._w[part])

    def _new(self, total: int, first: int, last: int) -> _Series:
        """Returns ``total`` operations that start between two moments."""
        if last < first:
            self._model.add_bool_or([])
        starts: list[Any] = [None] * (self._horizon + 1)
        counts: list[Any] = [0 if moment < first else total for moment in range(self._horizon + 1)]
        for moment in range(first, last + 1):
            starts[moment] = self._model.new_bool_var("")
            counts[moment] = self._model.new_int_var(0, total, "")
            self._model.add(counts[moment] == (counts[moment - 1] if moment > first else 0) + starts[moment])
        if last >= first:
            self._model.add(counts[last] == total)
        return _Series(starts, counts)

    def _at_most(self, less: Any, more: Any) -> None:
        """Adds a constraint; one between numbers holds, or nothing does."""
        constraint = less <= more
        if not isinstance(constraint, bool):
            self._model.add(constraint)
        elif not constraint:
            self._model.add_bool_or([])

    def _add_needs(self) -> None:
        """F after the F of the visit before, and I after the I of the visit behind."""
        for route in self._routes:
            parts, forward, back = [part for _, part in route], self._forward[route], self._back[route]
            for moment in range(self._horizon + 1):
                self._at_most(back[-1].by(moment), forward[-1].by(moment - self._f[parts[-1]]))
                for place, (part, behind) in enumerate(pairwise(parts)):
                    delay = self._comm[part]
                    self._at_most(forward[place + 1].by(moment), forward[place].by(moment - self._f[part] - delay))
                    self._at_most(back[place].by(moment), back[place + 1].by(moment - self._b[behind] - delay))

    def _of(self, worker: int) -> tuple[list[_Counted], list[_Counted], list[_Counted]]:
        """The F, the I and the W of a worker."""
        forward: list[_Counted] = []
        back: list[_Counted] = []
        for route in self._routes:
            for place, (other, part) in enumerate(route):
                if other == worker:
                    forward.append((self._forward[route][place], part))
                    back.append((self._back[route][place], part))
        return forward, back, [(series, part) for (other, part), series in self._weights.items() if other == worker]

    def _add_worker(self, worker: int) -> None:
        """One operation at a time, W after I, and what is held within memory."""
        forward, back, weights = self._of(worker)
        lengths = ((forward, self._f), (back, self._b), (weights, self._w))
        room, memory = self._p["room"][self._shared.group_of(worker)], self._p["memory"]
        for moment in range(self._horizon + 1):
            self._model.add_at_most_one(
                [
                    start
                    for kind, length in lengths
                    for series, part in kind
                    for start in series.during(moment, length[part])
                ]
            )
            for series, part in weights:
                done = sum(each.by(moment - self._b[part]) for each, other in back if other == part)
                self._at_most(series.by(moment), done)
            if room is not None:
                taken = sum(memory[part][0] * series.by(moment) for series, part in forward)
                self._at_most(taken, room + self._given(moment, back, weights))

    def _given(self, moment: int, back: list[_Counted], weights: list[_Counted]) -> Any:
        """What operations that have ended have given back."""
        memory = self._p["memory"]
        with_input = [memory[part][1] + (memory[part][2] if self._p["coupled"] else 0) for part in range(len(memory))]
        return sum(with_input[part] * each.by(moment - self._b[part]) for each, part in back) + sum(
            memory[part][2] * each.by(moment - self._w[part]) for each, part in weights
        )

    def _add_windows(self) -> None:
        """From the first F of a group to its optimizer step no more than the limit passes."""
        opened = {group: self._opened(group) for group in sorted({group for group, _, _ in self._p["windows"]})}
        for group, waits_for, step in self._p["windows"]:
            for (worker, part), series in self._weights.items():
                if self._shared.group_of(worker) in waits_for:
                    self._close(series, self._w[part] + step // self._unit, opened[group])

    def _opened(self, group: int) -> list[Any]:
        """A variable per moment: whether the group has begun."""
        opened = [self._model.new_bool_var("") for _ in range(self._horizon + 1)]
        for before, after in pairwise(opened):
            self._model.add_implication(before, after)
        for worker in self._workers:
            for series, _ in self._of(worker)[0] if self._shared.group_of(worker) == group else ():
                for start, opens in zip(series.starts, opened, strict=True):
                    if start is not None:
                        self._model.add_implication(start, opens)
        return opened

    def _close(self, weights: _Series, length: int, opened: list[Any]) -> None:
        """What ends so long after the start of a W is the end of a window that opened no longer ago than the limit."""
        for moment, start in enumerate(weights.starts):
            closed = moment + length - self.limit - 1
            if start is not None and closed >= 0:
                self._model.add_implication(start, ~opened[closed])


if __name__ == "__main__":
    answer(solve)
