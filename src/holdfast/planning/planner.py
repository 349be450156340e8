"""Makes a plan: the problem, the engines, the bound and the proof, in one call."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from holdfast.core.bounds import Bound, BoundRules, bound
from holdfast.core.builders import Limit as Held
from holdfast.core.builders import one_f_one_b
from holdfast.core.ids import WorkerId
from holdfast.core.placement import regular_placement
from holdfast.core.plan import Plan, with_listeners
from holdfast.errors import ConfigError
from holdfast.planning.lining_up import lined_up, with_failed
from holdfast.planning.list_scheduler import Schedule
from holdfast.planning.normalise import load, per_stage
from holdfast.planning.search import BestFound, reached, search
from holdfast.planning.shop import CostedGrid, Shop, open_shop, to_plan, to_routes
from holdfast.planning.solvers.process import installed, problem_of, run_solver
from holdfast.planning.timing import (
    Measure,
    as_soon_as_possible,
    check,
    from_orders,
    fuse,
    measure,
    rows_to_run,
    split_up,
)

__all__ = ["Engine", "Planned", "Technique", "judge", "make_plan", "plan_bound"]

_SMALL, _AT_ONCE = 50_000, 2_000
"""Operations up to which the coupled techniques also ask the builder of the core, which makes objects; the second where
a plan is wanted at once."""


_EXACTLY = 2_000
"""Operations up to which CP-SAT is asked where nobody says what to ask."""
_STARTING_S = 2.0
"""With less time it is not: its process takes a second of it to start."""


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
        shop: the problem.
        technique: what the schedule may do.
        schedule: the schedule.
        found: its period and makespan.
        bound: lower bounds on both.
        optimal: whether the bound, or a solver, certifies that nothing is better: no shorter period if staggered, no
            shorter makespan otherwise.
        failures_per_stage: failed workers of every stage.
        solve_s: seconds that it took.
        spares: living workers that compute nothing, since the schedule does without them.
        note: what the user should know of a solver that added nothing, and what would do; empty if nothing.
    """

    shop: Shop
    technique: Technique
    schedule: Schedule
    found: Measure
    bound: Bound
    optimal: bool
    failures_per_stage: tuple[int, ...]
    solve_s: float
    spares: frozenset[WorkerId] = frozenset()
    note: str = ""

    @property
    def plan(self) -> Plan:
        """The plan as a value of the core, made anew by each call."""
        stages = self.shop.grid.stages
        plan = to_plan(self.shop, rows_to_run(self.shop, self.schedule))
        return with_listeners(plan, [(worker, stages[worker.stage]) for worker in self.spares])

    @property
    def gap(self) -> float:
        """How far what is minimised is above its bound, as a fraction."""
        least = self.technique.minimised(self.bound)
        return self.technique.minimised(self.found) / least - 1 if least else 0.0


class Engine(StrEnum):
    """What makes schedules."""

    AUTO = "auto"
    """CP-SAT where it is installed and the problem is small enough for it to add something, else the list scheduler."""
    LIST = "list"
    """The list scheduler and its search."""
    CP_SAT = "cp-sat"
    """The list scheduler for a fifth of the time, then CP-SAT from what it found; proves optima of small problems."""
    MILP = "milp"
    """The paper's mixed-integer programme: a reference for the tiniest problems."""


