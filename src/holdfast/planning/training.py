"""The planner's plans for a job in training: of its whole grid, and of what is left of it after losses.

All of this is pure and bounded by a number of schedules, not by time: equal arguments give equal plans on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.routes import Routes, reroute
from holdfast.core.slots import Slots, exchanged, slots_of
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.library import PlanLibrary
from holdfast.planning.lining_up import exchanges
from holdfast.planning.normalise import per_stage
from holdfast.planning.planner import Planned, Technique, make_plan, plan_routes
from holdfast.schedule.builders import adaptive_plan

__all__ = [
    "WORTHWHILE",
    "Rerouted",
    "Terms",
    "looked_up",
    "planned_grid",
    "planned_routes",
    "regular_grid",
    "replanned",
    "rerouted",
    "grid_of_slots",
    "tries_for",
    "within_limit",
]

WORTHWHILE = 0.01
"""By which part of a step a plan must be faster for all to change to it."""
_TRIES, _AT_ONCE = 200, 12
"""The most schedules that are made for the whole grid, before training; and at a loss."""
_OPERATIONS, _OPERATIONS_AT_ONCE = 1_000_000, 60_000
"""Operations that all these may have together, but for the fewest: some seconds, and some tenths of a second."""
_FEWEST = 40
"""Schedules that are made for a whole grid of any size; of millions of operations that takes a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the planner goes by, besides the grid.

    Attributes:
        technique: what schedules may do.
        costs: costs per layer; their limit of memory is not used.
        in_flight: micro-batches that a worker may hold from the start of F to the end of W, at least 1.
        ties: tuples of layers that share weights.
        copy_s: seconds that the state of each layer takes from one worker to another; empty if not known.
        crossing_s: until all are connected anew at a boundary.
    """

    technique: Technique
    costs: Costs
    in_flight: int
    ties: tuple[tuple[int, ...], ...] = ()
    copy_s: tuple[float, ...] = ()
    crossing_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerouted:
    """A plan for what is left of a grid.

    Attributes:
        plan: it.
        period: what the planner expects a step to take, in the units of the costs; None if it did not make the plan.
        dormant: who of it computes nothing because of being told so.
    """

    plan: Plan
    period: float | None = None
    dormant: frozenset[WorkerId] = frozenset()


def within_limit(terms: Terms) -> Costs:
    """Returns the costs with the memory that every worker may use."""
    return replace(terms.costs, in_flight=terms.in_flight)


def regular_grid(pipelines: int, stages: tuple[LayerRange, ...], microbatches: int, terms: Terms) -> CostedGrid:
    """Returns the planner's grid, with the memory of every stage."""
    costs = within_limit(terms)
    return CostedGrid(pipelines=pipelines, stages=stages, microbatches=microbatches, costs=costs, ties=terms.ties)


def tries_for(operations: int, *, at_once: bool) -> int:
    """Returns how many schedules are made for a plan: the whole grid's before training, or one wanted ``at_once``.

    Args:
        operations: of one step.
        at_once: whether training waits for it.
    """
    if at_once:
        return max(1, min(_AT_ONCE, _OPERATIONS_AT_ONCE // operations))
    return max(_FEWEST, min(_TRIES, _OPERATIONS // operations))


def planned_grid(grid: CostedGrid, failed: Iterable[WorkerId], terms: Terms, *, at_once: bool) -> Planned:
    """Returns the planner's schedule of a regular grid.

    Args:
        grid: of :func:`regular_grid`.
        failed: the slots that are empty.
        terms: what the planner goes by.
        at_once: whether training waits for it.

    Raises:
        StateUnavailable: a stage has no living worker.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.

    Cost: before training up to 200 schedules, a second for tens of workers; at once up to 12, milliseconds.
    """
    tries = tries_for(grid.num_operations, at_once=at_once)
    return make_plan(grid, failed, terms.technique, time_limit_s=inf, tries=tries)


def rerouted(baseline: Plan, lost: Iterable[WorkerId], terms: Terms | None) -> Rerouted:
    """Returns the plan for what is left of a grid, not proved yet; it depends on the set of the lost alone.

    Args:
        baseline: the plan of the whole grid.
        lost: all workers that are gone.
        terms: what the planner goes by; None if orders keep to 1F1B's rules.

    Raises:
        StateUnavailable: a layer is left without an owner.
        ConfigError: a lost worker is not in the plan.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.

    Cost: up to 12 schedules; milliseconds for tens of workers.
    """
    gone = frozenset(lost)
    if not gone:
        return Rerouted(plan=baseline)
    if terms is None:
        return Rerouted(plan=adaptive_plan(baseline, gone))
    slots = slots_of(baseline)
    if slots is None:
        routes = reroute(baseline.placement, baseline.routes, gone)
        planned = planned_routes(baseline.placement.without(gone), routes, terms, at_once=True)
        return Rerouted(plan=planned.plan, period=planned.found.period)
    return _planned(slots, slots.places(gone), terms)


def replanned(plan: Plan, terms: Terms) -> Plan:
    """Returns a plan with the planner's orders, not proved yet.

    Raises:
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    slots = slots_of(plan)
    if slots is None:
        return planned_routes(plan.placement, plan.routes, terms, at_once=True).plan
    return _planned(slots, (), terms).plan


def planned_routes(placement: Placement, routes: Routes, terms: Terms, *, at_once: bool) -> Planned:
    """Returns the planner's schedule of any routes.

    Args:
        placement: who holds what.
        routes: where the micro-batches go, over workers of the placement.
        terms: what the planner goes by.
        at_once: whether training waits for it.

    Raises:
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    tries = tries_for(3 * sum(len(route.visits) for route in routes.routes), at_once=at_once)
    costs, technique = within_limit(terms), terms.technique
    return plan_routes(
        placement, routes, costs, technique, ties=terms.ties, time_limit_s=inf, tries=tries, thorough=not at_once
    )


def looked_up(library: PlanLibrary, baseline: Plan, lost: Iterable[WorkerId], terms: Terms) -> Rerouted | None:
    """Returns the plan that a library has for what is left of a grid, not proved yet; None if it has none.

    Libraries have plans for numbers of failures at certain stages. The workers of a stage hold the same layers, so any
    of them may sit anywhere on it: the plan serves whenever every stage has lost as many.

    Args:
        library: the library.
        baseline: the plan of the whole grid.
        lost: all workers that are gone.
        terms: what the planner goes by.

    Raises:
        CorruptBlob: a file is not what was written.
        ConfigError: a lost worker is not in the plan.
    """
    slots = slots_of(baseline)
    if slots is None:
        return None
    gone, grid = slots.places(lost), grid_of_slots(slots, terms)
    found = library.find(grid, len(gone), terms.technique)
    if found is None or found.failures_per_stage != per_stage(gone, len(grid.stages)):
        return None
    without = found.problem.failed - found.listeners
    plan = slots.filled(exchanged(found.plan, exchanges(gone - without, without - gone)))
    return Rerouted(plan=plan, period=found.found.period)


def grid_of_slots(slots: Slots, terms: Terms) -> CostedGrid:
    """Returns the planner's grid of these slots."""
    return regular_grid(len(slots.rows), slots.stages, len(slots.microbatches[0]), terms)


def _planned(slots: Slots, gone: Iterable[WorkerId], terms: Terms) -> Rerouted:
    """The planner's answer to places that are empty."""
    planned = planned_grid(grid_of_slots(slots, terms), gone, terms, at_once=True)
    return Rerouted(plan=slots.filled(planned.plan), period=planned.found.period)
