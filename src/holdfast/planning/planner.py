"""Makes a plan: the problem, the engines, the bound and the proof, in one call."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from holdfast.core.bounds import Bound, BoundRules, bound_of_loads
from holdfast.core.builders import Limit as Held
from holdfast.core.builders import one_f_one_b
from holdfast.core.ids import WorkerId
from holdfast.core.placement import regular_placement
from holdfast.core.plan import Plan
from holdfast.errors import ConfigError
from holdfast.planning.list_scheduler import Schedule
from holdfast.planning.normalise import load
from holdfast.planning.search import Found, search
from holdfast.planning.shop import Grid, Shop, open_shop, to_plan, to_routes
from holdfast.planning.timing import Measure, check, from_orders, measure

__all__ = ["Planned", "Technique", "make_plan", "plan_bound"]

_SMALL = 50_000
"""Operations up to which the coupled techniques also ask the builder of the core, which makes objects."""


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
    """

    shop: Shop
    technique: Technique
    schedule: Schedule
    found: Measure
    bound: Bound
    optimal: bool
    failures_per_stage: tuple[int, ...]
    solve_s: float

    @property
    def plan(self) -> Plan:
        """The plan as a value of the core; made anew by each call."""
        return to_plan(self.shop, self.schedule.rows)

    @property
    def gap(self) -> float:
        """How far what is minimised is above its bound, as a fraction."""
        staggered = self.technique is Technique.STAGGERED
        value, least = (
            (self.found.period, self.bound.period) if staggered else (self.found.makespan, self.bound.makespan)
        )
        return value / least - 1 if least else 0.0


def make_plan(
    grid: Grid, failed: Iterable[WorkerId], technique: Technique, *, time_limit_s: float = 1.0, seed: int = 0
) -> Planned:
    """Returns the best schedule that the list engine finds in time, checked.

    Args:
        grid: the grid without failures.
        failed: the workers that are gone.
        technique: what the schedule may do.
        time_limit_s: seconds for the search, at least 0; one schedule is always made.
        seed: of the search's random numbers.

    Raises:
        StateUnavailable: a stage has no living worker.
        InfeasiblePlan: memory does not hold one micro-batch.
        ConfigError: 1F1B after failures, or a worker that is not in the grid.
    """
    started = time.perf_counter()
    gone = frozenset(failed)
    if technique is Technique.ONE_F_ONE_B and gone:
        raise ConfigError("--technique 1f1b plans healthy grids only: use adaptive after failures")
    shop = open_shop(grid, gone, coupled=technique.rules.coupled)
    lost = tuple(sum(worker.stage == stage for worker in gone) for stage in range(len(grid.stages)))
    lower = plan_bound(grid, lost, technique)
    best = _solve(shop, technique, lower, time_limit_s, seed)
    return judge(shop, technique, best.schedule, lower, started=started)


def judge(
    shop: Shop, technique: Technique, schedule: Schedule, lower: Bound, *, started: float, proved: bool = False
) -> Planned:
    """Returns a schedule with what it comes to, once it is proved right.

    Raises:
        InvalidSchedule: it breaks a rule.
    """
    check(shop, schedule)
    staggered = technique is Technique.STAGGERED
    found = measure(shop, schedule, staggered=staggered)
    value, goal = (found.period, lower.period) if staggered else (found.makespan, lower.makespan)
    return Planned(
        shop=shop,
        technique=technique,
        schedule=schedule,
        found=found,
        bound=lower,
        optimal=proved or value <= goal * (1 + 1e-12),
        failures_per_stage=tuple(
            sum(worker.stage == stage for worker in shop.failed) for stage in range(shop.num_stages)
        ),
        solve_s=time.perf_counter() - started,
    )


def plan_bound(grid: Grid, failures: tuple[int, ...], technique: Technique) -> Bound:
    """Returns what no schedule of this technique can beat.

    Args:
        grid: the grid without failures.
        failures: failed workers of every stage, fewer than pipelines each.
        technique: what schedules may do.
    """
    return bound_of_loads(grid.each, grid.comm, [load(grid, count) for count in failures], technique.rules)


def _solve(shop: Shop, technique: Technique, lower: Bound, time_limit_s: float, seed: int) -> Found:
    staggered = technique is Technique.STAGGERED
    goal = lower.period if staggered else lower.makespan
    if technique is Technique.ONE_F_ONE_B:
        return _builders(shop, Held.CLASSIC)
    first = [_builders(shop, held) for held in Held] if shop.coupled and shop.num_operations <= _SMALL else []
    best = min(first, key=lambda found: found.value, default=None)
    if best is not None and best.value <= goal:
        return best
    found = search(shop, staggered=staggered, goal=goal, time_limit_s=time_limit_s, seed=seed)
    return found if best is None or found.value < best.value else best


def _builders(shop: Shop, held: Held) -> Found:
    """The core's own 1F1B for any routes."""
    placement = regular_placement(shop.grid.pipelines, shop.grid.stages).without(shop.failed)
    schedule = from_orders(shop, one_f_one_b(placement, to_routes(shop), shop.grid.costs, limit=held))
    return Found(schedule=schedule, value=measure(shop, schedule, staggered=False).makespan)
