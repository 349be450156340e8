"""Pipelines of whoever is left: to what grid a job goes over, by handing layers over, once workers are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from holdfast.core.builders import adaptive_plan, assigned_plan
from holdfast.core.evaluate import evaluate
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, lacking
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.routes import Visit
from holdfast.core.validate import validate
from holdfast.errors import InfeasiblePlan
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

__all__ = ["Reshaped", "Shapes", "reshaped"]

Row = tuple[Visit, ...]
"""A pipeline: its workers and their layers, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What new pipelines are made by.

    Attributes:
        costs: per layer, of the job's model.
        minimum: n0, the fewest workers of a pipeline.
        state: what another worker needs to have a layer, in any unit, by layer.
        terms: what the planner goes by; None if orders keep to 1F1B's rules.
    """

    costs: Costs
    minimum: int
    state: tuple[int, ...]
    terms: Terms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshaped:
    """The grid that whoever is left is to become.

    Attributes:
        plan: its plan.
        before_s: how long a step takes by re-routing alone, in the units of the costs.
        period: how long it takes then.
        takes: the layers that workers lack for it.
    """

    plan: Plan
    before_s: float
    period: float
    takes: tuple[tuple[WorkerId, LayerRange], ...]

    @property
    def why(self) -> str:
        """What is gained, for people."""
        sizes = sorted({route.workers for route in self.plan.routes.routes}, key=lambda row: (len(row), row))
        pipelines = " + ".join(str(len(row)) for row in sizes)
        gain = self.before_s / self.period - 1
        return f"{len(self.plan.workers)} workers become pipelines of {pipelines}: steps are {gain:.0%} faster"


def reshaped(baseline: Plan, lost: Iterable[WorkerId], shapes: Shapes) -> Reshaped | None:
    """Returns the fastest grid that the others can become, proved right; None if re-routing alone is hardly slower.

    Tried are the paper's rules (pipelines that have enough workers stay as they are, others borrow or merge), and the
    pipelines that are best for so many workers. Workers take the places for which they lack least.

    Args:
        baseline: the plan of the whole grid, in which every worker is in one pipeline.
        lost: all workers that are gone.
        shapes: what new pipelines are made by.

    Raises:
        StateUnavailable: a layer is left without an owner.
    """
    gone = frozenset(lost).intersection(baseline.workers)
    before_s = _period(_rerouted(baseline, gone, shapes), shapes)
    found: list[Reshaped] = []
    for rows, counts in _candidates(baseline, gone, shapes):
        try:
            plan = assigned_plan(rows, baseline.routes.microbatches, counts, shapes.costs)
            if shapes.terms is not None:
                plan = replanned(plan, shapes.terms)
        except InfeasiblePlan:
            continue
        validate(plan)
        takes = lacking(baseline.placement.without(gone), plan.placement)
        found.append(Reshaped(plan=plan, before_s=before_s, period=_period(plan, shapes), takes=takes))
    best = min(found, key=lambda each: (each.period, len(each.takes)), default=None)
    return None if best is None or best.period >= before_s * (1 - WORTHWHILE) else best


def _rerouted(baseline: Plan, gone: frozenset[WorkerId], shapes: Shapes) -> Plan:
    """What answers the loss at once."""
    if shapes.terms is None:
        return adaptive_plan(baseline, gone)
    return rerouted(baseline, gone, shapes.terms).plan


def _period(plan: Plan, shapes: Shapes) -> float:
    if shapes.terms is None:
        return evaluate(plan, shapes.costs).period
    staggered = shapes.terms.technique is Technique.STAGGERED
    return evaluate(plan, shapes.costs, staggered=staggered, ties=shapes.terms.ties).period


def _candidates(
    baseline: Plan, gone: frozenset[WorkerId], shapes: Shapes
) -> Iterator[tuple[tuple[Row, ...], tuple[int, ...]]]:
    """Yields pipelines of whoever is left, and their micro-batches."""
    rows = _rows(baseline)
    left = [visit.worker for row in rows for visit in row if visit.worker not in gone]
    microbatches = len(baseline.routes.microbatches)
    if len(left) < shapes.minimum:
        return
    table = _table(shapes)
    most = min(len(left), table.num_layers, microbatches)
    templates = best_templates(table, range(shapes.minimum, most + 1), microbatches)
    held = {worker: baseline.placement.held_layers(worker) for worker in left}
    for made in (
        _by_the_rules(rows, gone, templates, held, shapes.state),
        _anew(templates, held, shapes.state, microbatches),
    ):
        if made and len(made) <= microbatches:
            paces = [pace_of(times, last_slowest(times)) for times in (_stage_s(row, table) for row in made)]
            yield made, fastest_shares(paces, microbatches)


def _rows(baseline: Plan) -> tuple[Row, ...]:
    return tuple({route.workers: route.visits for route in baseline.routes.by_index}.values())


def _table(shapes: Shapes) -> StageTable:
    costs = shapes.costs
    layer_s = tuple(map(sum, zip(costs.forward, costs.input, costs.weight, strict=True)))
    nothing = (0,) * costs.num_layers
    return StageTable(layer_s=(layer_s,), state_bytes=nothing, held_bytes=nothing, recomputed_bytes=nothing)


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
    workers = [visit.worker for row in rows for visit in row]
    number = {worker: at for at, worker in enumerate(workers)}
    before = Pipelines(pipelines=tuple(tuple(number[visit.worker] for visit in row) for row in rows))
    lost = frozenset(number[worker] for worker in gone)
    if not templates:
        return ()
    after = reconfigured(before, lost, min(templates), templates)
    if after.dormant:  # somebody would be left out, who lives
        return ()
    as_they_are = {tuple(number[visit.worker] for visit in row): row for row in rows}
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
    state: Sequence[int],
    microbatches: int,
) -> tuple[Row, ...]:
    """The best pipelines for so many workers, each of whom takes the place for which it lacks least."""
    try:
        sizes = best_instance({n: each.pace for n, each in templates.items()}, len(held), 1, microbatches).sizes
    except InfeasiblePlan:
        return ()
    if sum(sizes) != len(held):  # likewise
        return ()
    rows = [templates[size].layers_by_node for size in sizes]
    seated = iter(seat([place for places in rows for place in places], tuple(held), held, state).nodes)
    return tuple(_row(places, list(islice(seated, len(places)))) for places in rows)


def _row(places: Sequence[LayerRange], workers: Sequence[WorkerId]) -> Row:
    return tuple(map(Visit, workers, places))
