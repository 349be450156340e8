"""Improves a large schedule piece by piece: only what some workers start in a window of time may change its order.

All starts are variables, but outside the window every worker keeps its order, so that times there follow from those
inside. What a window has gained stays; the next one begins from it.
"""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from holdfast.planning.solvers.child import Given
from holdfast.planning.solvers.starts import StartsModel

__all__ = ["solve", "suits", "too_large"]

_SMALL, _LARGE = 600, 20_000
"""Operations up to which all of them are ordered at once, and above which the model alone takes too long."""
_FREE = 150
"""Operations that a window may order anew."""
_WINDOW_S, _PER_OPERATION_S = 2.5, 0.0005
"""Seconds for each window: for these, and for reading the rest."""


def suits(given: dict[str, Any]) -> bool:
    """Returns whether a problem is too large to be solved as a whole, and has times in exact whole numbers.

    Args:
        given: as :func:`holdfast.planning.solvers.process.given_of` makes it.
    """
    shared = Given(given)
    return bool(given["exact"]) and _SMALL < shared.kinds * shared.visits <= _LARGE


def too_large(given: dict[str, Any]) -> bool:
    """Returns whether a variable for every start is more than can be read in any useful time."""
    shared = Given(given)
    return shared.kinds * shared.visits > _LARGE


def solve(given: dict[str, Any]) -> dict[str, Any]:
    """Returns ``{"status", "value", "bound", "starts"}`` as :func:`holdfast.planning.solvers.cp_sat.solve` does.

    Windows are drawn at random places until the time is over or the goal is reached. They prove nothing.
    """
    until = time.monotonic() + given["time_limit_s"]
    rng = random.Random(0)
    starts, value = given["hint"], given["value"]
    while value > given["goal"] and (left := until - time.monotonic()) > 0:
        model = _Window({**given, "hint": starts, "value": value}, rng)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = min(_WINDOW_S + _PER_OPERATION_S * len(starts), left)
        solver.parameters.num_workers = given["threads"]
        solver.parameters.random_seed = rng.randrange(1 << 30)
        solver.parameters.cp_model_presolve = False  # takes longer than it saves: nearly all orders are given
        if solver.solve(model.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            starts, value = model.found(solver), solver.value(model.value)
    return {"status": "FEASIBLE", "value": value, "bound": given["goal"], "starts": starts}


class _Window(StartsModel):
    """A schedule of which only some operations may change their order.

    Args:
        given: as :func:`holdfast.planning.solvers.process.given_of` makes it; its hint keeps all rules.
        rng: draws the window: one pipeline, two or all, and what their workers start one after another.
    """

    def __init__(self, given: dict[str, Any], rng: random.Random) -> None:
        shared, self._before = Given(given), given["hint"]
        numbers = range(shared.kinds * shared.visits)
        self._ended = [self._before[number] + shared.length(number) for number in numbers]
        pipelines = sorted(set(given["pipelines"]))
        chosen = rng.sample(pipelines, min(len(pipelines), rng.choice((1, 1, 2, len(pipelines)))))
        pipeline_of = [given["pipelines"][worker] for worker in given["worker_of"]]
        inside = (number for number in numbers if pipeline_of[number % shared.visits] in chosen)
        turns = sorted(inside, key=self._turn)
        first = rng.randrange(-_FREE // 2, max(1, len(turns) - _FREE // 2))
        self._free = set(turns[max(0, first) : first + _FREE])
        super().__init__({**given, "horizon": max(given["horizon"], *self._ended)})
        for number in numbers:
            self.model.add_hint(self.starts[number], self._before[number])

    def _turn(self, number: int) -> tuple[int, int, int]:
        """Where an operation stands in the order so far; those without length come before what starts with them."""
        return self._before[number], self._ended[number], number

    def _add_workers(self) -> None:
        for worker, visits in self._shared.visits_of_workers().items():
            row = [visit + kind * self._visits for visit in visits for kind in range(self._kinds)]
            row.sort(key=self._turn)
            free = [number for number in row if number in self._free]
            first = row.index(free[0]) if free else len(row)
            last = first + len(free)
            assert row[first:last] == free, "those that start in a window follow one another"
            for earlier, later in (*pairwise(row[:first]), *pairwise(row[last:])):
                self.model.add(self.starts[later] >= self._end(earlier))
            if not free:
                continue
            self._in_turn(free)
            for number in free:
                if first:
                    self.model.add(self.starts[number] >= self._end(row[first - 1]))
                if last < len(row):
                    self.model.add(self.starts[row[last]] >= self._end(number))
            self._add_memory(self._shared.group_of(worker), row[:first], free)

    def _add_memory(self, group: int, done: list[int], free: list[int]) -> None:
        """What the operations before the window have left of the memory is enough for those in it, in their order."""
        room = self._p["room"][group]
        if room is None:
            return
        events = [number for number in free if self._change(number)]
        self.model.add_reservoir_constraint(
            [self.starts[number] if number < self._visits else self._end(number) for number in events],
            [self._change(number) for number in events],
            min_level=-max(takes for takes, *_ in self._p["memory"]) * self._visits,
            max_level=room - sum(map(self._change, done)),
        )

    def _change(self, number: int) -> int:
        """The memory that an operation takes, or gives back: less than nothing."""
        kind, visit = divmod(number, self._visits)
        takes, gives_input, gives_weight = self._p["memory"][self._shared.part[visit]]
        gives = (gives_input + gives_weight,) if self._kinds == 2 else (gives_input, gives_weight)
        return int((takes, *(-given for given in gives))[kind])

    def _add_objective(self) -> None:
        """The value counts most, then what windows take, then workers: what one gains is a step towards all.

        No solution is worse than the hint by that measure, so what a window gains stays.
        """
        super()._add_objective()
        self.model.add(self.value <= self._p["value"])
        self.model.add_hint(self.value, self._p["value"])
        took, visits = 0, self._shared.visits_of_groups()
        of_windows = zip(self._p["windows"], self.firsts, self.windows, strict=bool(self.firsts))
        for (opening, waits_for, step), first, window in of_windows:
            began = min(self._before[visit] for visit in visits[opening])
            ended = max(self._ended[visit + self._last_kind] for group in waits_for for visit in visits[group])
            self.model.add_hint(first, began)
            self.model.add_hint(window, ended + step - began)
            took += ended + step - began
        spans, spent = zip(*(self._span(visits) for visits in self._shared.visits_of_workers().values()), strict=True)
        per_window = 2 * len(spans)
        per_value = 2 * per_window * len(self._p["windows"]) * self._p["value"]  # more than all windows can grow by
        measure = per_value * self.value + per_window * sum(self.windows) + sum(spans)
        self.model.add(measure <= per_value * self._p["value"] + per_window * took + sum(spent))
        self.model.minimize(measure)

    @property
    def _last_kind(self) -> int:
        """From a visit to its last operation."""
        return (self._kinds - 1) * self._visits

    def _span(self, visits: list[int]) -> tuple[Any, int]:
        """A variable for the time from a worker's first to its last operation, and that time in the hint."""
        first = self.model.new_int_var(0, self._horizon, "")
        span = self.model.new_int_var(0, self._horizon, "")
        for visit in visits:
            self.model.add(first <= self.starts[visit])
            self.model.add(span >= self._end(visit + self._last_kind) - first)
        began = min(self._before[visit] for visit in visits)
        self.model.add_hint(first, began)
        before = max(self._ended[visit + self._last_kind] for visit in visits) - began
        self.model.add_hint(span, before)
        return span, before
