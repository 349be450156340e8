"""Builds orders: GPipe, 1F1B, and a list schedule that works for any routes, hence after any survivable failure."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from fractions import Fraction

from holdfast.core.ids import Batch, MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, Placement, regular_placement
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, StageCosts, unit_costs
from holdfast.core.routes import Route, Routes, Visit, home_routes, reroute
from holdfast.core.schedule import Op, OpKind, Orders
from holdfast.core.work_costs import WorkCosts
from holdfast.errors import ConfigError

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
    work = WorkCosts(placement, routes, costs)
    if _is_unshared(routes):
        return _classic(routes, _open_desks(placement, routes, work, limit, {}), work)
    ahead = {} if home is None else _ahead(home)

    def run(rule: _Rule) -> tuple[float, Orders] | None:
        return _ListScheduler(routes, costs, work, _open_desks(placement, routes, work, limit, ahead), rule).run()

    ended = [found for rule in (_Rule.READY, _Rule.GUESTS) if (found := run(rule)) is not None]
    if not ended and (found := run(_Rule.IN_TURN)) is not None:
        ended = [found]
    return min(ended, key=lambda found: found[0])[1] if ended else _one_by_one(placement, routes)


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


class _Rule(Enum):
    """Which of the forwards that are ready comes first."""

    READY = auto()
    """What was ready first."""
    GUESTS = auto()
    """Those of other pipelines' micro-batches."""
    IN_TURN = auto()
    """Micro-batches in one order for all workers, with room kept for the next of that order."""


@dataclass(slots=True, eq=False)
class _Desk:
    """One worker at work: what is ready, what it holds, and what it did so far."""

    worker: WorkerId
    limit: int
    room: float
    forwards: list[tuple[bool, float, int, int]] = field(default_factory=list)
    backwards: list[tuple[bool, float, int, int]] = field(default_factory=list)
    row: list[Op] = field(default_factory=list)
    held: int = 0
    busy: bool = False
    forward_next: bool = True
    due: list[int] = field(default_factory=list)
    most: float = 0.0


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


def _open_desks(
    placement: Placement, routes: Routes, work: WorkCosts, limit: Limit, ahead: Mapping[WorkerId, int]
) -> dict[WorkerId, _Desk]:
    depth: defaultdict[WorkerId, int] = defaultdict(int)
    visits: defaultdict[WorkerId, int] = defaultdict(int)
    for route in routes.routes:
        for left, visit in enumerate(reversed(route.visits), start=1):
            depth[visit.worker] = max(depth[visit.worker], left + ahead.get(visit.worker, 0))
            visits[visit.worker] += 1
    return {
        worker: _open_desk(worker, work.whole[worker], visits[worker], depth[worker] if limit is Limit.CLASSIC else 0)
        for worker in placement.workers
    }


def _open_desk(worker: WorkerId, stage: StageCosts, visits: int, limit: int) -> _Desk:
    """Opens the desk of a worker; a limit of 0 means as many as visit it."""
    room = math.inf if stage.room is None else stage.room * (1 + 1e-12)
    stage.check_memory(f"stage {worker.stage} (worker {worker})", visits)
    return _Desk(worker, limit or max(visits, 1), room)


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


def _classic(routes: Routes, desks: dict[WorkerId, _Desk], work: WorkCosts) -> Orders:
    """Classic 1F1B: each stage fills up to its limit, then takes turns; no stage holds more than any before it."""
    queues: defaultdict[tuple[Visit, ...], list[MicroBatch]] = defaultdict(list)
    for route in routes.routes:
        queues[route.visits].append(route.microbatch)
    rows: dict[WorkerId, tuple[Op, ...]] = dict.fromkeys(desks, ())
    for row, queue in queues.items():
        limit = len(queue)
        for visit in row:
            costs = work.of(visit.worker, queue[0])
            limit = min(limit, _most_held(desks[visit.worker], costs, len(queue)))
            rows[visit.worker] = _take_turns(queue, limit)
    return Orders(tuple(sorted(rows.items())))


