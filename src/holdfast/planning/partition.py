"""Cuts a model into stages by what its layers cost, not by their number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from holdfast.core.placement import LayerRange
from holdfast.core.profile import Costs
from holdfast.errors import ConfigError, InfeasiblePlan

__all__ = ["balanced_stages"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """The first layers in some number of stages: slowest stage, sum of squared times, and where the last one starts."""

    slowest: float
    squares: float
    start: int


def balanced_stages(costs: Costs, num_stages: int, *, in_flight: int = 1) -> tuple[LayerRange, ...]:
    """Returns contiguous stages whose slowest takes as little time as possible, exactly.

    A stage's time is that of F, I and W and the optimizer's share is left out. Among equals the sum of the squared
    times is least, which evens out the stages that are not the slowest; then earlier stages are shorter.

    Args:
        costs: costs per layer.
        num_stages: stages, from 1 to the number of layers.
        in_flight: micro-batches that every stage must be able to hold at once within its memory, at least 1.

    Raises:
        ConfigError: more stages than layers, or none.
        InfeasiblePlan: no cut leaves every stage the memory that it needs.

    Cost: O(L^2 S) for L layers and S stages.
    """
    layers = costs.num_layers
    if not 1 <= num_stages <= layers:
        raise ConfigError(f"{num_stages} stages do not fit a model of {layers} layers: expected 1 to {layers}")
    fits = _fitting(costs, in_flight)
    row = [_Cut(0.0, 0.0, 0), *[_Cut(math.inf, math.inf, 0)] * layers]
    rows = [row]
    for _ in range(num_stages):
        row = [_best(row, costs, fits, stop) for stop in range(layers + 1)]
        rows.append(row)
    if math.isinf(row[layers].slowest):
        raise InfeasiblePlan(
            f"no cut of {layers} layers into {num_stages} stages can hold {in_flight} micro-batch(es) per stage in "
            "memory: expected more memory, more stages or fewer micro-batches at once"
        )
    stops = [layers]
    for row in reversed(rows[1:]):
        stops.append(row[stops[-1]].start)
    return tuple(LayerRange(start, stop) for start, stop in pairwise(reversed(stops)))


def _fitting(costs: Costs, in_flight: int) -> Callable[[int, int], bool]:
    @cache
    def fits(start: int, stop: int) -> bool:
        stage = costs.of(LayerRange(start, stop))
        return stage.room is None or stage.takes * in_flight <= stage.room * (1 + 1e-12)

    return fits


def _best(row: list[_Cut], costs: Costs, fits: Callable[[int, int], bool], stop: int) -> _Cut:
    """Returns the best cut of the layers before ``stop`` with one stage more than ``row`` has."""
    best = _Cut(math.inf, math.inf, 0)
    time = 0.0
    for start in reversed(range(stop)):
        time += costs.forward[start] + costs.input[start] + costs.weight[start]
        if time > best.slowest:
            break
        before = row[start]
        if not math.isinf(before.slowest) and fits(start, stop):
            cut = _Cut(max(before.slowest, time), before.squares + time * time, start)
            best = min(best, cut, key=lambda each: (each.slowest, each.squares))
    return best
