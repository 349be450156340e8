"""Runs a solver in a process of its own, under a time limit, and reads what it found."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any

from holdfast.errors import ConfigError, InternalError, SolverTimeout, installing
from holdfast.schedule.engine import Schedule
from holdfast.schedule.problem import Problem

__all__ = ["Answer", "answer_of", "given_of", "installed", "run_solver", "suits"]

_GRACE_S = 20.0
"""What a solver may take beyond its own limit, for starting and for building the model."""


_MOST_CELLS = 40_000
"""Series of operations times moments up to which counting is of use."""
_THREADS, _FEW_CELLS, _THREADS_OF_FEW = 2, 4_000, 4
"""Only from four threads on CP-SAT tries linear relaxations at full strength, on two processors, too. Up to so many
cells that proves in a second what takes half a minute otherwise; above, it takes the time from what finds schedules."""
_MOST_PER_UNIT = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a solver found.

    Attributes:
        schedule: the best schedule, in the units of the costs.
        bound: what it proved that nothing can beat, in the units of the costs.
        proved: whether the schedule is proved to be the best.
    """

    schedule: Schedule
    bound: float
    proved: bool


def suits(problem: Problem, length: float) -> bool:
    """Returns whether the solver knows such a problem: of few and short times in whole numbers, none of them zero.

    Args:
        problem: the problem.
        length: about what a schedule comes to.
    """
    per_unit = _per_unit(_times(problem))
    if per_unit is None or _per_unit(_memory(problem)) is None:
        return False
    if not min(map(min, problem.durations[: 2 if problem.coupled else 3])):
        return False
    return _cells(problem, length * per_unit / _unit(problem, per_unit)) <= _MOST_CELLS


def _times(problem: Problem) -> list[float]:
    return [*chain.from_iterable(problem.durations), *problem.comm, *problem.optimizer]


def _memory(problem: Problem) -> list[float]:
    return [bytes_ for part in problem.parts for bytes_ in (part.takes, part.gives_input, part.gives_weight)]


def _per_unit(numbers: Sequence[float]) -> int | None:
    """Returns in how many parts a unit has to be cut for these numbers to be whole; None if in too many."""
    common = math.lcm(*(Fraction(str(number)).denominator for number in numbers))
    return common if common <= _MOST_PER_UNIT else None


def _unit(problem: Problem, per_unit: int) -> int:
    """Returns the greatest number that divides all times: some best schedule has all its starts at multiples of it."""
    return math.gcd(*(round(time * per_unit) for time in _times(problem)))


def _cells(problem: Problem, moments: float) -> float:
    routes = {tuple((problem.worker_of[v], problem.part_of[v]) for v in journey) for journey in problem.journeys}
    return (2 * sum(map(len, routes)) + len(set(problem.worker_of))) * moments


def given_of(
    problem: Problem, *, staggered: bool, hint: Schedule, value: float, goal: float, time_limit_s: float
) -> tuple[dict[str, Any], int]:
    """Returns a problem as the solver reads it, and how many of its units of time are one of the costs.

    Args:
        problem: one that :func:`suits`.
        staggered: whether the period counts, else the makespan.
        hint: a schedule to begin with.
        value: what the hint comes to.
        goal: a lower bound.
        time_limit_s: seconds for the solver.

    Raises:
        InternalError: the optimizer is staggered and the backward coupled, for which the solver has no windows; or
            times or memory are no whole numbers in any unit.
    """
    if staggered and problem.coupled:
        raise InternalError("the solver knows no staggered optimizer where the backward is one operation")
    per_unit, per_byte = _per_unit(_times(problem)), _per_unit(_memory(problem))
    if per_unit is None or per_byte is None:
        raise InternalError("the solver knows whole numbers only")

    def whole(time: float) -> int:
        return round(time * per_unit)

    unit = _unit(problem, per_unit)
    few = _cells(problem, whole(value) // unit) <= _FEW_CELLS
    return {
        "worker_of": problem.worker_of,
        "part_of": problem.part_of,
        "journeys": [[journey.start, journey.stop] for journey in problem.journeys],
        "coupled": problem.coupled,
        "staggered": staggered,
        "durations": [[whole(t) for t in row] for row in problem.durations],
        "comm": [whole(t) for t in problem.comm],
        "group_of": problem.group_of,
        "optimizer": [whole(t) for t in problem.optimizer],
        "windows": [[window.group, window.waits_for, whole(window.optimizer)] for window in problem.windows],
        "memory": [
            [round(bytes_ * per_byte) for bytes_ in (part.takes, part.gives_input, part.gives_weight)]
            for part in problem.parts
        ],
        "room": [None if math.isinf(room) else int(room * per_byte) for room in problem.room],
        "unit": unit,
        "value": whole(value),
        "goal": math.floor(goal * per_unit),
        "hint": [whole(start) for start in hint.starts],
        "time_limit_s": time_limit_s,
        "threads": _THREADS_OF_FEW if few else _THREADS,
    }, per_unit


def installed() -> bool:
    """Returns whether there are solvers: they come with ``holdfast[solver]``."""
    return importlib.util.find_spec("ortools") is not None


def run_solver(problem: Problem, given: dict[str, Any], per_unit: int) -> Answer | None:
    """Returns what a solver found in a process of its own; None if its time was over before it found anything.

    Args:
        problem: the problem.
        given: of :func:`given_of`.
        per_unit: of :func:`given_of`, too.

    Raises:
        ConfigError: the solver is not installed.
        SolverTimeout: it failed, or did not end long after its time.
    """
    if not installed():
        raise ConfigError(f"--solver cp-sat needs ortools; {installing('solver')}")
    limit = given["time_limit_s"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.planning.solvers.counting", str(os.getpid())],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=limit + _GRACE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SolverTimeout(
            f"cp-sat had {limit:.3g} s and did not end {_GRACE_S:g} s after that: expected a longer --time-limit "
            "for a problem of this size, or --solver list"
        ) from error
    if done.returncode:
        raise SolverTimeout(f"cp-sat failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return answer_of(problem, json.loads(done.stdout), per_unit)


def answer_of(problem: Problem, answer: dict[str, Any], per_unit: int) -> Answer | None:
    """Returns the answer of a solver in the units of the costs; None if it found nothing.

    Args:
        problem: the problem.
        answer: what the solver's process printed.
        per_unit: how many of its units of time are one of the costs.
    """
    if not answer["starts"]:
        return None
    return Answer(
        schedule=_schedule(problem, [_unscaled(start, per_unit) for start in answer["starts"]]),
        bound=_unscaled(answer["bound"], per_unit),
        proved=answer["status"] == "OPTIMAL",
    )


def _unscaled(time: int, per_unit: int) -> float:
    """Returns a time in the units of the costs; whole numbers stay whole."""
    value = time / per_unit
    return int(value) if value.is_integer() else value


def _schedule(problem: Problem, starts: list[float]) -> Schedule:
    """Returns the schedule; operations without length come before others that start with them."""
    visits, place = problem.num_visits, [nth for journey in problem.journeys for nth in range(len(journey))]
    numbers = range(problem.num_operations)

    def when(number: int) -> tuple[float, float, int, int]:
        kind, visit = divmod(number, visits)
        length = problem.durations[kind][problem.part_of[visit]]
        return starts[number], starts[number] + length, kind, place[visit] if kind == 0 else -place[visit]

    sequence = sorted(numbers, key=when)
    rows: list[list[int]] = [[] for _ in range(problem.num_workers)]
    for number in sequence:
        rows[problem.worker_of[number % visits]].append(number)
    return Schedule(starts=starts, rows=rows, sequence=sequence)
