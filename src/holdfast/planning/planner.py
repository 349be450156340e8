"""Makes a plan: the problem, the engines, the bound and the proof, in one call."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from holdfast.core.ids import WorkerId
from holdfast.core.placement import Placement
from holdfast.core.plan import Plan, with_listeners
from holdfast.core.profile import Costs
from holdfast.core.routes import Routes
from holdfast.errors import ConfigError
from holdfast.planning.costed_grid import CostedGrid, grid_problem
from holdfast.planning.lining_up import lined_up, with_failed
from holdfast.planning.normalise import load, per_stage
from holdfast.planning.search import BestFound, reached, search
from holdfast.planning.solvers.process import given_of, installed, run_solver, suits
from holdfast.schedule.bounds import Bound, BoundRules, bound
from holdfast.schedule.builders import Limit, one_f_one_b
from holdfast.schedule.engine import Schedule
from holdfast.schedule.problem import Problem, routes_problem, to_plan, to_routes
from holdfast.schedule.route_bounds import route_bound
from holdfast.schedule.timing import (
    Measure,
    as_soon_as_possible,
    check,
    from_orders,
    fuse,
    measure,
    rows_to_run,
    settle,
    split_up,
)

__all__ = ["Solver", "Planned", "Technique", "judge", "make_plan", "plan_bound", "plan_routes"]

_SMALL, _AT_ONCE = 50_000, 2_000
"""Operations up to which the coupled techniques also ask the builder of the core, which makes objects; the second where
a plan is wanted at once."""


_EXACTLY = 2_000
"""Operations up to which CP-SAT is asked where nobody says what to ask."""
_STARTING_S = 2.0
"""With less time it is not: its process takes a second of it to start."""
_BEFORE_SOLVER = 0.2
"""Which part of the time the list scheduler has before CP-SAT, where that is asked."""


class Technique(StrEnum):
    """What a schedule may do, each more than the one before."""

    ONE_F_ONE_B = "1f1b"
    """Coupled backward and 1F1B's own limit of micro-batches; no failures."""
    ADAPTIVE = "adaptive"
    """Coupled backward, re-routed micro-batches."""
    DECOUPLED = "decoupled"
    """I and W apart."""
    STAGGERED = "staggered"
    """Each stage's optimizer step as soon as its own gradients are reduced."""

    @property
    def rules(self) -> BoundRules:
        """What its schedules may do, for the bound."""
        return BoundRules(
            coupled=self in (Technique.ONE_F_ONE_B, Technique.ADAPTIVE),
            staggered=self is Technique.STAGGERED,
            classic=self is Technique.ONE_F_ONE_B,
        )

    def minimised(self, of: Bound | Measure) -> float:
        """What its schedules make short: the period if staggered, else the makespan."""
        return of.period if self is Technique.STAGGERED else of.makespan


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A proved schedule, what it comes to, and what nothing can beat.

    Attributes:
        problem: the problem.
        technique: what the schedule may do.
        schedule: the schedule.
        found: its period and makespan.
        bound: lower bounds on both.
        optimal: whether the bound, or a solver, certifies that nothing is better: no shorter period if staggered, no
            shorter makespan otherwise.
        solve_s: seconds that it took.
        listeners: living workers that compute nothing, since the schedule does without them.
        note: what the user should know of a solver that added nothing, and what would do; empty if nothing.
    """

    problem: Problem
    technique: Technique
    schedule: Schedule
    found: Measure
    bound: Bound
    optimal: bool
    solve_s: float
    listeners: frozenset[WorkerId] = frozenset()
    note: str = ""

    @property
    def plan(self) -> Plan:
        """The plan as a value of the core, made anew by each call."""
        plan = to_plan(self.problem, rows_to_run(self.problem, self.schedule))
        held = ((worker, layers) for worker in self.listeners for layers in self.problem.placement.held_by(worker))
        return with_listeners(plan, held)

    @property
    def failed(self) -> frozenset[WorkerId]:
        """The workers that are gone."""
        return self.problem.failed - self.listeners

    @property
    def failures_per_stage(self) -> tuple[int, ...]:
        """Failed workers of every stage of a regular grid."""
        return per_stage(self.failed, self.problem.num_groups) if self.problem.regular else ()

    @property
    def gap(self) -> float:
        """How far what is minimised is above its bound, as a fraction."""
        least = self.technique.minimised(self.bound)
        return self.technique.minimised(self.found) / least - 1 if least else 0.0


class Solver(StrEnum):
    """What makes schedules."""

    AUTO = "auto"
    """CP-SAT where it is installed and the problem is small enough for it to add something, else the list scheduler."""
    LIST = "list"
    """The list scheduler and its search."""
    CP_SAT = "cp-sat"
    """The list scheduler for a fifth of the time, then CP-SAT from what it found; proves optima of small problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    """What a plan may cost: see :func:`make_plan`."""

    time_limit_s: float
    engine: Solver
    seed: int
    tries: int | None


