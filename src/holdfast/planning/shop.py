"""A scheduling problem in flat lists: workers, visits and operations are whole numbers, so that millions are cheap.

Micro-batches are numbered by index and then by pipeline. Visit ``v = microbatch * stages + stage`` is one micro-batch
on one stage. Operation ``kind * visits + v`` is F (kind 0), I (kind 1; B where the backward is coupled) or W (kind 2)
of a visit. Worker ``stage * pipelines + pipeline``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import LayerRange, regular_placement
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, StageCosts
from holdfast.core.routes import Route, Routes, Visit
from holdfast.core.schedule import Op, OpKind, Orders
from holdfast.errors import ConfigError, StateUnavailable

__all__ = ["CostedGrid", "Shop", "open_shop", "rows_of", "to_plan", "to_routes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedGrid:
    """A regular grid and what it costs.

    Attributes:
        pipelines: data-parallel copies, at least 1.
        stages: the layers of stage 0, 1, ...
        microbatches: micro-batches per pipeline, at least 1.
        costs: costs per layer.
        ties: tuples of layers that share weights, and are updated together.
    """

    pipelines: int
    stages: tuple[LayerRange, ...]
    microbatches: int
    costs: Costs
    ties: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ConfigError(f"grid.microbatches = {self.microbatches} is impossible: expected at least 1")
        if self.pipelines < 1 or not self.stages:
            raise ConfigError(f"a grid of {self.pipelines}x{len(self.stages)} is impossible: expected at least 1x1")
        if self.stages[-1].stop != self.costs.num_layers:
            raise ConfigError(
                f"the costs are for {self.costs.num_layers} layers, but the stages hold {self.stages[-1].stop}: "
                "is it the profile of another model?"
            )
        if any(not 0 <= layer < self.costs.num_layers for tie in self.ties for layer in tie):
            raise ConfigError(f"ties {self.ties} are impossible: expected layers 0 to {self.costs.num_layers - 1}")

    @property
    def batch(self) -> Batch:
        """The micro-batches of a step."""
        return Batch((self.microbatches,) * self.pipelines)

    @property
    def waits_for(self) -> tuple[tuple[int, ...], ...]:
        """For stage 0, 1, ... the stages whose gradients its optimizer step needs: itself and those tied to it."""
        found = [{stage} for stage in range(len(self.stages))]
        for tie in self.ties:
            tied = {s for s, layers in enumerate(self.stages) if any(layer in layers for layer in tie)}
            for stage in tied:
                found[stage] |= tied
        return tuple(tuple(sorted(each)) for each in found)

    @property
    def each(self) -> tuple[StageCosts, ...]:
        """The costs of stage 0, 1, ..."""
        return tuple(self.costs.of(layers) for layers in self.stages)

    @property
    def comm(self) -> tuple[float, ...]:
        """The time of a message after stage 0, 1, ...: one number fewer than stages."""
        return tuple(self.costs.comm[layers.stop - 1] for layers in self.stages[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """One problem: who runs what, how long it takes and what memory it needs.

    Attributes:
        grid: the grid without failures.
        failed: the workers that are gone.
        worker_of: the worker of every visit.
        coupled: whether the backward is one operation, B.
        durations: the time of F, I (or B) and W on stage 0, 1, ...
        room: memory of a worker on stage 0, 1, ... (infinite without a limit), with a little tolerance.
    """

    grid: CostedGrid
    failed: frozenset[WorkerId]
    worker_of: tuple[int, ...]
    coupled: bool
    durations: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    room: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline."""
        return len(self.grid.stages)

    @property
    def num_workers(self) -> int:
        """Workers of the grid, failed ones included."""
        return self.grid.pipelines * self.num_stages

    @property
    def num_visits(self) -> int:
        """Micro-batches of all pipelines times stages."""
        return len(self.worker_of)

    @property
    def num_operations(self) -> int:
        """Operations of one step."""
        return self.num_visits * (2 if self.coupled else 3)


def open_shop(
    grid: CostedGrid, failed: Iterable[WorkerId], *, coupled: bool = False, worker_of: tuple[int, ...] | None = None
) -> Shop:
    """Returns the problem of a grid without the failed workers; their micro-batches go to peers.

    Args:
        grid: the grid.
        failed: the workers that are gone.
        coupled: whether the backward is one operation.
        worker_of: the worker of every visit; default: as few micro-batches as possible change their pipeline.

    Raises:
        StateUnavailable: a stage has no living worker.
        InfeasiblePlan: memory does not hold one micro-batch.
        ConfigError: a failed worker is not in the grid.
    """
    gone = frozenset(failed)
    _check_failed(grid, gone)
    worker_of = worker_of or _visits(grid, gone)
    each = grid.each
    _check_memory(grid, worker_of)
    return Shop(
        grid=grid,
        failed=gone,
        worker_of=worker_of,
        coupled=coupled,
        durations=(
            tuple(stage.forward for stage in each),
            tuple(stage.backward if coupled else stage.input_apart for stage in each),
            tuple(stage.weight for stage in each),
        ),
        room=tuple(float("inf") if (room := stage.room) is None else room * (1 + 1e-12) for stage in each),
    )


