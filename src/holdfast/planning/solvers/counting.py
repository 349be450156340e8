"""A model for CP-SAT that counts: when operations start, but not of which micro-batch.

Micro-batches with equal routes are all alike: whichever comes first may be called the first. So a schedule is known
from how many F and I of every route each worker has started by every moment, and how many W of any route, which only
its own memory and its own I concern. There is nothing left to exchange, and the relaxation is tight: seconds prove what
a variable per start does not prove in minutes. There is a variable per moment, so times have to be short and whole.

The model only decides: is there a schedule of at most this length? The answer no is a proof.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ortools.sat.python import cp_model

from holdfast.planning.solvers.child import Problem

__all__ = ["solve", "suits"]

_MOST_CELLS = 40_000
"""Series times moments up to which it is of use."""

_THREADS, _FEW_CELLS = 4, 4_000
"""Only from four threads on CP-SAT tries linear relaxations at full strength, on two processors, too. Up to so many
cells that proves in a second what takes half a minute otherwise; above, it takes the time from what finds schedules."""


def suits(problem: dict[str, Any]) -> bool:
    """Returns whether a problem is small enough, in exact whole numbers, and has no operation without length.

    Args:
        problem: as :func:`holdfast.planning.solvers.process.problem_of` makes it.
    """
    shared = Problem(problem)
    rows = problem["durations"][: shared.kinds]
    if not problem["exact"] or min(map(min, rows)) < 1:
        return False
    return _cells(shared, problem["value"] // _unit(problem)) <= _MOST_CELLS


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Returns ``{"status", "value", "bound", "starts"}`` as :func:`holdfast.planning.solvers.cp_sat.solve` does.

    Asks for something better than the hint, and than what it finds, until there is nothing, or no time.
    """
    until, unit = time.monotonic() + problem["time_limit_s"], _unit(problem)
    few = _cells(Problem(problem), problem["value"] // unit) <= _FEW_CELLS
    threads = max(problem["threads"], _THREADS) if few else problem["threads"]
    best, goal = problem["value"], problem["goal"]
    starts: list[int] = problem["hint"]
    status = "OPTIMAL" if best <= goal else "FEASIBLE"
    while status == "FEASIBLE" and time.monotonic() < until:
        model = _Model(problem, unit, -(-best // unit) - 1)
        answer = model.solve(until - time.monotonic(), threads)
        if answer == cp_model.INFEASIBLE:
            status, goal = "OPTIMAL", best
        elif answer not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        else:
            best, starts = model.limit * unit, model.starts()
            status = "OPTIMAL" if best <= goal else "FEASIBLE"
    return {"status": status, "value": best, "bound": goal, "starts": starts}


def _cells(shared: Problem, moments: int) -> int:
    return (len(_routes(shared)) * shared.stages * 2 + len(shared.visits_of_workers())) * moments


def _unit(problem: dict[str, Any]) -> int:
    """Returns the greatest number that divides all times: some best schedule has all its starts at multiples of it."""
    return math.gcd(*(time for row in problem["durations"] for time in row), *problem["comm"], *problem["optimizer"])


def _routes(shared: Problem) -> dict[tuple[int, ...], list[int]]:
    """Returns the first visits of the micro-batches of every route."""
    found: dict[tuple[int, ...], list[int]] = {}
    workers = shared.given["worker_of"]
    for entry in range(0, shared.visits, shared.stages):
        found.setdefault(tuple(workers[entry : entry + shared.stages]), []).append(entry)
    return found


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


class _Model:
    """Asks for a period, or a makespan, of at most ``limit`` units; the first F of stage 0 starts at moment 0."""

    def __init__(self, problem: dict[str, Any], unit: int, limit: int) -> None:
        self._p, self._shared, self.limit, self._unit = problem, Problem(problem), limit, unit
        self._stages, coupled = self._shared.stages, problem["coupled"]
        self._f, self._b, weight = ([length // unit for length in row] for row in problem["durations"])
        self._w = [0] * self._stages if coupled else weight
        self._comm = [delay // unit for delay in problem["comm"]]
        self._steps = [step // unit for step in problem["optimizer"]]
        self._workers = self._shared.visits_of_workers()
        self._routes = _routes(self._shared)
        self._model = cp_model.CpModel()
        self._solver = cp_model.CpSolver()
        self._add_series()
        self._add_needs()
        for worker in self._workers:
            self._add_worker(worker)
        if problem["staggered"]:
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
            for stage, worker in enumerate(route):
                for kind, series in enumerate((self._forward[route, worker], self._back[route, worker])):
                    for entry, start in zip(entries, self._times(series), strict=True):
                        found[kind * visits + entry + stage] = start
        for worker, series in self._weights.items():
            order = sorted(self._workers[worker], key=lambda visit: found[visits + visit])
            for visit, start in zip(order, self._times(series), strict=True):
                found[2 * visits + visit] = start
        return found

    def _times(self, series: _Series) -> list[int]:
        return [
            moment * self._unit
            for moment, start in enumerate(series.starts)
            if start is not None and self._solver.boolean_value(start)
        ]

    def _reaches(self) -> list[tuple[int, int, int]]:
        """Returns when the first F of every stage can start, how long after an F its I can, and when the last I ends.

        The last I of a stage is followed by the way back and a W of stage 0, whose window begins at moment 0.
        """
        down = list(accumulate((f + c for f, c in zip(self._f, self._comm, strict=False)), initial=0))
        back = list(accumulate((b + c for b, c in zip(self._b, self._comm, strict=False)), initial=0))
        step = self._steps[0] if self._p["staggered"] else 0
        return [
            (
                down[s],
                down[-1] - down[s] + self._f[-1] + back[-1] - back[s] + self._b[-1] - self._b[s],
                self.limit - step - self._w[0] - back[s],
            )
            for s in range(self._stages)
        ]

    def _add_series(self) -> None:
        """Makes the variables, each only for the moments at which an operation can start.

        The W of another stage than 0 may end late, but after the last I of a worker nothing keeps them apart.
        """
        workers = [(self._shared.stage_of(worker), worker, len(visits)) for worker, visits in self._workers.items()]
        spans = self._reaches()
        latest = max(spans[s][2] + load * self._w[s] for s, _, load in workers)
        self._horizon = latest if self._p["staggered"] else self.limit
        self._forward: dict[tuple[tuple[int, ...], int], _Series] = {}
        self._back: dict[tuple[tuple[int, ...], int], _Series] = {}
        for route, entries in self._routes.items():
            for worker, (first, turn, last), length in zip(route, spans, self._b, strict=True):
                self._forward[route, worker] = self._new(len(entries), first, last - length - turn)
                self._back[route, worker] = self._new(len(entries), first + turn, last - length)
        self._weights: dict[int, _Series] = {}
        for s, worker, load in workers if not self._p["coupled"] else ():
            first = spans[s][0] + spans[s][1] + self._b[s]
            self._weights[worker] = self._new(load, first, self._horizon - self._w[s])

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
        """F after the F of the stage before, and I after the I of the stage behind."""
        for route in self._routes:
            forward = [self._forward[route, worker] for worker in route]
            back = [self._back[route, worker] for worker in route]
            for moment in range(self._horizon + 1):
                self._at_most(back[-1].by(moment), forward[-1].by(moment - self._f[-1]))
                for s, delay in enumerate(self._comm):
                    self._at_most(forward[s + 1].by(moment), forward[s].by(moment - self._f[s] - delay))
                    self._at_most(back[s].by(moment), back[s + 1].by(moment - self._b[s + 1] - delay))

    def _of(self, worker: int) -> tuple[list[_Series], list[_Series], list[_Series]]:
        """The F, the I and the W of a worker."""
        weights = [self._weights[worker]] if worker in self._weights else []
        forward = [series for (_, other), series in self._forward.items() if other == worker]
        return forward, [series for (_, other), series in self._back.items() if other == worker], weights

    def _add_worker(self, worker: int) -> None:
        """One operation at a time, W after I, and what is held within memory."""
        s = self._shared.stage_of(worker)
        forward, back, weights = self._of(worker)
        lengths = ((forward, self._f[s]), (back, self._b[s]), (weights, self._w[s]))
        room = self._p["room"][s]
        takes, gives_input, gives_weight = self._p["memory"][s]
        gives_input += gives_weight if self._p["coupled"] else 0
        for moment in range(self._horizon + 1):
            self._model.add_at_most_one(
                [start for kind, length in lengths for each in kind for start in each.during(moment, length)]
            )
            done = sum(each.by(moment - self._b[s]) for each in back)
            for each in weights:
                self._at_most(each.by(moment), done)
            if room is not None:
                given = gives_input * done + sum(gives_weight * each.by(moment - self._w[s]) for each in weights)
                self._at_most(takes * sum(each.by(moment) for each in forward), room + given)

    def _add_windows(self) -> None:
        """From the first F of a stage to its optimizer step, after its last W and those of tied stages, no more than
        the limit passes.
        """
        opened = [[self._model.new_bool_var("") for _ in range(self._horizon + 1)] for _ in range(self._stages)]
        self._model.add(opened[0][0] == 1)
        for window in opened:
            for before, after in pairwise(window):
                self._model.add_implication(before, after)
        for worker, weights in self._weights.items():
            s = self._shared.stage_of(worker)
            for moment in range(self._horizon + 1):
                for start in (each.starts[moment] for each in self._of(worker)[0]):
                    if start is not None:
                        self._model.add_implication(start, opened[s][moment])
                for other in self._p["waits_for"][s]:  # and the other way round
                    closed = moment + self._w[s] + self._steps[other] - self.limit - 1
                    if weights.starts[moment] is not None and closed >= 0:
                        self._model.add_implication(weights.starts[moment], ~opened[other][closed])
