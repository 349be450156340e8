"""Pipelines of whoever is left: to what grid a job goes over, by handing layers over, once workers are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from holdfast.planning.templates.assign import cheapest_assignment, seat
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
    for made in (_by_the_rules(rows, gone, templates, shapes), _anew(left, baseline, templates, shapes, microbatches)):
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
    rows: Sequence[Row], gone: frozenset[WorkerId], templates: Mapping[int, Template], shapes: Shapes
) -> tuple[Row, ...]:
    """Pipelines that are left as they are, and others that have borrowed, or were merged."""
    workers = [visit.worker for row in rows for visit in row]
    number = {worker: at for at, worker in enumerate(workers)}
    held = {number[visit.worker]: visit.layers.indices for row in rows for visit in row}
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
        template = templates[len(nodes)]
        seated = seat(template, nodes, held, shapes.state).nodes
        made.append(_row([workers[node] for node in seated], template))
    return tuple(made)


def _anew(
    left: Sequence[WorkerId], baseline: Plan, templates: Mapping[int, Template], shapes: Shapes, microbatches: int
) -> tuple[Row, ...]:
    """The best pipelines for so many workers, each of whom takes the place for which it lacks least."""
    try:
        sizes = best_instance({n: each.pace for n, each in templates.items()}, len(left), 1, microbatches).sizes
    except InfeasiblePlan:
        return ()
    places = [layers for size in sizes for layers in templates[size].layers_by_node]
    if len(places) != len(left):  # likewise
        return ()
    held = [frozenset(baseline.placement.held_layers(worker)) for worker in left]
    costs = [[sum(shapes.state[layer] for layer in set(part.indices) - has) for part in places] for has in held]
    taken = cheapest_assignment(costs)
    seated = iter([worker for _, worker in sorted(zip(taken, left, strict=True))])
    return tuple(_row([next(seated) for _ in range(size)], templates[size]) for size in sizes)


def _row(workers: Sequence[WorkerId], template: Template) -> Row:
    return tuple(Visit(worker, layers) for worker, layers in zip(workers, template.layers_by_node, strict=True))