def make_plan(
    grid: CostedGrid,
    failed: Iterable[WorkerId],
    technique: Technique,
    *,
    time_limit_s: float = 1.0,
    engine: Solver = Solver.LIST,
    seed: int = 0,
    tries: int | None = None,
    keep_home: bool = False,
) -> Planned:
    """Returns the best schedule that an engine finds in time, checked.

    Args:
        grid: the grid without failures.
        failed: the workers that are gone.
        technique: what the schedule may do.
        time_limit_s: seconds for the search, at least 0; one schedule is always made.
        engine: what makes schedules.
        seed: of the search's random numbers.
        tries: the most schedules that the search makes, at least 1; None: no limit. With it and endless time,
            equal arguments give equal plans.
        keep_home: whether workers keep their own micro-batches, as SlipStream's do, instead of changing places with
            others of their stage so that failures are :mod:`lined up <holdfast.planning.lining_up>`.

    Raises:
        StateUnavailable: a stage has no living worker.
        InfeasiblePlan: memory does not hold one micro-batch.
        ConfigError: 1F1B after failures, a worker that is not in the grid, or a solver that is not installed.
        SolverTimeout: the solver failed, or did not end long after its time.
    """
    started = time.perf_counter()
    gone = frozenset(failed)
    if technique is Technique.ONE_F_ONE_B and gone:
        raise ConfigError("--technique 1f1b plans healthy grids only: use adaptive after failures")
    empty = gone if keep_home else lined_up(gone, len(grid.stages))
    problem = grid_problem(grid, empty, coupled=technique.rules.coupled)
    lower = plan_bound(grid, per_stage(gone, len(grid.stages)), technique)
    effort = _Effort(time_limit_s=time_limit_s, engine=engine, seed=seed, tries=tries)
    planned = _made(problem, technique, lower, effort, started)
    if empty == gone:
        return planned
    problem, schedule = with_failed(problem, planned.schedule, gone)
    check(problem, schedule)
    return replace(planned, problem=problem, schedule=schedule, solve_s=time.perf_counter() - started)


def plan_routes(
    placement: Placement,
    routes: Routes,
    costs: Costs,
    technique: Technique,
    *,
    ties: tuple[tuple[int, ...], ...] = (),
    time_limit_s: float = 1.0,
    engine: Solver = Solver.LIST,
    seed: int = 0,
    tries: int | None = None,
    thorough: bool = True,
) -> Planned:
    """Returns the best schedule of these routes that an engine finds in time, checked.

    Args:
        placement: who holds what.
        routes: where the micro-batches go, over workers of the placement.
        costs: costs per layer.
        technique: what the schedule may do.
        ties: tuples of layers that share weights.
        time_limit_s, engine, seed, tries: as for :func:`make_plan`.
        thorough: whether the bound looks at all that :func:`~holdfast.schedule.route_bounds.route_bound` knows.

    Raises:
        InfeasiblePlan: memory does not hold one micro-batch.
        ConfigError: a solver is not installed.
        SolverTimeout: the solver failed, or did not end long after its time.
    """
    started = time.perf_counter()
    problem = routes_problem(placement, routes, costs, coupled=technique.rules.coupled, ties=ties)
    effort = _Effort(time_limit_s=time_limit_s, engine=engine, seed=seed, tries=tries)
    lower = route_bound(problem, technique.rules, thorough=thorough)
    return _made(problem, technique, lower, effort, started)


