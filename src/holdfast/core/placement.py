"""Which worker holds which layers, and which it is about to hold."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError

__all__ = [
    "MOST_LAYERS",
    "LayerRange",
    "Placement",
    "group_into_nodes",
    "home_placement",
    "lacking",
    "regular_placement",
    "spared",
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


_Rows = tuple[tuple[WorkerId, LayerRange], ...]


@dataclass(frozen=True, kw_only=True)  # without slots: what is asked for all the time is kept
class Placement:
    """Which worker has which layers: it holds some, and follows others.

    Whoever holds a layer has its state and can run it; several workers that hold the same layer are its owners, or
    peers. Whoever follows a layer takes part in its reductions and gets the state meanwhile: it is to hold it later.

    Attributes:
        num_layers: layers of the model, from 1 to ``MOST_LAYERS``.
        ranges: what each living worker holds, sorted: ranges of one worker neither meet nor touch. After failures,
            layers may be left without an owner.
        followed: what workers follow, likewise; nobody follows what it holds.
    """

    num_layers: int
    ranges: _Rows
    followed: _Rows = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= MOST_LAYERS:
            raise ConfigError(f"a placement of {self.num_layers} layers is impossible: expected 1 to {MOST_LAYERS}")
        _check_rows(self.ranges, self.num_layers)
        if self.followed:
            _check_rows(self.followed, self.num_layers)
            for worker, layers in self.followed:
                if any(layers.meets(held) for held in self.held_by(worker)):
                    raise ConfigError(f"worker {worker} is to follow layers {layers}, some of which it holds")

    @cached_property
    def workers(self) -> tuple[WorkerId, ...]:
        """The workers, sorted."""
        rows = sorted((*self.ranges, *self.followed)) if self.followed else self.ranges
        return tuple(dict.fromkeys(worker for worker, _ in rows))

    def __contains__(self, worker: object) -> bool:
        """Whether a worker holds or follows any layer."""
        return isinstance(worker, WorkerId) and bool(self.held_by(worker) or self.followed_by(worker))

    def held_by(self, worker: WorkerId) -> tuple[LayerRange, ...]:
        """Returns the ranges that a worker holds, ascending; none if it only follows, or is not here at all."""
        return _of_one(self.ranges, worker)

    def followed_by(self, worker: WorkerId) -> tuple[LayerRange, ...]:
        """Returns the ranges that a worker follows, ascending."""
        return _of_one(self.followed, worker)

    def held_layers(self, worker: WorkerId) -> tuple[int, ...]:
        """Returns the layers that a worker holds, ascending."""
        return _indices(self.held_by(worker))

    def followed_layers(self, worker: WorkerId) -> tuple[int, ...]:
        """Returns the layers that a worker follows, ascending."""
        return _indices(self.followed_by(worker))

    def layers_of(self, worker: WorkerId) -> tuple[int, ...]:
        """Returns the layers that a worker holds or follows, ascending; none if it is not here at all."""
        return _indices(sorted((*self.held_by(worker), *self.followed_by(worker))))

    @property
    def single_ranges(self) -> dict[WorkerId, LayerRange]:
        """The range of every worker that holds just one."""
        ranges = dict(self.ranges)
        if len(ranges) < len(self.ranges):
            for earlier, later in pairwise(self.ranges):
                if earlier[0] == later[0]:
                    ranges.pop(later[0], None)
        return ranges

    def holds(self, worker: WorkerId, layers: LayerRange) -> bool:
        """Whether a worker holds all these layers."""
        return any(held.holds(layers) for held in self.held_by(worker))

    def owners(self, layer: int) -> tuple[WorkerId, ...]:
        """Returns the workers that hold a layer, sorted; empty if none does."""
        return tuple(worker for worker, layers in self.ranges if layer in layers)

    @cached_property
    def owners_by_layer(self) -> tuple[tuple[WorkerId, ...], ...]:
        """The workers that hold layer 0, 1, ..., sorted; cheaper than to ask for one layer after another."""
        return _by_layer(self.num_layers, self.ranges)

    @cached_property
    def members_by_layer(self) -> tuple[tuple[WorkerId, ...], ...]:
        """The workers that hold or follow layer 0, 1, ..., sorted: who takes part in its reductions."""
        return _by_layer(self.num_layers, sorted((*self.ranges, *self.followed)))

    def without(self, workers: Iterable[WorkerId]) -> Placement:
        """Returns the placement that is left when these workers are gone; ids that are not in it are ignored."""
        gone = frozenset(workers)
        return Placement(
            num_layers=self.num_layers,
            ranges=tuple(row for row in self.ranges if row[0] not in gone),
            followed=tuple(row for row in self.followed if row[0] not in gone),
        )

    def unowned_layers(self, gone: Collection[WorkerId] = ()) -> tuple[int, ...]:
        """Returns the layers that no worker holds, or none but those that are ``gone``, ascending."""
        owned = {layer for worker, layers in self.ranges if worker not in gone for layer in layers.indices}
        return tuple(layer for layer in range(self.num_layers) if layer not in owned)


def lacking(
    placement: Placement, target: Placement, joining: Iterable[WorkerId] = ()
) -> tuple[tuple[WorkerId, LayerRange], ...]:
    """Returns what workers of a placement do not hold and are to hold in another one, as rows of that.

    ``joining``: workers that hold nothing so far.
    """
    rows: list[tuple[WorkerId, LayerRange]] = []
    for worker in (*placement.workers, *joining):
        held = frozenset(placement.held_layers(worker))
        missing = (layer for layer in target.held_layers(worker) if layer not in held)
        rows += ((worker, part) for part in _ranges(missing))
    return tuple(rows)


def spared(placement: Placement, lost: Iterable[WorkerId], wishes: Iterable[WorkerId]) -> frozenset[WorkerId]:
    """Returns who of ``wishes`` can rest: all their layers have other owners, who neither are lost nor rest.

    Where not all can, those with lower ids do.
    """
    wanted = frozenset(wishes)
    if not wanted:  # nearly always, and whoever plans asks
        return wanted
    left = placement.without(lost)
    owners = [set(each) for each in left.owners_by_layer]
    found = set[WorkerId]()
    for worker in sorted(wanted.intersection(left.workers)):
        layers = left.held_layers(worker)
        if layers and all(len(owners[layer]) > 1 for layer in layers):
            found.add(worker)
            for layer in layers:
                owners[layer].discard(worker)
    return frozenset(found)


def _indices(ranges: Iterable[LayerRange]) -> tuple[int, ...]:
    return tuple(layer for part in ranges for layer in part.indices)


def _ranges(layers: Iterable[int]) -> Iterator[LayerRange]:
    """The ranges of ascending layers."""
    for _, run in groupby(enumerate(layers), key=lambda numbered: numbered[1] - numbered[0]):
        found = [layer for _, layer in run]
        yield LayerRange(found[0], found[-1] + 1)


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
        pipelines: of every pipeline the range of each of its workers, stage by stage, together covering the layers from
            0 without a gap. Workers that come one after another with the same range are the lanes of one stage.

    Raises:
        ConfigError: no pipeline, stages that do not follow one another, or pipelines of unlike models.

    >>> two_lanes = home_placement([[LayerRange(0, 2), LayerRange(2, 3), LayerRange(2, 3)]])
    >>> [str(worker) for worker in two_lanes.owners(2)]
    ['0.1', '0.2']
    """
    if not pipelines:
        raise ConfigError("a grid without pipelines is impossible: expected at least 1")
    for stages in pipelines:
        if not stages or stages[0].start != 0 or any(a != b and a.stop != b.start for a, b in pairwise(stages)):
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