def make_plan(
    grid: CostedGrid,
    failed: Iterable[WorkerId],
    technique: Technique,
    *,
    time_limit_s: float = 1.0,
    engine: Engine = Engine.LIST,
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
    shop = open_shop(grid, empty, coupled=technique.rules.coupled)
    lower = plan_bound(grid, per_stage(gone, len(grid.stages)), technique)
    asked, engine = engine, _suitable(shop, time_limit_s) if engine is Engine.AUTO else engine
    share = 1.0 if engine is Engine.LIST else 0.2
    best = _solve(shop, technique, lower, time_limit_s * share, seed, tries)
    planned = judge(shop, technique, best.schedule, lower, started=started)
    if engine is not Engine.LIST and not planned.optimal:
        planned = _solve_exactly(planned, best, engine, time_limit_s * (1 - share), started)
        planned = replace(planned, note="") if asked is Engine.AUTO else planned
    if empty == gone:
        return planned
    shop, schedule = with_failed(shop, planned.schedule, gone)
    check(shop, schedule)
    return replace(planned, shop=shop, schedule=schedule, solve_s=time.perf_counter() - started)


def _suitable(shop: Shop, time_limit_s: float) -> Engine:
    """What to ask where nobody says."""
    worth = shop.num_operations <= _EXACTLY and _STARTING_S <= time_limit_s < inf
    return Engine.CP_SAT if worth and installed() else Engine.LIST


def judge(
    shop: Shop, technique: Technique, schedule: Schedule, lower: Bound, *, started: float, proved: bool = False
) -> Planned:
    """Returns a schedule, with B where the split buys nothing, and what it comes to, once it is proved right.

    Raises:
        InvalidSchedule: it breaks a rule.
    """
    staggered = technique is Technique.STAGGERED
    schedule = fuse(shop, schedule, staggered=staggered)
    check(shop, schedule)
    found = measure(shop, schedule, staggered=staggered)
    return Planned(
        shop=shop,
        technique=technique,
        schedule=schedule,
        found=found,
        bound=lower,
        optimal=proved or reached(technique.minimised(found), technique.minimised(lower)),
        failures_per_stage=per_stage(shop.failed, shop.num_stages),
        solve_s=time.perf_counter() - started,
    )


def _solve_exactly(planned: Planned, best: BestFound, engine: Engine, time_limit_s: float, started: float) -> Planned:
    """Returns the better of a plan and what a solver makes of it, with the better bound of both.

    Solvers know no B beside I and W. So they prove something only where B takes no less time than these.
    """
    shop, technique = planned.shop, planned.technique
    staggered = technique is Technique.STAGGERED
    hint = best.schedule
    if hint.fused:
        hint = as_soon_as_possible(shop, replace(hint, fused=frozenset()), [0] * shop.num_stages)
    problem, scale = problem_of(
        shop,
        staggered=staggered,
        hint=hint,
        value=technique.minimised(measure(shop, hint, staggered=staggered)),
        goal=technique.minimised(planned.bound),
        time_limit_s=time_limit_s,
    )
    answer = run_solver(engine.value.replace("-", "_"), shop, problem, scale)
    if answer is None:
        note = (
            f"{engine} found no schedule in its {time_limit_s:.3g} s, this is the list scheduler's: {_would_do(engine)}"
        )
        return replace(planned, note=note, solve_s=time.perf_counter() - started)
    proves = shop.coupled or not any(stage.split for stage in shop.grid.each)
    lower = _raise_bound(planned, answer.bound) if proves else planned.bound
    solved = judge(shop, technique, answer.schedule, lower, started=started, proved=answer.proved and proves)
    better = solved.found.period < planned.found.period or solved.optimal
    if better:
        return replace(solved, bound=lower, solve_s=time.perf_counter() - started)
    note = (
        f"{engine} found nothing better in its {time_limit_s:.3g} s, this is the list scheduler's: {_would_do(engine)}"
    )
    return replace(planned, note=note, bound=lower, solve_s=time.perf_counter() - started)


def _would_do(engine: Engine) -> str:
    """What to ask for instead of an engine that had too little time."""
    more = "give it a longer --time-limit"
    return more if engine is not Engine.MILP else f"{more}, or take --solver cp-sat, which needs far less time"


def _raise_bound(planned: Planned, proved: float) -> Bound:
    """Returns the bound with what a solver proved of the number that is minimised."""
    lower = planned.bound
    if planned.technique is Technique.STAGGERED:
        return replace(lower, period=max(lower.period, proved))
    longest = max(stage.optimizer for stage in planned.shop.grid.each)
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


def _solve(
    shop: Shop, technique: Technique, lower: Bound, time_limit_s: float, seed: int, tries: int | None
) -> BestFound:
    staggered, goal = technique is Technique.STAGGERED, technique.minimised(lower)
    if technique is Technique.ONE_F_ONE_B:
        return _builders(shop, Held.CLASSIC)
    small = shop.num_operations <= (_SMALL if time_limit_s else _AT_ONCE)
    first = [_builders(shop, held) for held in Held] if shop.coupled and small else []
    if not shop.coupled and any(stage.split for stage in shop.grid.each):
        time_limit_s /= 2
        if tries is not None:
            tries = max(1, tries // 2)
        first = [_all_fused(shop, technique, lower, time_limit_s, seed, tries)]
    best = min(first, key=lambda found: found.value, default=None)
    if best is not None and reached(best.value, goal):
        return best
    found = search(shop, staggered=staggered, goal=goal, time_limit_s=time_limit_s, seed=seed, tries=tries)
    return found if best is None or found.value < best.value else best


def _all_fused(
    shop: Shop, technique: Technique, lower: Bound, time_limit_s: float, seed: int, tries: int | None
) -> BestFound:
    """The best schedule that has nothing but B: the split may cost more than it buys."""
    staggered, goal = technique is Technique.STAGGERED, technique.minimised(lower)
    coupled = open_shop(shop.grid, shop.failed, coupled=True, worker_of=shop.worker_of)
    found = search(coupled, staggered=staggered, goal=goal, time_limit_s=time_limit_s, seed=seed, tries=tries)
    return BestFound(schedule=split_up(shop, found.schedule), value=found.value)


def _builders(shop: Shop, held: Held) -> BestFound:
    """The core's own 1F1B for any routes."""
    placement = regular_placement(shop.grid.pipelines, shop.grid.stages).without(shop.failed)
    schedule = from_orders(shop, one_f_one_b(placement, to_routes(shop), shop.grid.costs, limit=held))
    return BestFound(schedule=schedule, value=measure(shop, schedule, staggered=False).makespan)
