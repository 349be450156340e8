"""What no schedule can beat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.profile import Costs
from holdfast.errors import ConfigError, StateUnavailable

__all__ = ["Bound", "bound", "failures_per_stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Lower bounds, in the units of the costs; both are defined as in :class:`holdfast.core.evaluate.Timeline`."""

    period: float
    makespan: float


def bound(placement: Placement, failures: Sequence[int], microbatches: int, costs: Costs) -> Bound:
    """Returns lower bounds for every plan in which layers stay where they are: coupled or not, staggered or not.

    Let stage s take f, b and w for F, I and W, and c for a message to the next stage. The living workers of s share all
    micro-batches, so the busiest has at least ``n = ceil(pipelines * microbatches / living)`` of them.

    - *Load*: that worker computes for n (f + b + w). Of the makespan this lies after the first forward has come down
      to s; of the period of stage s, the optimizer step follows.
    - *Chain*: take any stage r up to s. No F of s starts before some worker of r has started, plus (f + c) of every
      stage from r to just before s. From then on the busiest worker of s computes all its F and I, n (f + b). The last
      of these is an I, as every F has its I after it. Its gradient still goes back over (c + b) of every stage
      between s and r, and r itself then computes its W, w. A full backward takes b + w for I, hence no less. So the
      time between the first start and the last end on stage r, to which r's optimizer step is added in any period,
      is at least the sum. Of the makespan, the way from stage 0 to r comes before it.

    Idle time that the memory limit forces is not counted, so the bound may be out of reach.

    Args:
        placement: the regular grid *without* failures.
        failures: how many workers of stage 0, 1, ... have failed.
        microbatches: micro-batches per pipeline, at least 1.
        costs: costs per layer.

    Raises:
        ConfigError: the grid is not regular, or ``failures`` has another number of stages.
        StateUnavailable: a stage has no living worker.
    """
    stages = _stages(placement)
    loads = _loads(placement, stages, failures, microbatches)
    each = [costs.of(layers) for layers in stages]
    comm = [costs.comm[layers.stop - 1] for layers in stages[:-1]]
    down = list(accumulate((each[s].forward + comm[s] for s in range(len(comm))), initial=0))
    back = list(accumulate((each[s].input + comm[s] for s in range(len(comm))), initial=0))
    work = [load * stage.total for load, stage in zip(loads, each, strict=True)]
    trip = [down[s] + loads[s] * (each[s].forward + each[s].input) + back[s] for s in range(len(stages))]
    chain = [[trip[s] - back[r] + each[r].weight for r in range(s + 1)] for s in range(len(stages))]
    return Bound(
        period=max(
            max(work[s] + each[s].optimizer, *(chain[s][r] - down[r] + each[r].optimizer for r in range(s + 1)))
            for s in range(len(stages))
        ),
        makespan=max(max(down[s] + work[s], *chain[s]) for s in range(len(stages))),
    )


def failures_per_stage(placement: Placement, failed: Iterable[WorkerId]) -> tuple[int, ...]:
    """Returns how many of the failed workers held the layers of stage 0, 1, ...

    Args:
        placement: the regular grid without failures.
        failed: workers of that grid.

    Raises:
        ConfigError: the grid is not regular, or a worker is not in it.
    """
    lost = [placement.layers_of(worker) for worker in failed]
    return tuple(lost.count(layers) for layers in _stages(placement))


def _stages(placement: Placement) -> tuple[LayerRange, ...]:
    ranges = [layers for _, layers in placement.ranges]
    stages = tuple(sorted(set(ranges)))
    ends = [0, *(layers.stop for layers in stages)]
    if [layers.start for layers in stages] != ends[:-1] or len({ranges.count(layers) for layers in stages}) > 1:
        raise ConfigError(f"a bound needs a regular grid, not stages {', '.join(map(str, stages))}")
    return stages


def _loads(
    placement: Placement, stages: tuple[LayerRange, ...], failures: Sequence[int], microbatches: int
) -> tuple[int, ...]:
    """Returns the least number of micro-batches on the busiest living worker of every stage."""
    pipelines = len(placement.ranges) // len(stages)
    if len(failures) != len(stages):
        raise ConfigError(f"failures {tuple(failures)} name {len(failures)} stages, but the grid has {len(stages)}")
    lost = tuple(
        layer for layers, x in zip(stages, failures, strict=True) if x >= pipelines for layer in layers.indices
    )
    if lost:
        raise StateUnavailable(lost, f"{max(failures)} of {pipelines} workers of a stage failed")
    return tuple(-(-pipelines * microbatches // (pipelines - x)) for x in failures)
