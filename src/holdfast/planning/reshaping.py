"""Pipelines of whoever is left: to what grid a job goes over, by handing layers over, once workers are lost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, lacking
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.routes import Visit
from holdfast.errors import InfeasiblePlan, StateUnavailable
from holdfast.planning.course import handed_over
from holdfast.planning.maker import PROVING, PlanMaker
from holdfast.planning.planner import Technique
from holdfast.planning.templates.assign import seat
from holdfast.planning.templates.batches import fastest_shares
from holdfast.planning.templates.instances import best_instance
from holdfast.planning.templates.mapping import best_templates
from holdfast.planning.templates.pace import pace_of
from holdfast.planning.templates.reconfigure import Pipelines, reconfigured
from holdfast.planning.templates.stages import StageTable
from holdfast.planning.templates.template import Template, last_slowest
from holdfast.planning.training import WORTHWHILE, Terms, replanned, rerouted
from holdfast.schedule.builders import assigned_plan
from holdfast.schedule.evaluate import measured

__all__ = ["Reshaped", "Shapes", "regrouped", "reshaped"]

Row = tuple[Visit, ...]
"""A pipeline: its workers and their layers, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What new pipelines are made by.

    Attributes:
        costs: per layer, of the job's model.
        minimum: n0, the fewest workers of a pipeline.
        smallest: the fewest where no more are left; 0: ``minimum``.
        fewest: with how many workers the job is to go on at least; 0: with any that hold all layers.
        tolerate: f, how many failures at once are to leave a copy of every layer.
        state: what another worker needs to have a layer, in any unit, by layer.
        copy_s: seconds that this is on its way, by layer; empty if that is not known.
        crossing_s: until all are connected anew at a boundary.
        table: what stages take.
        terms: what the planner goes by; None if orders keep to 1F1B's rules.
    """

    costs: Costs
    minimum: int
    state: tuple[int, ...]
    table: StageTable
    smallest: int = 0
    fewest: int = 0
    tolerate: int = 0
    copy_s: tuple[float, ...] = ()
    crossing_s: float = 0.0
    terms: Terms | None = None

    def least_workers(self, workers: int) -> int:
        """Returns the fewest workers of a pipeline where so many are left: fewer than usual if these are fewer."""
        return max(self.smallest, min(self.minimum, workers)) if self.smallest else self.minimum

    def least_pipelines(self, workers: int, smallest: int) -> int:
        """Returns how many pipelines workers are to make at least: f + 1, or as many as they suffice for."""
        return max(1, min(self.tolerate + 1, workers // smallest))

    @property
    def terms_in_memory(self) -> Terms | None:
        """What the planner goes by where no worker may take more memory than it has, however many may be in flight."""
        if self.terms is None or self.table.memory_bytes is None:
            return self.terms
        each = (self.table.memory_bytes,) * self.table.num_layers
        return replace(self.terms, costs=replace(self.terms.costs, capacity=each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshaped:
    """The grid that whoever is left is to become.

    Attributes:
        plan: its plan.
        before_s: how long a step takes by re-routing alone, in the units of the costs; infinite where nobody else holds
            some layer of those that leave.
        period: how long it takes then.
        takes: the layers that workers lack for it.
        copy_s: how long they are on their way, to all takers side by side; 0 if that is not known.
        crossing_s: until all are connected anew at a boundary.
    """

    plan: Plan
    before_s: float
    period: float
    takes: tuple[tuple[WorkerId, LayerRange], ...]
    copy_s: float = 0.0
    crossing_s: float = 0.0

    @property
    def why(self) -> str:
        """What is gained, for people."""
        sizes = sorted({route.workers for route in self.plan.routes.routes}, key=lambda row: (len(row), row))
        pipelines = " + ".join(str(len(row)) for row in sizes)
        gain = f"steps are {self.before_s / self.period - 1:.0%} faster"
        if math.isinf(self.before_s):
            gain = "else a layer would have no owner"
        return f"{len(self.plan.workers)} workers become pipelines of {pipelines}: {gain}"

    def steps_gained(self, expected_s: float) -> float:
        """Returns how many steps more are done in a time, in the units of the costs, than by re-routing alone.

        All train by re-routing until the layers are handed over.
        """
        if math.isinf(self.before_s):
            return math.inf
        course = handed_over(self.before_s, self.period, self.copy_s, self.crossing_s)
        return course.gained(expected_s, self.before_s)


def reshaped(
    baseline: Plan,
    lost: Iterable[WorkerId],
    shapes: Shapes,
    *,
    leaving: Iterable[WorkerId] = (),
    joining: Iterable[WorkerId] = (),
    maker: PlanMaker = PROVING,
) -> Reshaped | None:
    """Returns the fastest grid that the others can become, proved right; None if re-routing alone is hardly slower.

    Tried are the paper's rules (pipelines that have enough workers stay as they are, others borrow or merge), and the
    pipelines that are best for so many workers. Workers take the places for which they lack least. As many failures
    are tolerated afterwards as the job is to tolerate, while workers are enough for that.

    Args:
        baseline: the plan of the whole grid, in which no worker is in two pipelines.
        lost: all workers that are gone.
        shapes: what new pipelines are made by.
        leaving: others that are to go, and have their layers until then.
        joining: who has come, without any layers: as many of the first ones are taken as are of use.
        maker: of plans.

    Raises:
        StateUnavailable: a layer is left without an owner.
    """
    absent, come = frozenset(lost).intersection(baseline.workers), tuple(joining)
    gone = absent.union(leaving)
    here = baseline.placement.without(absent)
    if unowned := here.unowned_layers():
        raise StateUnavailable(unowned)
    before_s, terms = _period_rerouted(baseline, gone, shapes), shapes.terms_in_memory
    found: list[Reshaped] = []
    for rows, counts in _candidates(baseline, gone, shapes, come):
        try:
            plan = assigned_plan(rows, baseline.routes.microbatches, counts, shapes.costs)
            if terms is not None:
                plan = replanned(plan, terms)
        except InfeasiblePlan:
            continue
        takes = lacking(here, plan.placement, come)
        period, copy_s = _period(plan, shapes), _copy_s(takes, shapes)
        found.append(
            Reshaped(
                plan=plan,
                before_s=before_s,
                period=period,
                takes=takes,
                copy_s=copy_s,
                crossing_s=shapes.crossing_s,
            )
        )
    best = min(found, key=lambda each: (each.period, len(each.takes)), default=None)
    if best is None or best.period >= before_s * (1 - WORTHWHILE):
        return None
    maker.prove(best.plan, terms)
    return best


def regrouped(baseline: Plan, workers: Sequence[WorkerId], shapes: Shapes, *, maker: PlanMaker) -> Plan | None:
    """Returns the fastest pipelines of workers who are all to load what they are to hold, proved right.

    As many take part as pipelines can be made of; None if they can be made of none of them.

    Args:
        baseline: the plan of the whole grid.
        workers: who is left of it.
        shapes: what pipelines are made by.
        maker: of plans.
    """
    microbatches = baseline.routes.microbatches
    for count in range(len(workers), 0, -1):
        templates = _templates_of(shapes, count, len(microbatches))
        rows = _anew(templates, dict.fromkeys(workers[:count], ()), shapes, len(microbatches)) if templates else ()
        if not rows:
            continue
        plan = assigned_plan(rows, microbatches, _shares(rows, shapes.table, len(microbatches)), shapes.costs)
        try:
            return maker.scheduled(plan, shapes.terms_in_memory)
        except InfeasiblePlan:
            continue
    return None


def _templates_of(shapes: Shapes, workers: int, microbatches: int) -> Mapping[int, Template]:
    """The templates that so many workers may make pipelines of; none if they are too few."""
    least, most = shapes.least_workers(workers), min(workers, shapes.table.num_layers, microbatches)
    return _templates(shapes.table, range(least, most + 1), microbatches) if least <= most else {}


def _period_rerouted(baseline: Plan, gone: frozenset[WorkerId], shapes: Shapes) -> float:
    """How long a step takes by what answers the loss at once; infinite if nothing does."""
    if baseline.placement.unowned_layers(gone):
        return math.inf
    return _period(rerouted(baseline, gone, shapes.terms).plan, shapes)


def _copy_s(takes: Iterable[tuple[WorkerId, LayerRange]], shapes: Shapes) -> float:
    seconds: defaultdict[WorkerId, float] = defaultdict(float)
    for worker, layers in takes if shapes.copy_s else ():
        seconds[worker] += math.fsum(shapes.copy_s[layers.start : layers.stop])
    return max(seconds.values(), default=0.0)


def _period(plan: Plan, shapes: Shapes) -> float:
    if shapes.terms is None:
        return measured(plan, shapes.costs).period
    staggered = shapes.terms.technique is Technique.STAGGERED
    return measured(plan, shapes.costs, staggered=staggered, ties=shapes.terms.ties).period


def _candidates(
    baseline: Plan, gone: frozenset[WorkerId], shapes: Shapes, come: tuple[WorkerId, ...]
) -> Iterator[tuple[tuple[Row, ...], tuple[int, ...]]]:
    """Yields pipelines of whoever is left, and their micro-batches."""
    rows = _rows(baseline)
    computing = dict.fromkeys(visit.worker for row in rows for visit in row)
    left = [worker for worker in (*computing, *sorted(set(baseline.workers) - set(computing))) if worker not in gone]
    microbatches = len(baseline.routes.microbatches)
    if len(left) + len(come) < shapes.least_workers(len(left) + len(come)):
        return
    table, templates = shapes.table, _templates_of(shapes, len(left) + len(come), microbatches)
    held = {worker: baseline.placement.held_layers(worker) for worker in left}
    anew = (
        _anew(templates, held | dict.fromkeys(come[:some], ()), shapes, microbatches) for some in range(len(come) + 1)
    )
    for made in (_by_the_rules(rows, gone, templates, held, shapes.state), *anew):
        if made and shapes.least_pipelines(sum(map(len, made)), min(templates)) <= len(made) <= microbatches:
            yield made, _shares(made, table, microbatches)


@lru_cache(maxsize=8)
def _templates(table: StageTable, sizes: range, microbatches: int) -> Mapping[int, Template]:
    """The templates of a job, which are made once for as many workers as there are."""
    return best_templates(table, sizes, microbatches)


def _rows(baseline: Plan) -> tuple[Row, ...]:
    return tuple({route.workers: route.visits for route in baseline.routes.by_index}.values())


def _shares(rows: Sequence[Row], table: StageTable, microbatches: int) -> tuple[int, ...]:
    """The micro-batches of each pipeline, by which the slowest is the fastest."""
    paces = [pace_of(times, last_slowest(times)) for times in (_stage_s(row, table) for row in rows)]
    return fastest_shares(paces, microbatches)


def _stage_s(row: Row, table: StageTable) -> tuple[float, ...]:
    return tuple(table.seconds(visit.layers, 1) for visit in row)


def _by_the_rules(
    rows: Sequence[Row],
    gone: frozenset[WorkerId],
    templates: Mapping[int, Template],
    held: Mapping[WorkerId, Sequence[int]],
    state: Sequence[int],
) -> tuple[Row, ...]:
    """Pipelines that are left as they are, and others that have borrowed, or were merged."""
    workers = list(dict.fromkeys((*(visit.worker for row in rows for visit in row), *held)))
    number = {worker: at for at, worker in enumerate(workers)}
    in_rows = tuple(tuple(number[visit.worker] for visit in row) for row in rows)
    idle = tuple(range(sum(map(len, rows)), len(workers)))  # of a grid that was to grow
    before = Pipelines(pipelines=in_rows, dormant=idle)
    lost = frozenset(number[worker] for worker in gone.intersection(number))  # others of them ran nothing so far
    if not templates or len(workers) - len(lost) < min(templates):  # only with those who have come they are enough
        return ()
    after = reconfigured(before, lost, min(templates), templates)
    if after.dormant:  # somebody would be left out, who lives
        return ()
    as_they_are = dict(zip(in_rows, rows, strict=True))
    made = []
    for nodes in after.pipelines:
        if (same := as_they_are.get(nodes)) is not None:
            made.append(same)
            continue
        places = templates[len(nodes)].layers_by_node
        made.append(_row(places, seat(places, [workers[node] for node in nodes], held, state).nodes))
    return tuple(made)


def _anew(
    templates: Mapping[int, Template],
    held: Mapping[WorkerId, Sequence[int]],
    shapes: Shapes,
    microbatches: int,
) -> tuple[Row, ...]:
    """The best pipelines for so many workers, each of whom takes the place for which it lacks least."""
    paces = {n: each.pace for n, each in templates.items()}
    least = shapes.least_pipelines(len(held), min(templates, default=shapes.minimum))
    try:
        sizes = best_instance(paces, len(held), least, microbatches).sizes
    except InfeasiblePlan:
        return ()
    if sum(sizes) != len(held):  # likewise
        return ()
    rows = [templates[size].layers_by_node for size in sizes]
    seated = iter(seat([place for places in rows for place in places], tuple(held), held, shapes.state).nodes)
    return tuple(_row(places, list(islice(seated, len(places)))) for places in rows)


def _row(places: Sequence[LayerRange], workers: Sequence[WorkerId]) -> Row:
    return tuple(map(Visit, workers, places))
