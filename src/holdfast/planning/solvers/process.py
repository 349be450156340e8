"""Runs a solver in a process of its own, under a time limit, and reads what it found."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from holdfast.errors import ConfigError, SolverTimeout
from holdfast.planning.list_scheduler import Schedule
from holdfast.planning.shop import Shop

__all__ = ["Answer", "Scale", "answer_of", "installed", "problem_of", "run_solver", "scale_of"]

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


def problem_of(
    shop: Shop,
    *,
    staggered: bool,
    hint: Schedule,
    value: float,
    goal: float,
    time_limit_s: float,
    threads: int = 2,
) -> tuple[dict[str, Any], Scale]:
    """Returns the problem as the solvers read it, and its scale.

    Args:
        shop: the problem.
        staggered: whether the period counts, else the makespan.
        hint: a schedule to begin with.
        value: what the hint comes to.
        goal: a lower bound.
        time_limit_s: seconds for the solver.
        threads: of the solver.
    """
    each = shop.grid.each
    times = [t for row in shop.durations for t in row] + list(shop.grid.comm) + [stage.optimizer for stage in each]
    scale = scale_of(times)

    def whole(time: float) -> int:
        return math.ceil(round(time * scale.per_unit, 6))

    memory = [(stage.takes, stage.gives_input, stage.gives_weight) for stage in each]
    bytes_scale = scale_of([m for row in memory for m in row] or [1.0])
    exact = scale.exact and bytes_scale.exact
    return {
        "pipelines": shop.grid.pipelines,
        "stages": shop.num_stages,
        "worker_of": list(shop.worker_of),
        "coupled": shop.coupled,
        "staggered": staggered,
        "durations": [[whole(t) for t in row] for row in shop.durations],
        "comm": [whole(t) for t in shop.grid.comm],
        "optimizer": [whole(stage.optimizer) for stage in each],
        "waits_for": shop.grid.waits_for,
        "memory": [
            [
                math.ceil(round(taken * bytes_scale.per_unit, 6)),
                *(int(round(m * bytes_scale.per_unit, 6)) for m in given),
            ]
            for taken, *given in memory
        ],
        "room": [None if math.isinf(room) else int(room * bytes_scale.per_unit) for room in shop.room],
        "exact": exact,
        "value": whole(value),
        "horizon": whole(_latest(shop, value, staggered) if exact else 2 * max(hint.starts) + value),
        "goal": math.floor(goal * scale.per_unit) if exact else 0,
        "hint": [whole(start) for start in hint.starts],
        "time_limit_s": time_limit_s,
        "threads": threads,
    }, replace(scale, exact=exact)


def _latest(shop: Shop, value: float, staggered: bool) -> float:
    """Returns when some best schedule has ended, if it is not worse than ``value`` and begins at 0.

    Staggered, the window of stage 0 begins first, and all I of a stage end before it does: the way back and a W of
    stage 0 earlier. W that are left then may follow one another at once.
    """
    if not staggered:
        return value
    each, loads = shop.grid.each, Counter(shop.worker_of)
    latest, ends = value - each[0].optimizer - each[0].weight, []
    for s, stage in enumerate(each):
        most = max(loads[s * shop.grid.pipelines + p] for p in range(shop.grid.pipelines))
        ends.append(latest + most * stage.weight)
        latest -= shop.durations[1][s] + (shop.grid.comm[s] if s < len(each) - 1 else 0)
    return max(ends)


def installed() -> bool:
    """Returns whether there are solvers: they come with ``holdfast[solver]``."""
    return importlib.util.find_spec("ortools") is not None


def run_solver(module: str, shop: Shop, problem: dict[str, Any], scale: Scale) -> Answer | None:
    """Returns what a solver found in a process of its own; None if its time was over before it found anything.

    Args:
        module: ``cp_sat`` or ``milp``.
        shop: the problem.
        problem: of :func:`problem_of`.
        scale: its scale.

    Raises:
        ConfigError: the solver is not installed.
        SolverTimeout: it failed, or did not end long after its time.
    """
    if not installed():
        raise ConfigError(f"--solver {module.replace('_', '-')} needs ortools: install holdfast[solver]")
    limit = problem["time_limit_s"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"holdfast.planning.solvers.{module}"],
            input=json.dumps(problem),
            capture_output=True,
            text=True,
            timeout=limit + _GRACE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SolverTimeout(
            f"{module} had {limit:.3g} s and did not end {_GRACE_S:g} s after that: expected a longer --time-limit "
            "for a problem of this size, or --solver list"
        ) from error
    if done.returncode:
        raise SolverTimeout(f"{module} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return answer_of(shop, json.loads(done.stdout), scale)


def answer_of(shop: Shop, answer: dict[str, Any], scale: Scale) -> Answer | None:
    """Returns the answer of a solver in the units of the costs; None if it found nothing.

    Args:
        shop: the problem.
        answer: what the solver's process printed.
        scale: of the problem that it was given.
    """
    if not answer["starts"]:
        return None
    return Answer(
        schedule=_schedule(shop, [_unscaled(start, scale) for start in answer["starts"]]),
        bound=_unscaled(answer["bound"], scale) if scale.exact else 0,
        proved=scale.exact and answer["status"] == "OPTIMAL",
    )


def _unscaled(time: int, scale: Scale) -> float:
    """Returns a time in the units of the costs; whole numbers stay whole."""
    value = time / scale.per_unit
    return int(value) if value.is_integer() else value


def _schedule(shop: Shop, starts: list[float]) -> Schedule:
    """Returns the schedule; operations without length come before others that start with them."""
    visits, stages = shop.num_visits, shop.num_stages
    numbers = range(shop.num_operations)

    def when(number: int) -> tuple[float, float, int, int]:
        kind, visit = divmod(number, visits)
        stage = visit % stages
        length = shop.durations[kind][stage]
        return starts[number], starts[number] + length, kind, stage if kind == 0 else -stage

    sequence = sorted(numbers, key=when)
    rows: list[list[int]] = [[] for _ in range(shop.num_workers)]
    for number in sequence:
        rows[shop.worker_of[number % visits]].append(number)
    return Schedule(starts=starts, rows=rows, sequence=sequence)
