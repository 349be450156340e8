"""Builds orders: GPipe, 1F1B, and a list schedule that works for any routes, hence after any survivable failure."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, Placement, regular_placement
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, StageCosts, unit_costs
from holdfast.core.routes import Routes, home_routes, reroute
from holdfast.core.schedule import Op, OpKind, Orders
from holdfast.errors import ConfigError

__all__ = ["Limit", "adaptive_plan", "gpipe_orders", "one_f_one_b", "regular_plan"]


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
    placement: Placement, routes: Routes, costs: Costs | None = None, *, limit: Limit = Limit.CLASSIC
) -> Orders:
    """Returns one-forward-one-backward orders for any routes.

    Where no worker is shared by different routes, as on a healthy grid, this is classic 1F1B. Otherwise it is a list
    schedule: a worker that is free starts a forward after a backward, and a backward after a forward, if one is ready
    and, for a forward, if what it then holds stays within the limit; else it starts the other. Among equals comes what
    was ready first, then the lower index, then the lower pipeline. It schedules twice, with and without forwards of
    micro-batches from other pipelines ahead of the worker's own, and keeps the shorter one.

    It cannot deadlock: the last workers of the routes take any forward that arrives as soon as they have room, which
    their own backwards make, so they drain; hence so do those before them.

    Args:
        placement: who holds what.
        routes: where the micro-batches go, over workers of the placement.
        costs: costs per layer; default F = I = W = 1 without communication.
        limit: what limits the micro-batches that a worker holds.

    Raises:
        InfeasiblePlan: a worker cannot hold even one micro-batch; the message says what it needs.

    Source:
        SlipStream, adaptive pipelining (coupled backward), solves for the best order; a list schedule takes
        milliseconds. On its running example it is as good: 36 slots with 1F1B's limits, 33 without.
    """
    costs = unit_costs(placement.num_layers) if costs is None else costs
    if _is_unshared(routes):
        return _classic(routes, _open_desks(placement, routes, costs, limit))
    runs = [_ListScheduler(placement, routes, costs, limit, guests_first=first).run() for first in (False, True)]
    return min(runs, key=lambda run: run[0])[1]


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
    routes = home_routes(num_pipelines, len(stages), microbatches)
    match technique:
        case "1f1b":
            orders = one_f_one_b(placement, routes, costs)
        case "gpipe":
            orders = gpipe_orders(placement, routes)
        case _:
            raise ConfigError(f"technique {technique!r} is unknown: expected 1f1b or gpipe")
    return Plan(placement=placement, routes=routes, orders=orders)


def adaptive_plan(healthy: Plan, failed: Iterable[WorkerId], costs: Costs | None = None) -> Plan:
    """Returns the plan for what is left of a healthy one: re-routed around the failed workers, and list-scheduled.

    Workers keep 1F1B's own limits of micro-batches.

    Args:
        healthy: the plan with every worker at its place, whose routes are home routes.
        failed: all workers that are gone.
        costs: costs per layer; default F = I = W = 1 without communication.

    Raises:
        StateUnavailable: a layer is left without an owner.
        InfeasiblePlan: re-routing or memory does not allow a plan.
        ConfigError: a failed worker is not in the plan.

    Cost: milliseconds for tens of workers, as it runs at the moment of failure; linear in operations up to a logarithm.

    Source:
        SlipStream, adaptive pipelining.
    """
    gone = frozenset(failed)
    routes = reroute(healthy.placement, healthy.routes, gone)
    placement = healthy.placement.without(gone)
    return Plan(placement=placement, routes=routes, orders=one_f_one_b(placement, routes, costs))


@dataclass(slots=True, eq=False)
class _Desk:
    """One worker at work: what is ready, what it holds, and what it did so far."""

    worker: WorkerId
    stage: StageCosts
    limit: int
    room: float
    forwards: list[tuple[bool, float, int, int]] = field(default_factory=list)
    backwards: list[tuple[bool, float, int, int]] = field(default_factory=list)
    row: list[Op] = field(default_factory=list)
    held: int = 0
    busy: bool = False
    forward_next: bool = True

    def can_forward(self) -> bool:
        return bool(self.forwards) and self.held < self.limit and self.stage.takes <= self.room


def _open_desks(placement: Placement, routes: Routes, costs: Costs, limit: Limit) -> dict[WorkerId, _Desk]:
    depth: defaultdict[WorkerId, int] = defaultdict(int)
    visits: defaultdict[WorkerId, int] = defaultdict(int)
    for route in routes.routes:
        for left, worker in enumerate(reversed(route.workers), start=1):
            depth[worker] = max(depth[worker], left)
            visits[worker] += 1
    return {
        worker: _open_desk(worker, costs.of(layers), visits[worker], depth[worker] if limit is Limit.CLASSIC else 0)
        for worker, layers in placement.ranges
    }


def _open_desk(worker: WorkerId, stage: StageCosts, visits: int, limit: int) -> _Desk:
    """Opens the desk of a worker; a limit of 0 means as many as visit it."""
    room = math.inf if stage.room is None else stage.room * (1 + 1e-12)
    stage.check_memory(f"stage {worker.stage} (worker {worker})", visits)
    return _Desk(worker, stage, limit or max(visits, 1), room)


def _visits(placement: Placement, routes: Routes) -> dict[WorkerId, list[MicroBatch]]:
    visits: dict[WorkerId, list[MicroBatch]] = {worker: [] for worker in placement.workers}
    for route in sorted(routes.routes, key=lambda route: (route.microbatch.index, route.microbatch.pipeline)):
        for worker in route.workers:
            visits[worker].append(route.microbatch)
    return visits


def _is_unshared(routes: Routes) -> bool:
    """Whether every worker is visited by micro-batches of one route only, as on a healthy grid."""
    row_of: dict[WorkerId, tuple[WorkerId, ...]] = {}
    return all(
        row_of.setdefault(worker, route.workers) == route.workers for route in routes.routes for worker in route.workers
    )


def _classic(routes: Routes, desks: dict[WorkerId, _Desk]) -> Orders:
    """Classic 1F1B: each stage fills up to its limit, then takes turns; no stage holds more than any before it."""
    queues: defaultdict[tuple[WorkerId, ...], list[MicroBatch]] = defaultdict(list)
    for route in routes.routes:
        queues[route.workers].append(route.microbatch)
    rows: dict[WorkerId, tuple[Op, ...]] = dict.fromkeys(desks, ())
    for row, queue in queues.items():
        limit = len(queue)
        for worker in row:
            limit = min(limit, _most_held(desks[worker], len(queue)))
            rows[worker] = _take_turns(queue, limit)
    return Orders(tuple(sorted(rows.items())))


def _most_held(desk: _Desk, visits: int) -> int:
    """The number of micro-batches that a worker may hold at once; what each leaves behind for good counts, too."""
    stage = desk.stage
    kept = stage.takes - stage.gives_input - stage.gives_weight
    given = stage.gives_input + stage.gives_weight
    free = desk.room - kept * visits
    by_memory = desk.limit if given <= 0 or math.isinf(free) else int(free // given)
    return max(1, min(desk.limit, by_memory))


def _take_turns(queue: Sequence[MicroBatch], limit: int) -> tuple[Op, ...]:
    forwards = [Op(OpKind.F, microbatch) for microbatch in queue]
    backwards = [Op(OpKind.B, microbatch) for microbatch in queue]
    turns = [op for pair in zip(backwards, forwards[limit:], strict=False) for op in pair]
    return (*forwards[:limit], *turns, *backwards[len(queue) - limit :])


class _ListScheduler:
    """Runs the step in simulated time; whenever a worker is free it starts the best operation that is ready.

    Micro-batches are numbers by index and then by pipeline, so that ties are broken by comparing numbers. An event is
    (time, micro-batch, place on its route, what): what is 0 or 1 when an input for F or B arrives, 2 or 3 when F or B
    ends.
    """

    def __init__(self, placement: Placement, routes: Routes, costs: Costs, limit: Limit, *, guests_first: bool) -> None:
        ordered = sorted(routes.routes, key=lambda route: (route.microbatch.index, route.microbatch.pipeline))
        stops = {worker: layers.stop for worker, layers in placement.ranges}
        self._desks = desks = _open_desks(placement, routes, costs, limit)
        self._guests_first = guests_first
        self._microbatches = [route.microbatch for route in ordered]
        self._routes = [[desks[worker] for worker in route.workers] for route in ordered]
        self._comm = [[costs.comm[stops[worker] - 1] for worker in route.workers[:-1]] for route in ordered]
        self._events: list[tuple[float, int, int, int]] = [(0, number, 0, 0) for number in range(len(ordered))]

    def run(self) -> tuple[float, Orders]:
        """Returns the makespan and the orders."""
        events, now = self._events, 0.0
        while events:
            now = events[0][0]
            touched: dict[WorkerId, _Desk] = {}
            while events and events[0][0] == now:
                desk = self._receive(*heapq.heappop(events))
                touched[desk.worker] = desk
            for desk in touched.values():
                self._start(desk, now)
        return now, Orders(tuple((worker, tuple(desk.row)) for worker, desk in sorted(self._desks.items())))

    def _receive(self, now: float, number: int, place: int, what: int) -> _Desk:
        desk = self._routes[number][place]
        if what == 0:
            at_home = self._guests_first and self._microbatches[number].pipeline == desk.worker.pipeline
            heapq.heappush(desk.forwards, (at_home, now, number, place))
        elif what == 1:
            heapq.heappush(desk.backwards, (False, now, number, place))
        else:
            desk.busy = False
            self._pass_on(desk, now, number, place, what)
        return desk

    def _pass_on(self, desk: _Desk, now: float, number: int, place: int, what: int) -> None:
        """Hands the result of an operation that has ended to where it is needed."""
        if what == 3:
            desk.held -= 1
            desk.room += desk.stage.gives_input + desk.stage.gives_weight
            if place:
                heapq.heappush(self._events, (now + self._comm[number][place - 1], number, place - 1, 1))
        elif place + 1 < len(self._routes[number]):
            heapq.heappush(self._events, (now + self._comm[number][place], number, place + 1, 0))
        else:
            heapq.heappush(desk.backwards, (False, now, number, place))

    def _start(self, desk: _Desk, now: float) -> None:
        if desk.busy:
            return
        forward = desk.can_forward()
        if forward and (desk.forward_next or not desk.backwards):
            _, _, number, place = heapq.heappop(desk.forwards)
            desk.held += 1
            desk.room -= desk.stage.takes
            self._occupy(desk, OpKind.F, now + desk.stage.forward, number, place)
        elif desk.backwards:
            _, _, number, place = heapq.heappop(desk.backwards)
            self._occupy(desk, OpKind.B, now + desk.stage.backward, number, place)

    def _occupy(self, desk: _Desk, kind: OpKind, end: float, number: int, place: int) -> None:
        desk.busy = True
        desk.forward_next = kind is OpKind.B
        desk.row.append(Op(kind, self._microbatches[number]))
        heapq.heappush(self._events, (end, number, place, 2 if kind is OpKind.F else 3))
