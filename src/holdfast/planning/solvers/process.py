"""Runs a solver in a process of its own, under a time limit, and reads what it found."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import Any

from holdfast.errors import ConfigError, InternalError, SolverTimeout
from holdfast.planning.list_scheduler import Schedule
from holdfast.planning.problem import Problem

__all__ = ["Answer", "Scale", "answer_of", "installed", "given_of", "run_solver", "scale_of"]

_GRACE_S = 20.0
"""What a solver may take beyond its own limit, for starting and for building the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How times become whole numbers.

    Attributes:
        per_unit: whole units per unit of the costs.
        exact: whether nothing is rounded, so that what is proved of the scaled problem is proved of the real one.
    """

    per_unit: float
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a solver found.

    Attributes:
        schedule: the best schedule, in the units of the costs.
        bound: what it proved that nothing can beat, in the units of the costs; 0 where the scale is not exact.
        proved: whether the schedule is proved to be the best.
    """

    schedule: Schedule
    bound: float
    proved: bool


def scale_of(numbers: Sequence[float], most: int = 10**6) -> Scale:
    """Returns the scale in which these numbers are whole, exactly if ``most`` units per unit are enough."""
    fractions = [Fraction(str(number)) for number in numbers]
    common = math.lcm(*(fraction.denominator for fraction in fractions))
    if common <= most:
        return Scale(per_unit=common, exact=True)
    return Scale(per_unit=1000 / max(min((n for n in numbers if n > 0), default=1.0), 1e-12), exact=False)


def given_of(
    problem: Problem,
    *,
    staggered: bool,
    hint: Schedule,
    value: float,
    goal: float,
    time_limit_s: float,
    threads: int = 2,
) -> tuple[dict[str, Any], Scale]:
    """Returns a problem as the solvers read it, and its scale.

    Args:
        problem: the problem.
        staggered: whether the period counts, else the makespan.
        hint: a schedule to begin with.
        value: what the hint comes to.
        goal: a lower bound.
        time_limit_s: seconds for the solver.
        threads: of the solver.

    Raises:
        InternalError: the optimizer is staggered and the backward coupled, for which the solvers have no windows.
    """
    if staggered and problem.coupled:
        raise InternalError("solvers know no staggered optimizer where the backward is one operation")
    times = [*chain.from_iterable(problem.durations), *problem.comm, *problem.optimizer]
    scale = scale_of(times)

    def whole(time: float) -> int:
        return math.ceil(round(time * scale.per_unit, 6))

    memory = [(part.takes, part.gives_input, part.gives_weight) for part in problem.parts]
    bytes_scale = scale_of([m for row in memory for m in row] or [1.0])
    exact = scale.exact and bytes_scale.exact
    return {
        "worker_of": problem.worker_of,
        "part_of": problem.part_of,
        "journeys": [[journey.start, journey.stop] for journey in problem.journeys],
        "pipelines": [worker.pipeline for worker in problem.workers],
        "coupled": problem.coupled,
        "staggered": staggered,
        "durations": [[whole(t) for t in row] for row in problem.durations],
        "comm": [whole(t) for t in problem.comm],
        "group_of": problem.group_of,
        "optimizer": [whole(t) for t in problem.optimizer],
        "windows": [[window.group, window.waits_for, whole(window.optimizer)] for window in problem.windows],
        "memory": [
            [
                math.ceil(round(taken * bytes_scale.per_unit, 6)),
                *(int(round(m * bytes_scale.per_unit, 6)) for m in given),
            ]
            for taken, *given in memory
        ],
        "room": [None if math.isinf(room) else int(room * bytes_scale.per_unit) for room in problem.room],
        "exact": exact,
        "value": whole(value),
        "horizon": whole(_latest(problem, value, staggered) if exact else 2 * max(hint.starts) + value),
        "goal": math.floor(goal * scale.per_unit) if exact else 0,
        "hint": [whole(start) for start in hint.starts],
        "time_limit_s": time_limit_s,
        "threads": threads,
    }, replace(scale, exact=exact)


def _latest(problem: Problem, value: float, staggered: bool) -> float:
    """Returns when some best schedule has ended, if it is not worse than ``value`` and begins at 0.

    Staggered, the window of the first layer begins first, and all I of a micro-batch end before it does: the way back
    and the W of its first visit earlier. W that are left then may follow one another at once.
    """
    if not staggered:
        return value
    apart, weight = problem.durations[1:]
    first = {problem.group_of[problem.worker_of[journey.start]] for journey in problem.journeys}
    step = min(problem.optimizer[group] for group in first)
    last_input, left = [-math.inf] * problem.num_workers, [0.0] * problem.num_workers
    for journey in problem.journeys:
        latest = value - step - weight[problem.part_of[journey.start]]
        for visit in journey:
            worker, part = problem.worker_of[visit], problem.part_of[visit]
            last_input[worker] = max(last_input[worker], latest)
            left[worker] += weight[part]
            latest -= apart[part] + problem.comm[part]
    return max(end + more for end, more in zip(last_input, left, strict=True))


def installed() -> bool:
    """Returns whether there are solvers: they come with ``holdfast[solver]``."""
    return importlib.util.find_spec("ortools") is not None


def run_solver(problem: Problem, given: dict[str, Any], scale: Scale) -> Answer | None:
    """Returns what a solver found in a process of its own; None if its time was over before it found anything.

    Args:
        problem: the problem.
        given: of :func:`given_of`.
        scale: its scale.

    Raises:
        ConfigError: the solver is not installed.
        SolverTimeout: it failed, or did not end long after its time.
    """
    if not installed():
        raise ConfigError("--solver cp-sat needs ortools: install holdfast[solver]")
    limit = given["time_limit_s"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.planning.solvers.cp_sat", str(os.getpid())],
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
    return answer_of(problem, json.loads(done.stdout), scale)


def answer_of(problem: Problem, answer: dict[str, Any], scale: Scale) -> Answer | None:
    """Returns the answer of a solver in the units of the costs; None if it found nothing.

    Args:
        problem: the problem.
        answer: what the solver's process printed.
        scale: of the problem that it was given.
    """
    if not answer["starts"]:
        return None
    return Answer(
        schedule=_schedule(problem, [_unscaled(start, scale) for start in answer["starts"]]),
        bound=_unscaled(answer["bound"], scale) if scale.exact else 0,
        proved=scale.exact and answer["status"] == "OPTIMAL",
    )


def _unscaled(time: int, scale: Scale) -> float:
    """Returns a time in the units of the costs; whole numbers stay whole."""
    value = time / scale.per_unit
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
