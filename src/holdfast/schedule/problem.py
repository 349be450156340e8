"""A scheduling problem in flat lists: workers, visits and operations are whole numbers, so that millions are cheap.

Micro-batches are numbered by index and then by pipeline; the visits of one follow one another, and then come those of
the next. Operation ``kind * visits + v`` is F (kind 0), I (kind 1; B where the backward is coupled) or W (kind 2) of
visit ``v``. What visits cost is kept once for each *part*, the layers that they run. What workers have in common is
kept once for each *group*. On a regular grid parts and groups are its stages, and worker ``stage * pipelines +
pipeline`` is the one of that place; elsewhere every worker is a group of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, StageCosts
from holdfast.core.routes import Route, Routes, Visit
from holdfast.core.schedule import Op, OpKind, Orders
from holdfast.core.work_costs import WorkCosts
from holdfast.schedule.operations import INPUT, Operations

__all__ = [
    "Problem",
    "Window",
    "orders_of",
    "room_of",
    "routes_problem",
    "rows_of",
    "slowed_down",
    "to_plan",
    "to_routes",
]

_Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """From the first start of a group to the end of its optimizer step.

    Attributes:
        group: the group.
        waits_for: the groups whose last end the optimizer step waits for: those with some layer of its own, or one that
            is tied to such a layer.
        optimizer: how long the step takes.
    """

    group: int
    waits_for: tuple[int, ...]
    optimizer: float


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem: who runs what, how long it takes and what memory it needs.

    Attributes:
        placement: who holds what, of all workers, the failed ones too.
        failed: the workers that are gone.
        costs: costs per layer.
        ties: tuples of layers that share weights, and are updated together.
        workers: the worker of every number.
        microbatches: the micro-batch of every number.
        worker_of: the worker of every visit.
        part_of: the part of every visit.
        layers: the layers of every part.
        parts: the costs of every part; its state, capacity and optimizer are of no meaning.
        comm: the time of the message after every part; 0 after the model's last layer.
        coupled: whether the backward is one operation, B.
        group_of: the group of every worker.
        room: memory of a worker of every group (infinite without a limit), with a little tolerance.
        optimizer: the time of its optimizer step.
        windows: what an optimizer step that is staggered waits for.
        regular: whether parts and groups are the stages of a regular grid.
    """

    placement: Placement
    failed: frozenset[WorkerId]
    costs: Costs
    ties: tuple[tuple[int, ...], ...]
    workers: tuple[WorkerId, ...]
    microbatches: tuple[MicroBatch, ...]
    worker_of: tuple[int, ...]
    part_of: tuple[int, ...]
    layers: tuple[LayerRange, ...]
    parts: tuple[StageCosts, ...]
    comm: tuple[float, ...]
    coupled: bool
    group_of: tuple[int, ...]
    room: tuple[float, ...]
    optimizer: tuple[float, ...]
    windows: tuple[Window, ...]
    regular: bool

    @property
    def num_workers(self) -> int:
        """Workers, failed ones included."""
        return len(self.workers)

    @property
    def num_groups(self) -> int:
        """Groups of workers."""
        return len(self.room)

    @property
    def num_visits(self) -> int:
        """Visits of all micro-batches."""
        return len(self.worker_of)

    @property
    def num_operations(self) -> int:
        """Operations of one step."""
        return self.num_visits * (2 if self.coupled else 3)

    @cached_property
    def durations(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """The time of F, I (or B) and W of every part."""
        return (
            tuple(part.forward for part in self.parts),
            tuple(part.backward if self.coupled else part.input_apart for part in self.parts),
            tuple(part.weight for part in self.parts),
        )

    @cached_property
    def begins(self) -> tuple[bool, ...]:
        """Whether a visit is its micro-batch's first."""
        first = [layers.start == 0 for layers in self.layers]
        return tuple([first[part] for part in self.part_of])

    @cached_property
    def ends(self) -> tuple[bool, ...]:
        """Whether a visit is its micro-batch's last."""
        last = [layers.stop == self.placement.num_layers for layers in self.layers]
        return tuple([last[part] for part in self.part_of])

    @cached_property
    def operations(self) -> Operations:
        """All of them in columns; where the backward is coupled nothing ever makes a W ready."""
        visits, coupled, part_of, costs = self.num_visits, self.coupled, self.part_of, self.parts
        forward, back, weight = ([lengths[part] for part in part_of] for lengths in self.durations)
        gives = [part.gives_input + (part.gives_weight if coupled else 0) for part in costs]
        nobody, nothing, comm = [-1] * visits, [0.0] * visits, [self.comm[part] for part in part_of]
        after = [visit + (visits if ends else 1) for visit, ends in enumerate(self.ends)]
        return Operations(
            worker=self.worker_of * 3,
            kind=[0] * visits + [INPUT] * visits + [2] * visits,
            length=forward + back + weight,
            opens=[True] * visits + [False] * (2 * visits),
            closes=[False] * visits + [True] * visits + [False] * visits,
            takes=[costs[part].takes for part in part_of] + nothing * 2,
            gives=nothing + [gives[part] for part in part_of] + [costs[part].gives_weight for part in part_of],
            own=[to if to >= visits else -1 for to in after]
            + (nobody if coupled else list(range(2 * visits, 3 * visits)))
            + nobody,
            sends=[to if to < visits else -1 for to in after]
            + [-1 if begins else visits + visit - 1 for visit, begins in enumerate(self.begins)]
            + nobody,
            lag=[*comm, 0.0, *comm[:-1], *nothing],
            roots=[visit for visit, begins in enumerate(self.begins) if begins],
            room=[self.room[group] for group in self.group_of],
        )

    @cached_property
    def part_array(self) -> _Whole:
        """The part of every visit, as an array."""
        return np.asarray(self.part_of, dtype=np.int64)

    @cached_property
    def journeys(self) -> tuple[range, ...]:
        """The visits of every micro-batch."""
        first = [visit for visit, begins in enumerate(self.begins) if begins]
        return tuple(range(*each) for each in zip(first, [*first[1:], self.num_visits], strict=True))

    @cached_property
    def left(self) -> tuple[int, ...]:
        """For a worker of every group, how many visits its micro-batches have left at most, its own included."""
        found = [1] * self.num_groups
        for journey in self.journeys if not self.regular else self.journeys[:1]:
            for left, visit in enumerate(reversed(journey), start=1):
                group = self.group_of[self.worker_of[visit]]
                found[group] = max(found[group], left)
        return tuple(found)


def routes_problem(
    placement: Placement,
    routes: Routes,
    costs: Costs,
    *,
    coupled: bool = False,
    ties: tuple[tuple[int, ...], ...] = (),
    fits: bool = True,
) -> Problem:
    """Returns the problem of any routes.

    Args:
        placement: who holds what.
        routes: where the micro-batches go, over workers of the placement.
        costs: costs per layer.
        coupled: whether the backward is one operation.
        ties: tuples of layers that share weights.
        fits: whether memory must hold one micro-batch.

    Raises:
        InfeasiblePlan: it does not.
    """
    workers, ordered = placement.workers, routes.by_index
    number = {worker: n for n, worker in enumerate(workers)}
    visits = [visit for route in ordered for visit in route.visits]
    layers = tuple(sorted({visit.layers for visit in visits}))
    part = {each: n for n, each in enumerate(layers)}
    whole = WorkCosts(placement, routes, costs).whole
    visited = Counter(visit.worker for visit in visits)
    for worker in workers if fits else ():
        whole[worker].check_memory(f"stage {worker.stage} (worker {worker})", visited[worker])
    steps = tuple(whole[worker].optimizer for worker in workers)
    members = [tuple(number[w] for w in each if w in visited) for each in placement.members_by_layer]
    return Problem(
        placement=placement,
        failed=frozenset(),
        costs=costs,
        ties=ties,
        workers=workers,
        microbatches=tuple(route.microbatch for route in ordered),
        worker_of=tuple(number[visit.worker] for visit in visits),
        part_of=tuple(part[visit.layers] for visit in visits),
        layers=layers,
        parts=tuple(map(costs.of, layers)),
        comm=tuple(costs.comm[each.stop - 1] if each.stop < placement.num_layers else 0 for each in layers),
        coupled=coupled,
        group_of=tuple(range(len(workers))),
        room=tuple(room_of(whole[worker]) for worker in workers),
        optimizer=steps,
        windows=tuple(dict.fromkeys(_windows(members, ties, steps))),
        regular=False,
    )


def _windows(
    members: Sequence[tuple[int, ...]], ties: Iterable[tuple[int, ...]], steps: Sequence[float]
) -> Iterator[Window]:
    """One for every group and each of the layers that it has, and each of the ties.

    Args:
        members: the groups that have layer 0, 1, ... and are visited.
        ties: tuples of layers that share weights.
        steps: the optimizer step of every group.
    """
    for unit in (*((layer,) for layer in range(len(members))), *ties):
        together = tuple(sorted({group for layer in unit for group in members[layer]}))
        yield from (Window(group, together, steps[group]) for group in together)


def slowed_down(problem: Problem, factors: Mapping[WorkerId, float]) -> Problem:
    """Returns the problem with workers whose operations and updates take so many times as long.

    Args:
        problem: in which each worker is a group of its own.
        factors: of these workers; all others are as fast as before.
    """
    of = [factors.get(worker, 1.0) for worker in problem.workers]
    kinds = tuple(dict.fromkeys(zip(problem.part_of, (of[worker] for worker in problem.worker_of), strict=True)))
    number = {kind: n for n, kind in enumerate(kinds)}
    optimizer = tuple(factor * each for factor, each in zip(of, problem.optimizer, strict=True))
    return replace(
        problem,
        part_of=tuple(
            number[part, of[worker]] for part, worker in zip(problem.part_of, problem.worker_of, strict=True)
        ),
        layers=tuple(problem.layers[part] for part, _ in kinds),
        parts=tuple(problem.parts[part].times(factor) for part, factor in kinds),
        comm=tuple(problem.comm[part] for part, _ in kinds),
        optimizer=optimizer,
        windows=tuple(replace(each, optimizer=optimizer[each.group]) for each in problem.windows),
    )


def room_of(costs: StageCosts) -> float:
    """Returns the memory of a worker for micro-batches, with a little tolerance; infinite without a limit."""
    return inf if costs.room is None else costs.room * (1 + 1e-12)


def to_plan(problem: Problem, rows: list[list[int]]) -> Plan:
    """Returns the plan whose workers run these operations in this order.

    Args:
        problem: the problem.
        rows: the operations of every worker, where that after the last W is a B; those of failed workers are empty.
    """
    orders = orders_of(problem, rows)
    return Plan(placement=problem.placement.without(problem.failed), routes=to_routes(problem), orders=orders)


def orders_of(problem: Problem, rows: list[list[int]]) -> Orders:
    """Returns the orders in which workers run these operations; see :func:`to_plan`."""
    visits, kinds = problem.num_visits, (OpKind.F, OpKind.B if problem.coupled else OpKind.I, OpKind.W, OpKind.B)
    microbatch_of = [
        microbatch for microbatch, each in zip(problem.microbatches, problem.journeys, strict=True) for _ in each
    ]

    def op(number: int) -> Op:
        kind, visit = divmod(number, visits)
        return Op(kinds[kind], microbatch_of[visit])

    named = zip(problem.workers, rows, strict=True)
    return Orders(tuple(sorted((name, tuple(map(op, row))) for name, row in named if name not in problem.failed)))


def to_routes(problem: Problem) -> Routes:
    """Returns the visits of every micro-batch."""
    known: dict[tuple[int, int], Visit] = {}

    def visit(worker: int, part: int) -> Visit:
        if (worker, part) not in known:
            known[worker, part] = Visit(problem.workers[worker], problem.layers[part])
        return known[worker, part]

    journeys = zip(problem.microbatches, problem.journeys, strict=True)
    routes = (
        Route(microbatch, tuple(visit(problem.worker_of[each], problem.part_of[each]) for each in journey))
        for microbatch, journey in journeys
    )
    return Routes(tuple(sorted(routes, key=lambda route: route.microbatch)))


def rows_of(problem: Problem, orders: Orders) -> tuple[list[list[int]], frozenset[int]]:
    """Returns the operations of every worker as numbers: the inverse of :func:`to_plan`, for orders of this problem.

    And the visits whose backward is a B where it need not be one: that is an I and the W behind it.
    """
    visits, number = problem.num_visits, {worker: n for n, worker in enumerate(problem.workers)}
    offsets = {OpKind.F: (0,), OpKind.I: (visits,), OpKind.B: (visits, 2 * visits), OpKind.W: (2 * visits,)}
    if problem.coupled:
        offsets[OpKind.B] = (visits,)
    visit_of = {
        (problem.worker_of[visit], microbatch): visit
        for microbatch, journey in zip(problem.microbatches, problem.journeys, strict=True)
        for visit in journey
    }
    rows: list[list[int]] = [[] for _ in problem.workers]
    fused: set[int] = set()
    for worker, ops in orders.rows:
        at = number[worker]
        rows[at] = [offset + visit_of[at, op.microbatch] for op in ops for offset in offsets[op.kind]]
        if not problem.coupled:
            fused.update(visit_of[at, op.microbatch] for op in ops if op.kind is OpKind.B)
    return rows, frozenset(fused)