def _made(problem: Problem, technique: Technique, lower: Bound, effort: _Effort, started: float) -> Planned:
    """The plan of a problem."""
    automatic = effort.engine is Solver.AUTO
    asked = _is_worth_it(problem, effort.time_limit_s) if automatic else effort.engine is Solver.CP_SAT
    hindrance = _hindrance(problem, technique, lower) if asked else ""
    exactly = asked and not hindrance
    limit_s = effort.time_limit_s * (_BEFORE_SOLVER if exactly else 1.0)
    best = _solve(problem, technique, lower, replace(effort, time_limit_s=limit_s))
    planned = judge(problem, technique, best.schedule, lower, started=started)
    if planned.optimal or not asked:
        return planned
    if exactly:
        planned = _solve_exactly(planned, best, effort.time_limit_s - limit_s, started)
    return replace(planned, note="" if automatic else hindrance or planned.note)


def _is_worth_it(problem: Problem, time_limit_s: float) -> bool:
    """Whether to ask CP-SAT where nobody says what to ask."""
    return problem.num_operations <= _EXACTLY and _STARTING_S <= time_limit_s < inf and installed()


def _hindrance(problem: Problem, technique: Technique, lower: Bound) -> str:
    """Why CP-SAT has nothing to add; empty if it may have something."""
    if technique is Technique.ONE_F_ONE_B:
        return "1f1b is one schedule: there is nothing to solve"
    if not suits(problem, technique.minimised(lower)):
        return "cp-sat counts moments, of short times in whole numbers: this is the list scheduler's"
    return ""


def judge(
    problem: Problem, technique: Technique, schedule: Schedule, lower: Bound, *, started: float, proved: bool = False
) -> Planned:
    """Returns a schedule, with B where the split buys nothing, and what it comes to, once it is proved right.

    Raises:
        InvalidSchedule: it breaks a rule.
    """
    staggered = technique is Technique.STAGGERED
    schedule = fuse(problem, schedule, staggered=staggered)
    check(problem, schedule)
    found = measure(problem, schedule, staggered=staggered)
    return Planned(
        problem=problem,
        technique=technique,
        schedule=schedule,
        found=found,
        bound=lower,
        optimal=proved or reached(technique.minimised(found), technique.minimised(lower)),
        solve_s=time.perf_counter() - started,
    )


def _solve_exactly(planned: Planned, best: BestFound, time_limit_s: float, started: float) -> Planned:
    """Returns the better of a plan and what CP-SAT makes of it, with the better bound of both.

    It knows no B beside I and W. So it proves something only where B takes no less time than these.
    """
    problem, technique = planned.problem, planned.technique
    staggered = technique is Technique.STAGGERED
    hint = best.schedule
    if hint.fused:
        hint = as_soon_as_possible(problem, replace(hint, fused=frozenset()))
    given, per_unit = given_of(
        problem,
        staggered=staggered,
        hint=hint,
        value=technique.minimised(measure(problem, hint, staggered=staggered)),
        goal=technique.minimised(planned.bound),
        time_limit_s=time_limit_s,
    )
    answer = run_solver(problem, given, per_unit)
    if answer is None:
        return replace(planned, note=_nothing("no schedule", time_limit_s), solve_s=time.perf_counter() - started)
    proves = problem.coupled or not any(part.split for part in problem.parts)
    lower = _raise_bound(planned, answer.bound) if proves else planned.bound
    solved = judge(problem, technique, answer.schedule, lower, started=started, proved=answer.proved and proves)
    better = solved.found.period < planned.found.period or solved.optimal
    if better:
        return replace(solved, bound=lower, solve_s=time.perf_counter() - started)
    note = _nothing("nothing better", time_limit_s)
    return replace(planned, note=note, bound=lower, solve_s=time.perf_counter() - started)


