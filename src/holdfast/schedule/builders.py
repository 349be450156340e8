"""Builds orders: GPipe, 1F1B, and a list schedule that works for any routes, hence after any survivable failure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from fractions import Fraction

from holdfast.core.ids import Batch, MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, Placement, regular_placement
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, StageCosts, unit_costs
from holdfast.core.routes import Route, Routes, Visit, home_routes, reroute
from holdfast.core.schedule import Op, OpKind, Orders
from holdfast.errors import ConfigError
from holdfast.schedule.list_scheduler import Alternation, list_schedule
from holdfast.schedule.problem import Problem, orders_of, routes_problem
from holdfast.schedule.timing import measure

__all__ = ["Limit", "adaptive_plan", "assigned_plan", "gpipe_orders", "home_plan", "one_f_one_b", "regular_plan"]


class Limit(StrEnum):
    """What limits the micro-batches that a worker holds between F and B."""

    CLASSIC = "classic"
    """1F1B's own number, p - s on stage s of p, and the memory if the costs have a limit."""
    MEMORY = "memory"
    """Only the memory, if the costs have a limit."""


def gpipe_orders(placement: Placement, routes: Routes) -> Orders:
    """Returns all forwards and then all full backwards on every worker, both by index and then by pipeline.

    All workers follow one global sequence, so this cannot deadlock on any routes.

    Source:
        GPipe, which runs the backwards in the opposite sequence; the makespan is the same.
    """
    visits = _visits(placement, routes)
    return Orders(
        tuple(
            (worker, tuple(Op(kind, mb) for kind in (OpKind.F, OpKind.B) for mb in visits[worker])) for worker in visits
        )
    )


def one_f_one_b(
    placement: Placement,
    routes: Routes,
    costs: Costs | None = None,
    *,
    limit: Limit = Limit.CLASSIC,
    home: Routes | None = None,
) -> Orders:
    """Returns one-forward-one-backward orders for any routes.

    Where no worker is shared by different routes, as on a healthy grid, this is classic 1F1B. Otherwise it is a list
    schedule: a worker that is free starts a forward after a backward, and a backward after a forward, if one is ready
    and, for a forward, if what it then holds stays within the limit; else it starts the other. Among equals comes what
    was ready first, then the lower index, then the lower pipeline. It schedules twice, with and without forwards of
    micro-batches from other pipelines ahead of the worker's own, and keeps the shorter one.

    Where every worker comes at the same depth on all routes, it cannot deadlock: the last workers take any forward that
    arrives as soon as they have room, which their own backwards make, so they drain; hence so do those before them.
    Elsewhere two workers may come in either order, and each wait, full, for room on the other. Then micro-batches take
    turns: on every worker, room is kept for the first of those that it has yet to run, in one order for all workers. So
    the first that is not done can always go on. Where even that does not end, as micro-batches leave memory behind for
    good, one is run after another.

    Args:
        placement: who holds what.
        routes: where the micro-batches go, over workers of the placement.
        costs: costs per layer; default F = I = W = 1 without communication.
        limit: what limits the micro-batches that a worker holds.
        home: the routes of the whole grid, which tell where stages have lanes; None: no stage has several.

    Raises:
        InfeasiblePlan: a worker cannot hold even one micro-batch; the message says what it needs.

    Source:
        SlipStream, adaptive pipelining (coupled backward), solves for the best order; a list schedule takes
        milliseconds. On its running example it is as good: 36 slots with 1F1B's limits, 33 without.
    """
    costs = unit_costs(placement.num_layers) if costs is None else costs
    problem = routes_problem(placement, routes, costs, coupled=True)
    if _is_unshared(routes):
        return _classic(routes, problem, _limits(problem, limit, {}))
    limits = _limits(problem, limit, {} if home is None else _ahead(home))
    ended = [
        found
        for turns in (Alternation.READY, Alternation.GUESTS)
        if (found := _in_turns(problem, limits, turns)) is not None
    ]
    if not ended and (found := _in_turns(problem, limits, Alternation.IN_ORDER)) is not None:
        ended = [found]
    return min(ended, key=lambda found: found[0])[1] if ended else _one_by_one(placement, routes)


def _in_turns(problem: Problem, limits: Sequence[int], turns: Alternation) -> tuple[float, Orders] | None:
    """Returns the makespan and the orders; None if workers wait for one another's room for ever."""
    schedule = list_schedule(problem, range(problem.num_operations), limits=limits, turns=turns)
    if len(schedule.sequence) < problem.num_operations:
        return None
    return measure(problem, schedule, staggered=False).makespan, orders_of(problem, schedule.rows)