def _most_held(desk: _Desk, stage: StageCosts, visits: int) -> int:
    """The number of micro-batches that a worker may hold at once; what each leaves behind for good counts, too."""
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
    ends. In turn, a desk knows which micro-batches it has yet to run (``due``) and the most that one of them takes.
    """

    def __init__(
        self, routes: Routes, costs: Costs, work: WorkCosts, desks: dict[WorkerId, _Desk], rule: _Rule
    ) -> None:
        ordered = routes.by_index
        self._desks = desks
        self._rule = rule
        self._microbatches = [route.microbatch for route in ordered]
        self._routes = [[desks[visit.worker] for visit in route.visits] for route in ordered]
        self._work = [[work.of(visit.worker, route.microbatch) for visit in route.visits] for route in ordered]
        self._comm = [[costs.comm[visit.layers.stop - 1] for visit in route.visits[:-1]] for route in ordered]
        self._events: list[tuple[float, int, int, int]] = [(0, number, 0, 0) for number in range(len(ordered))]
        for number, visited in enumerate(self._routes if rule is _Rule.IN_TURN else ()):
            for desk, visit in zip(visited, self._work[number], strict=True):
                desk.due.append(number)
                desk.most = max(desk.most, visit.takes)

    def run(self) -> tuple[float, Orders] | None:
        """Returns the makespan and the orders; None if workers wait for one another's room for ever."""
        events, now = self._events, 0.0
        while events:
            now = events[0][0]
            touched: dict[WorkerId, _Desk] = {}
            while events and events[0][0] == now:
                desk = self._receive(*heapq.heappop(events))
                touched[desk.worker] = desk
            for desk in touched.values():
                self._start(desk, now)
        if any(desk.held or desk.forwards for desk in self._desks.values()):
            return None
        return now, Orders(tuple((worker, tuple(desk.row)) for worker, desk in sorted(self._desks.items())))

    def _receive(self, now: float, number: int, place: int, what: int) -> _Desk:
        desk = self._routes[number][place]
        if what == 0:
            at_home = self._rule is _Rule.GUESTS and self._microbatches[number].pipeline == desk.worker.pipeline
            heapq.heappush(desk.forwards, (at_home, 0.0 if self._rule is _Rule.IN_TURN else now, number, place))
        elif what == 1:
            heapq.heappush(desk.backwards, (False, now, number, place))
        else:
            desk.busy = False
            self._pass_on(desk, now, number, place, what)
        return desk

    def _pass_on(self, desk: _Desk, now: float, number: int, place: int, what: int) -> None:
        """Hands the result of an operation that has ended to where it is needed."""
        if what == 3:
            visit = self._work[number][place]
            desk.held -= 1
            desk.room += visit.gives_input + visit.gives_weight
            if place:
                heapq.heappush(self._events, (now + self._comm[number][place - 1], number, place - 1, 1))
        elif place + 1 < len(self._routes[number]):
            heapq.heappush(self._events, (now + self._comm[number][place], number, place + 1, 0))
        else:
            heapq.heappush(desk.backwards, (False, now, number, place))

    def _start(self, desk: _Desk, now: float) -> None:
        if desk.busy:
            return
        if desk.forwards and (desk.forward_next or not desk.backwards) and self._can_forward(desk):
            _, _, number, place = heapq.heappop(desk.forwards)
            visit = self._work[number][place]
            desk.held += 1
            desk.room -= visit.takes
            if self._rule is _Rule.IN_TURN:
                desk.due.remove(number)
            self._occupy(desk, OpKind.F, now + visit.forward, number, place)
        elif desk.backwards:
            _, _, number, place = heapq.heappop(desk.backwards)
            self._occupy(desk, OpKind.B, now + self._work[number][place].backward, number, place)

    def _can_forward(self, desk: _Desk) -> bool:
        _, _, number, place = desk.forwards[0]
        spare = self._rule is _Rule.IN_TURN and desk.due[0] != number
        room = desk.room - desk.most if spare else desk.room
        return desk.held + spare < desk.limit and self._work[number][place].takes <= room

    def _occupy(self, desk: _Desk, kind: OpKind, end: float, number: int, place: int) -> None:
        desk.busy = True
        desk.forward_next = kind is OpKind.B
        desk.row.append(Op(kind, self._microbatches[number]))
        heapq.heappush(self._events, (end, number, place, 2 if kind is OpKind.F else 3))
