"""A pipeline template: how so many nodes run the whole model, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

from holdfast.core.placement import LayerRange
from holdfast.planning.templates.pace import Pace, pace_of

__all__ = ["Template", "TemplateStage", "iteration_time", "last_slowest"]


def last_slowest(stage_s: Sequence[float]) -> int:
    """Returns the index of the slowest stage, of the last one among equals.

    >>> last_slowest([3, 1, 3, 2])
    2
    """
    return max(range(len(stage_s)), key=lambda stage: (stage_s[stage], stage))


def iteration_time(stage_s: Sequence[float], microbatches: int, slowest: int | None = None) -> float:
    """Returns the cost of a mapping: about the time of one step, by which templates are chosen.

    It is ``sum(w) + (N_b - S + k - 1) w_k + w_k + ... + w_{S-1}``, where k is the last of the slowest stages, and no
    less than ``N_b w_k``.

    Args:
        stage_s: how long F and B of one micro-batch take stage 0, 1, ...: w, at least one number.
        microbatches: N_b, at least the number of stages.
        slowest: k, where it is known better than these numbers tell, as they may have been rounded.

    Source: Oobleck, section 4.1.2, equations 1 to 4, where the second half of a division must begin at k, not at k + 1.
    There N_b is 4 S, which makes numbers of stages incomparable, and nothing keeps the cost of an early bottleneck from
    falling below what its stage computes.

    >>> iteration_time([1, 2, 1], 4), iteration_time([3, 1, 1, 1], 8)
    (9, 24)
    """
    k = last_slowest(stage_s) if slowest is None else slowest
    steady = (microbatches - len(stage_s) + k - 1) * stage_s[k]
    return max(sum(stage_s) + steady + sum(stage_s[k:]), microbatches * stage_s[k])


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateStage:
    """One stage: these layers, on so many GPUs of one node."""

    layers: LayerRange
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The best mapping of layers and GPUs to stages for a number of nodes.

    Attributes:
        nodes: how many nodes a pipeline of this template has.
        stages: its stages; they fill the nodes in order.
        stage_s: how long F and B of one micro-batch take each stage, in seconds.
        slowest: the last of the slowest stages.
        iteration_s: :func:`iteration_time` for the number of micro-batches with which it was chosen.
    """

    nodes: int
    stages: tuple[TemplateStage, ...]
    stage_s: tuple[float, ...]
    slowest: int
    iteration_s: float

    @property
    def steady_s(self) -> float:
        """Steady time per micro-batch: what the slowest stage takes."""
        return self.stage_s[self.slowest]

    @property
    def pace(self) -> Pace:
        """How long a step takes, by its micro-batches."""
        return pace_of(self.stage_s, self.slowest)

    @property
    def node_of_stage(self) -> tuple[int, ...]:
        """On which node of a pipeline stage 0, 1, ... is, from 0."""
        before = tuple(accumulate((stage.gpus for stage in self.stages), initial=0))
        gpus_per_node = before[-1] // self.nodes
        return tuple(gpus // gpus_per_node for gpus in before[:-1])

    @property
    def layers_by_node(self) -> tuple[LayerRange, ...]:
        """The layers of all stages on node 0, 1, ... of a pipeline."""
        parts = zip(self.node_of_stage, (stage.layers for stage in self.stages), strict=True)
        by_node = [[layers for _, layers in part] for _, part in groupby(parts, key=itemgetter(0))]
        return tuple(LayerRange(part[0].start, part[-1].stop) for part in by_node)