def to_plan(shop: Shop, rows: list[list[int]]) -> Plan:
    """Returns the plan whose workers run these operations in this order.

    Args:
        shop: the problem.
        rows: the operations of every worker; those of failed workers are empty.
    """
    pipelines, num_stages, visits = shop.grid.pipelines, shop.num_stages, shop.num_visits
    kinds = (OpKind.F, OpKind.B if shop.coupled else OpKind.I, OpKind.W, OpKind.B)
    microbatches = sorted(shop.grid.batch.microbatches, key=lambda each: (each.index, each.pipeline))

    def op(number: int) -> Op:
        kind, visit = divmod(number, visits)
        return Op(kinds[kind], microbatches[visit // num_stages])

    names = _names(shop)
    orders = Orders(
        tuple(
            sorted(
                (name, tuple(map(op, row))) for name, row in zip(names, rows, strict=True) if name not in shop.failed
            )
        )
    )
    placement = regular_placement(pipelines, shop.grid.stages).without(shop.failed)
    return Plan(placement=placement, routes=to_routes(shop), orders=orders)


def _visits(grid: CostedGrid, gone: frozenset[WorkerId]) -> tuple[int, ...]:
    """Returns the worker of every visit.

    As with :func:`holdfast.core.routes.reroute`, living workers keep their own micro-batches and no peer gets more than
    the others by more than one. But a micro-batch stays in the pipeline that it was in on the stage before wherever it
    can: pipelines that share no micro-batch do not wait for one another. It cannot where its worker would get its share
    earlier than the others theirs: these would starve first and have too much to do in the end.
    """
    pipelines, microbatches = grid.pipelines, grid.microbatches
    table: list[list[int]] = []
    current = list(range(pipelines)) * microbatches
    for stage in range(len(grid.stages)):
        lost = {worker.pipeline for worker in gone if worker.stage == stage}
        current = _stand_ins(pipelines, microbatches, lost, current)
        table.append([stage * pipelines + pipeline for pipeline in current])
    return tuple(chain.from_iterable(zip(*table, strict=True)))


def _stand_ins(pipelines: int, microbatches: int, lost: set[int], before: list[int]) -> list[int]:
    """Returns the pipeline of every micro-batch on a stage, given those on the stage before."""
    home = list(range(pipelines)) * microbatches
    if not lost:
        return home
    alive = [pipeline for pipeline in range(pipelines) if pipeline not in lost]
    most, larger = divmod(pipelines * microbatches, len(alive))
    loads = dict.fromkeys(alive, microbatches)
    strays = [number for number, pipeline in enumerate(home) if pipeline in lost]
    for nth, number in enumerate(strays):
        stay = loads.get(before[number], most + 1)
        in_turn = stay - microbatches <= nth // len(alive)
        fits = stay < most or (stay == most and larger)
        choice = before[number] if in_turn and fits else min(alive, key=loads.__getitem__)
        larger -= loads[choice] == most
        loads[choice] += 1
        home[number] = choice
    return home


def _check_failed(grid: CostedGrid, gone: frozenset[WorkerId]) -> None:
    placement = regular_placement(grid.pipelines, grid.stages)
    lost = [0] * len(grid.stages)
    for worker in sorted(gone):
        if worker.stage >= len(grid.stages) or worker.pipeline >= grid.pipelines:
            last = placement.workers[-1]
            raise ConfigError(f"failed worker {worker} is not in the grid: expected 0.0 to {last}")
        lost[worker.stage] += 1
    dead = [stage for stage, count in enumerate(lost) if count == grid.pipelines]
    if dead:
        layers = tuple(layer for stage in dead for layer in grid.stages[stage].indices)
        raise StateUnavailable(layers, f"all {grid.pipelines} workers of stage {dead[0]} have failed")


def _check_memory(grid: CostedGrid, worker_of: tuple[int, ...]) -> None:
    visits = [0] * (grid.pipelines * len(grid.stages))
    for worker in worker_of:
        visits[worker] += 1
    for number, stage in enumerate(grid.each):
        most = max(visits[number * grid.pipelines : (number + 1) * grid.pipelines])
        stage.check_memory(f"stage {number}", most)


def to_routes(shop: Shop) -> Routes:
    """Returns the visits of every micro-batch."""
    num_stages, pipelines = shop.num_stages, shop.grid.pipelines
    visits = [Visit(name, shop.grid.stages[name.stage]) for name in _names(shop)]
    routes = []
    for microbatch in shop.grid.batch.microbatches:
        first = (microbatch.index * pipelines + microbatch.pipeline) * num_stages
        way = tuple(visits[worker] for worker in shop.worker_of[first : first + num_stages])
        routes.append(Route(microbatch, way))
    return Routes(tuple(routes))


def _names(shop: Shop) -> list[WorkerId]:
    return [WorkerId(pipeline, stage) for stage in range(shop.num_stages) for pipeline in range(shop.grid.pipelines)]


def rows_of(shop: Shop, orders: Orders) -> list[list[int]]:
    """Returns the operations of every worker as numbers: the inverse of :func:`to_plan`, for orders of this shop."""
    pipelines, visits = shop.grid.pipelines, shop.num_visits
    offset = {OpKind.F: 0, OpKind.I: visits, OpKind.B: visits, OpKind.W: 2 * visits}
    rows: list[list[int]] = [[] for _ in range(shop.num_workers)]
    for worker, ops in orders.rows:
        rows[worker.stage * pipelines + worker.pipeline] = [
            offset[op.kind]
            + (op.microbatch.index * pipelines + op.microbatch.pipeline) * shop.num_stages
            + worker.stage
            for op in ops
        ]
    return rows