def _worker_of(row: tuple[WorkerId, LayerRange]) -> WorkerId:
    return row[0]


def _of_one(rows: _Rows, worker: WorkerId) -> tuple[LayerRange, ...]:
    start = bisect_left(rows, worker, key=_worker_of)
    stop = bisect_right(rows, worker, lo=start, key=_worker_of)
    return tuple(layers for _, layers in rows[start:stop])


def _by_layer(num_layers: int, rows: Iterable[tuple[WorkerId, LayerRange]]) -> tuple[tuple[WorkerId, ...], ...]:
    found: list[list[WorkerId]] = [[] for _ in range(num_layers)]
    for worker, layers in rows:
        for layer in layers.indices:
            found[layer].append(worker)
    return tuple(map(tuple, found))


def _check_rows(rows: _Rows, num_layers: int) -> None:
    for (earlier, before), (later, after) in pairwise(rows):
        if later < earlier:
            raise ConfigError(f"placement must list workers sorted: {later} comes after {earlier}")
        if later == earlier and before.stop >= after.start:
            raise ConfigError(f"worker {later} must have ranges apart from one another: {after} comes after {before}")
    for worker, layers in rows:
        if layers.stop > num_layers:
            raise ConfigError(f"worker {worker} has layers {layers}, but the model has {num_layers}")


def _some(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values) or "none"
