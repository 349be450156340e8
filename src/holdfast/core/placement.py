"""Which worker holds which contiguous range of layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError

__all__ = [
    "MOST_LAYERS",
    "LayerRange",
    "Placement",
    "group_into_nodes",
    "home_placement",
    "regular_placement",
    "split_evenly",
]


MOST_LAYERS = 1 << 20
"""No model has so many; a damaged store may say so, and whoever reads it would be busy for years."""


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """A non-empty range of contiguous layers.

    Attributes:
        start: first layer, counted from 0.
        stop: one past the last layer.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigError(f"layer range {self.start}:{self.stop} is impossible: expected 0 <= start < stop")

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    @property
    def indices(self) -> range:
        """The layers, in ascending order."""
        return range(self.start, self.stop)

    def holds(self, other: LayerRange) -> bool:
        """Whether all layers of another range are in this one."""
        return self.start <= other.start and other.stop <= self.stop

    def meets(self, other: LayerRange) -> bool:
        """Whether some layer is in both."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which worker holds which layers. Several workers that hold the same layer are its owners, or peers.

    Attributes:
        num_layers: layers of the model, from 1 to ``MOST_LAYERS``.
        ranges: one range per living worker, sorted by worker. After failures, layers may be left without an owner.
    """

    num_layers: int
    ranges: tuple[tuple[WorkerId, LayerRange], ...]

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= MOST_LAYERS:
            raise ConfigError(f"a placement of {self.num_layers} layers is impossible: expected 1 to {MOST_LAYERS}")
        for (earlier, _), (later, _) in pairwise(self.ranges):
            if not earlier < later:
                raise ConfigError(f"placement must list each worker once, sorted: {later} comes after {earlier}")
        for worker, layers in self.ranges:
            if layers.stop > self.num_layers:
                raise ConfigError(f"worker {worker} holds layers {layers}, but the model has {self.num_layers}")

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The workers, sorted."""
        return tuple(worker for worker, _ in self.ranges)

    def layers_of(self, worker: WorkerId) -> LayerRange:
        """Returns the layers that a worker holds.

        Raises:
            ConfigError: the worker is not in this placement.
        """
        at = bisect_left(self.ranges, worker, key=_worker_of)
        if at == len(self.ranges) or self.ranges[at][0] != worker:
            raise ConfigError(f"worker {worker} is not in the placement, which has {_some(self.workers)}")
        return self.ranges[at][1]

    def owners(self, layer: int) -> tuple[WorkerId, ...]:
        """Returns the workers that hold a layer, sorted; empty if none does."""
        return tuple(worker for worker, layers in self.ranges if layer in layers)

    @property
    def owners_by_layer(self) -> tuple[tuple[WorkerId, ...], ...]:
        """The workers that hold layer 0, 1, ..., sorted; cheaper than to ask for one layer after another."""
        owners: list[list[WorkerId]] = [[] for _ in range(self.num_layers)]
        for worker, layers in self.ranges:
            for layer in layers.indices:
                owners[layer].append(worker)
        return tuple(map(tuple, owners))

    def without(self, workers: Iterable[WorkerId]) -> Placement:
        """Returns the placement that is left when these workers are gone; ids that are not in it are ignored."""
        gone = frozenset(workers)
        return Placement(num_layers=self.num_layers, ranges=tuple(pair for pair in self.ranges if pair[0] not in gone))

    def unowned_layers(self) -> tuple[int, ...]:
        """Returns the layers that no worker holds, ascending."""
        owned = {layer for _, layers in self.ranges for layer in layers.indices}
        return tuple(layer for layer in range(self.num_layers) if layer not in owned)


def split_evenly(num_layers: int, num_stages: int) -> tuple[LayerRange, ...]:
    """Returns contiguous ranges, one per stage, whose sizes differ by at most one, larger ones first.

    Args:
        num_layers: layers of the model, at least ``num_stages``.
        num_stages: stages of a pipeline, at least 1.

    Raises:
        ConfigError: fewer layers than stages, or no stage.

    >>> [str(stage) for stage in split_evenly(7, 3)]
    ['0:3', '3:5', '5:7']
    """
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"grid.stages = {num_stages} does not fit a model of {num_layers} layers: "
            f"every stage holds at least one, so expected 1 to {num_layers}"
        )
    size, larger = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, larger) for stage in range(num_stages + 1)]
    return tuple(LayerRange(start, stop) for start, stop in pairwise(starts))


def home_placement(pipelines: Sequence[Sequence[LayerRange]]) -> Placement:
    """Returns the placement of a whole grid, whose pipelines may cut the model in different ways.

    Args:
        pipelines: the ranges of stage 0, 1, ... of every pipeline, together covering the layers from 0 without a gap.

    Raises:
        ConfigError: no pipeline, stages that do not follow one another, or pipelines of unlike models.
    """
    if not pipelines:
        raise ConfigError("a grid without pipelines is impossible: expected at least 1")
    for stages in pipelines:
        if not stages or stages[0].start != 0 or any(a.stop != b.start for a, b in pairwise(stages)):
            raise ConfigError(f"stages {_some(stages)} must cover the layers from 0 without a gap or an overlap")
    ends = [stages[-1].stop for stages in pipelines]
    if len(set(ends)) > 1:
        raise ConfigError(f"pipelines must cover the same layers, but they have {_some(ends)} of them")
    return Placement(
        num_layers=ends[0],
        ranges=tuple((WorkerId(p, s), layers) for p, stages in enumerate(pipelines) for s, layers in enumerate(stages)),
    )


def regular_placement(num_pipelines: int, stages: tuple[LayerRange, ...]) -> Placement:
    """Returns the placement in which every pipeline cuts the model in the same way.

    Args:
        num_pipelines: data-parallel copies, at least 1.
        stages: the ranges of stage 0, 1, ..., together covering the layers from 0 without a gap.

    Raises:
        ConfigError: no pipeline, or stages that do not follow one another.
    """
    return home_placement([stages] * num_pipelines)


def group_into_nodes(workers: tuple[WorkerId, ...], workers_per_node: int) -> tuple[tuple[WorkerId, ...], ...]:
    """Returns the workers of each node, in order: node 0 has the first ``workers_per_node``, and so on.

    >>> [[str(w) for w in node] for node in group_into_nodes((WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)), 2)]
    [['0.0', '0.1'], ['1.0']]
    """
    starts = range(0, len(workers), workers_per_node)
    return tuple(workers[start : start + workers_per_node] for start in starts)


def _worker_of(pair: tuple[WorkerId, LayerRange]) -> WorkerId:
    return pair[0]


def _some(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values) or "none"