def _nothing(found: str, time_limit_s: float) -> str:
    """What to say of a solver that had too little time."""
    return (
        f"cp-sat found {found} in its {time_limit_s:.3g} s, this is the list scheduler's: give it a longer --time-limit"
    )


def _raise_bound(planned: Planned, proved: float) -> Bound:
    """Returns the bound with what a solver proved of the number that is minimised."""
    lower = planned.bound
    if planned.technique is Technique.STAGGERED:
        return replace(lower, period=max(lower.period, proved))
    longest = max(planned.problem.optimizer)
    return replace(
        lower, makespan=max(lower.makespan, proved), period=max(lower.period, max(lower.makespan, proved) + longest)
    )


def plan_bound(grid: CostedGrid, failures: tuple[int, ...], technique: Technique) -> Bound:
    """Returns what no schedule of this technique can beat.

    Args:
        grid: the grid without failures.
        failures: failed workers of every stage, fewer than pipelines each.
        technique: what schedules may do.
    """
    return bound(grid.each, grid.comm, [load(grid, count) for count in failures], technique.rules)


def _solve(problem: Problem, technique: Technique, lower: Bound, effort: _Effort) -> BestFound:
    """The best of the core's own builder, where it is asked, and of the search."""
    staggered, goal = technique is Technique.STAGGERED, technique.minimised(lower)
    if technique is Technique.ONE_F_ONE_B:
        return _built(problem, technique, Limit.CLASSIC)
    small = problem.num_operations <= (_SMALL if effort.time_limit_s else _AT_ONCE)
    first = [_built(problem, technique, limit) for limit in Limit] if problem.coupled and small else []
    first = first if first or problem.regular else [_built(problem, technique, Limit.CLASSIC)]
    split = not problem.coupled and any(part.split for part in problem.parts)
    if split:
        tries = effort.tries and max(1, effort.tries // 2)
        effort = replace(effort, time_limit_s=effort.time_limit_s / 2, tries=tries)
        first.append(_all_fused(problem, staggered, goal, effort))
    best = min(first, key=lambda found: found.value, default=None)
    if best is not None and reached(best.value, goal):
        return best
    found = _searched(problem, staggered, goal, effort)
    if split:  # what B makes of it is what counts
        schedule = fuse(problem, found.schedule, staggered=staggered)
        value = technique.minimised(measure(problem, schedule, staggered=staggered))
        found = replace(found, schedule=schedule, value=value)
    return found if best is None or found.value < best.value else best


def _searched(problem: Problem, staggered: bool, goal: float, effort: _Effort) -> BestFound:
    limit_s, seed, tries = effort.time_limit_s, effort.seed, effort.tries
    return search(problem, staggered=staggered, goal=goal, time_limit_s=limit_s, seed=seed, tries=tries)


def _all_fused(problem: Problem, staggered: bool, goal: float, effort: _Effort) -> BestFound:
    """The best schedule that has nothing but B: the split may cost more than it buys."""
    found = _searched(replace(problem, coupled=True), staggered, goal, effort)
    return replace(found, schedule=split_up(problem, found.schedule))


def _built(problem: Problem, technique: Technique, limit: Limit) -> BestFound:
    """The core's own 1F1B for any routes, which never has workers wait for one another's room."""
    placement = problem.placement.without(problem.failed)
    coupled = replace(problem, coupled=True)
    schedule = from_orders(coupled, one_f_one_b(placement, to_routes(problem), problem.costs, limit=limit))
    schedule = schedule if problem.coupled else split_up(problem, schedule)
    staggered = technique is Technique.STAGGERED
    schedule = settle(problem, schedule, staggered=staggered, early=True)
    found = measure(problem, schedule, staggered=staggered)
    return BestFound(schedule=schedule, value=technique.minimised(found))