def _one_by_one(placement: Placement, routes: Routes) -> Orders:
    """Each micro-batch all the way and back before the next one begins: needs the least memory, and never deadlocks."""
    rows = _visits(placement, routes).items()
    both = (OpKind.F, OpKind.B)
    return Orders(tuple((worker, tuple(Op(kind, mb) for mb in visits for kind in both)) for worker, visits in rows))


def regular_plan(
    num_pipelines: int,
    stages: tuple[LayerRange, ...],
    microbatches: int,
    technique: str = "1f1b",
    costs: Costs | None = None,
) -> Plan:
    """Returns the plan of a healthy regular grid.

    Args:
        num_pipelines: at least 1.
        stages: the layers of stage 0, 1, ...
        microbatches: micro-batches per pipeline, at least 1.
        technique: ``1f1b`` or ``gpipe``.
        costs: costs per layer; their memory limit, if any, is respected by 1F1B.

    Raises:
        ConfigError: an impossible grid or an unknown technique.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    placement = regular_placement(num_pipelines, stages)
    return home_plan(placement, Batch((microbatches,) * num_pipelines), technique, costs)


def home_plan(placement: Placement, batch: Batch, technique: str = "1f1b", costs: Costs | None = None) -> Plan:
    """Returns the plan of a whole grid, whose pipelines may be unlike.

    Args:
        placement: who holds what; the workers of a pipeline, by their stages, hold all layers one after another.
        batch: the micro-batches of every pipeline.
        technique: ``1f1b`` or ``gpipe``.
        costs: costs per layer; their memory limit, if any, is respected by 1F1B.

    Raises:
        ConfigError: placement and batch are of different grids, or the technique is unknown.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    routes = home_routes(placement, batch)
    match technique:
        case "1f1b":
            orders = one_f_one_b(placement, routes, costs, home=routes)
        case "gpipe":
            orders = gpipe_orders(placement, routes)
        case _:
            raise ConfigError(f"technique {technique!r} is unknown: expected 1f1b or gpipe")
    return Plan(placement=placement, routes=routes, orders=orders)


def assigned_plan(
    pipelines: Sequence[Sequence[Visit]],
    microbatches: Sequence[MicroBatch],
    counts: Sequence[int],
    costs: Costs | None = None,
) -> Plan:
    """Returns the plan in which given workers are the stages of given pipelines, whatever their names; by 1F1B's rules.

    Args:
        pipelines: of each, its workers and their layers in order: all layers of the model, and each worker once.
        microbatches: of one step, sorted; the first ones go through the first pipeline.
        counts: how many go through each pipeline.
        costs: costs per layer, whose memory limit is respected; default F = I = W = 1 without one.

    Raises:
        ConfigError: the pipelines do not cover the same layers, or the counts do not add up to all micro-batches.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    if len(counts) != len(pipelines) or sum(counts) != len(microbatches):
        text = f"{len(microbatches)} micro-batches cannot go as {list(counts)} through {len(pipelines)} pipelines"
        raise ConfigError(text)
    held = tuple(sorted((visit.worker, visit.layers) for row in pipelines for visit in row))
    placement = Placement(num_layers=pipelines[0][-1].layers.stop, ranges=held)
    rows = (tuple(row) for row, count in zip(pipelines, counts, strict=True) for _ in range(count))
    routes = Routes(tuple(map(Route, microbatches, rows)))
    return Plan(placement=placement, routes=routes, orders=one_f_one_b(placement, routes, costs))


def adaptive_plan(healthy: Plan, failed: Iterable[WorkerId], costs: Costs | None = None) -> Plan:
    """Returns the plan for what is left of a healthy one: re-routed around the failed workers, and list-scheduled.

    Workers keep 1F1B's own limits of micro-batches.

    Args:
        healthy: the plan with every worker at its place, whose routes are home routes.
        failed: all workers that are gone.
        costs: costs per layer; default F = I = W = 1 without communication.

    Raises:
        StateUnavailable: a layer is left without an owner.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
        ConfigError: a failed worker is not in the plan.

    Cost: milliseconds for tens of workers, as it runs at the moment of failure; linear in operations up to a logarithm.

    Source:
        SlipStream, adaptive pipelining.
    """
    gone = frozenset(failed)
    routes = reroute(healthy.placement, healthy.routes, gone)
    placement = healthy.placement.without(gone)
    orders = one_f_one_b(placement, routes, costs, home=healthy.routes)
    return Plan(placement=placement, routes=routes, orders=orders)


def _ahead(home: Routes) -> dict[WorkerId, int]:
    """Returns how many micro-batches a worker holds beyond 1F1B's number, by worker, so that all lanes after it work.

    A worker's share of a later stage is d'/d lanes, where its own stage has d and that one d'. While a micro-batch is
    away, the lanes of its own share can each hold one; and as those of a wider stage take longer over each, they come
    back several at once: until then as many more can leave as the widest share has lanes beside one.
    """
    if _is_unshared(home):
        return {}
    through: Counter[WorkerId] = Counter()
    both: Counter[tuple[WorkerId, Visit]] = Counter()
    depth: defaultdict[WorkerId, int] = defaultdict(int)
    for visits, count in Counter(route.visits for route in home.routes).items():
        for place, visit in enumerate(visits):
            through[visit.worker] += count
            depth[visit.worker] = max(depth[visit.worker], len(visits) - place)
            for later in visits[place:]:
                both[visit.worker, later] += count
    shares: defaultdict[WorkerId, dict[LayerRange, Fraction]] = defaultdict(dict)
    for (worker, later), count in both.items():
        share = shares[worker]
        share[later.layers] = share.get(later.layers, Fraction()) + Fraction(count, through[later.worker])
    return {
        worker: max(0, math.ceil(sum(share.values())) + math.ceil(max(share.values())) - 1 - depth[worker])
        for worker, share in shares.items()
    }


def _limits(problem: Problem, limit: Limit, ahead: Mapping[WorkerId, int]) -> list[int]:
    """How many micro-batches each worker may hold, whatever its memory; in the order of the problem's workers."""
    if limit is Limit.MEMORY:
        visits = Counter(problem.worker_of)
        return [max(visits[number], 1) for number in range(problem.num_workers)]
    return [left + ahead.get(worker, 0) for left, worker in zip(problem.left, problem.workers, strict=True)]


