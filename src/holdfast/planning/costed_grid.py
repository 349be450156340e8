"""Regular grids: what they cost, and the scheduling problem that they are, whole or without some workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from holdfast.core.ids import Batch, MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, regular_placement
from holdfast.core.profile import Costs, StageCosts
from holdfast.errors import ConfigError, StateUnavailable
from holdfast.schedule.problem import Problem, Window, room_of

__all__ = ["CostedGrid", "grid_problem"]


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
    def num_operations(self) -> int:
        """Operations of one step, if the backward is two of them."""
        return 3 * self.pipelines * len(self.stages) * self.microbatches

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


def grid_problem(
    grid: CostedGrid, failed: Iterable[WorkerId], *, coupled: bool = False, worker_of: tuple[int, ...] | None = None
) -> Problem:
    """Returns the problem of a regular grid without the failed workers; their micro-batches go to peers.

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
    gone, each = frozenset(failed), grid.each
    _check_failed(grid, gone)
    worker_of = worker_of or _visits(grid, gone)
    _check_memory(grid, worker_of)
    pipelines, stages = range(grid.pipelines), range(len(grid.stages))
    waits = zip(grid.waits_for, each, strict=True)
    return Problem(
        placement=regular_placement(grid.pipelines, grid.stages),
        failed=gone,
        costs=grid.costs,
        ties=grid.ties,
        workers=tuple(WorkerId(pipeline, stage) for stage in stages for pipeline in pipelines),
        microbatches=_in_order(grid.batch.microbatches),
        worker_of=worker_of,
        part_of=tuple(stages) * (len(worker_of) // len(stages)),
        layers=grid.stages,
        parts=each,
        comm=(*grid.comm, 0),
        coupled=coupled,
        group_of=tuple(stage for stage in stages for _ in pipelines),
        room=tuple(map(room_of, each)),
        optimizer=tuple(stage.optimizer for stage in each),
        windows=tuple(Window(stage, tied, costs.optimizer) for stage, (tied, costs) in enumerate(waits)),
        regular=True,
    )


def _in_order(microbatches: Iterable[MicroBatch]) -> tuple[MicroBatch, ...]:
    return tuple(sorted(microbatches, key=lambda each: (each.index, each.pipeline)))


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