def _visits(placement: Placement, routes: Routes) -> dict[WorkerId, list[MicroBatch]]:
    visits: dict[WorkerId, list[MicroBatch]] = {worker: [] for worker in placement.workers}
    for route in routes.by_index:
        for worker in route.workers:
            visits[worker].append(route.microbatch)
    return visits


def _is_unshared(routes: Routes) -> bool:
    """Whether every worker is visited by micro-batches of one route only, as on a healthy grid."""
    row_of: dict[WorkerId, tuple[Visit, ...]] = {}
    return all(
        row_of.setdefault(visit.worker, route.visits) == route.visits
        for route in routes.routes
        for visit in route.visits
    )


def _classic(routes: Routes, problem: Problem, limits: Sequence[int]) -> Orders:
    """Classic 1F1B: each stage fills up to its limit, then takes turns; no stage holds more than any before it."""
    queues: defaultdict[tuple[Visit, ...], list[MicroBatch]] = defaultdict(list)
    for route in routes.routes:
        queues[route.visits].append(route.microbatch)
    number = {worker: n for n, worker in enumerate(problem.workers)}
    rows: dict[WorkerId, tuple[Op, ...]] = dict.fromkeys(problem.workers, ())
    for row, queue in queues.items():
        most = len(queue)
        for visit in row:
            at = number[visit.worker]
            costs = problem.parts[problem.layers.index(visit.layers)]
            most = min(most, _most_held(limits[at], problem.room[at], costs, len(queue)))
            rows[visit.worker] = _take_turns(queue, most)
    return Orders(tuple(sorted(rows.items())))


def _most_held(limit: int, room: float, stage: StageCosts, visits: int) -> int:
    """The number of micro-batches that a worker may hold at once; what each leaves behind for good counts, too."""
    kept = stage.takes - stage.gives_input - stage.gives_weight
    given = stage.gives_input + stage.gives_weight
    free = room - kept * visits
    by_memory = limit if given <= 0 or math.isinf(free) else int(free // given)
    return max(1, min(limit, by_memory))


def _take_turns(queue: Sequence[MicroBatch], limit: int) -> tuple[Op, ...]:
    forwards = [Op(OpKind.F, microbatch) for microbatch in queue]
    backwards = [Op(OpKind.B, microbatch) for microbatch in queue]
    turns = [op for pair in zip(backwards, forwards[limit:], strict=False) for op in pair]
    return (*forwards[:limit], *turns, *backwards[len(queue) - limit :])
