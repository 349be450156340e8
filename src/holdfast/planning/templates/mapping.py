"""The best mapping of layers and GPUs to stages for a number of nodes, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from holdfast.core.placement import LayerRange
from holdfast.planning.templates.counted import counted_costs
from holdfast.planning.templates.programme import BEFORE, Numbers, Programme
from holdfast.planning.templates.stages import StageTable
from holdfast.planning.templates.template import Template, TemplateStage, iteration_time, last_slowest
from holdfast.planning.templates.trace import Cut, trace

__all__ = ["best_templates"]

_AT_ONCE = 8
"""Ranges that are bounded together: their operations share the overhead of arrays."""


def best_templates(table: StageTable, sizes: Iterable[int], microbatches: int) -> dict[int, Template]:
    """Returns the best template for each number of nodes; those for which there is no mapping at all are left out.

    A mapping has stages of contiguous layers on 1 to M GPUs each; they fill the nodes in order and none is on two
    nodes; all GPUs are used; there are at most ``microbatches`` stages; stage i of S has memory for its layers' state
    and ``min(microbatches, S - i)`` micro-batches. The best one has the least
    :func:`~holdfast.planning.templates.template.iteration_time`, then the fewest stages, then the smallest first
    layers.

    Args:
        table: what stages take, and the GPUs of a node.
        sizes: numbers of nodes, each at least 1.
        microbatches: N_b, the same for all templates, so that they can be compared.

    Source: Oobleck, section 4.1.2. Its divide-and-conquer recursion has no optimal substructure, as a half that is best
    by itself need not be so beside another one's slowest stage; here that stage is enumerated, which leaves a sum.

    Cost: about 0.1 s for 96 layers on 24 nodes of 8 GPUs; up to 1.5 s where memory decides.
    """
    wanted = sorted(set(sizes))
    programme = Programme(table, microbatches)
    feasible = [nodes for nodes in wanted if nodes <= min(programme.layers, microbatches)]
    if not feasible:
        return {}
    least = programme.least_slowest(feasible[0], feasible[-1])
    found = (_of(table, programme, nodes, microbatches, float(least[nodes])) for nodes in feasible)
    return {template.nodes: template for template in found if template is not None}


def _of(table: StageTable, programme: Programme, nodes: int, microbatches: int, least: float) -> Template | None:
    if math.isinf(least):
        return None
    cut = _Search(programme, nodes, microbatches, least).run()
    if cut is None:
        return None
    stops = (*cut.starts[1:], programme.layers)
    stages = tuple(
        TemplateStage(layers=LayerRange(start, stop), gpus=count)
        for start, stop, count in zip(cut.starts, stops, cut.gpus, strict=True)
    )
    stage_s = tuple(table.seconds(stage.layers, stage.gpus) for stage in stages)
    slowest = last_slowest(cut.of(programme.stage))
    return Template(
        nodes=nodes,
        stages=stages,
        stage_s=stage_s,
        slowest=slowest,
        iteration_s=iteration_time(stage_s, microbatches, slowest),
    )


_Range = tuple[int, int]
"""The first and the last of some times, by their indices among all that a stage can take."""


@dataclass(frozen=True, slots=True, order=True)
class _Value:
    """The value of a mapping, in the order in which they are compared; of a range of m, a bound of it."""

    time: float
    stages: float


_NONE = _Value(math.inf, math.inf)


class _Search:
    """The search for the slowest stage's time, m, of the best mapping to a number of nodes.

    Ranges of m are bounded, dropped if they cannot contain the best one, and else divided until they are single times,
    of which the bound is the value.
    """

    def __init__(self, programme: Programme, nodes: int, microbatches: int, least: float) -> None:
        self._programme, self._nodes, self._microbatches = programme, nodes, microbatches
        self._most_stages = min(programme.layers, nodes * programme.gpus, microbatches)
        self._times = programme.candidates
        self._first = int(self._times.searchsorted(least))

    def run(self) -> Cut | None:
        """Returns the best mapping; None if there is none."""
        best, times = self._narrowed(self._bounds, math.inf)
        cuts = [self._traced(time) for time in times]
        fitting = [cut for cut in cuts if cut is not None]
        # where a time is what the slowest stage takes and no more, a mapping that costs more may have fewer stages
        cut_off = any(self._microbatches * self._times[time] == best.time for time in times)
        if len(fitting) == len(cuts) and not cut_off:
            return min(fitting, default=None)
        known = min((self._time(cut) for cut in fitting), default=math.inf)
        best, times = self._narrowed(self._counted, known)
        return min((cut for time in times if (cut := self._traced_counted(time, best)) is not None), default=None)

    def _cut_of(self, tables: Sequence[Numbers], slowest: tuple[float, float]) -> Cut | None:
        """Returns the mapping behind the least cost; None if there is none, or it does not fit.

        Args:
            tables: what is left to pay with 0, 1, ... stages to go, or the only one, if they are not counted.
            slowest: the range of m.
        """
        cost = min(float(left[BEFORE, 0, -1]) for left in tables)
        stages = cost % self._programme.scale
        if math.isinf(cost) or stages > self._most_stages:
            return None
        counted = tables if len(tables) > 1 else [tables[0]] * (int(stages) + 1)
        return trace(self._programme, counted[: int(stages) + 1], slowest, cost)

    def _narrowed(
        self, evaluate: Callable[[Sequence[_Range], float], tuple[list[_Value], float]], known: float
    ) -> tuple[_Value, list[int]]:
        """Returns the best value and all m that reach it, by their index.

        Args:
            evaluate: bounds ranges, given the best time so far, above which any bound will do, and says what time some
                mapping reaches.
            known: a time that some mapping is known to reach.
        """
        best, reached = _Value(known, math.inf), list[int]()
        ranges = [(self._first, self._first)]
        while ranges:
            single, left = list[tuple[_Range, _Value]](), list[tuple[_Range, _Value]]()
            values, reachable = evaluate(ranges, best.time)
            best = min(best, _Value(reachable, math.inf))
            for each, value in zip(ranges, values, strict=True):
                (single if each[0] == each[1] else left).append((each, value))
            for (index, _), value in single:
                if value < best:
                    best, reached = value, []
                if value == best and value.time < math.inf:
                    reached.append(index)
            if ranges[0] == (self._first, self._first):
                left = [((self._first + 1, self._last(best.time)), _Value(0.0, 0))]
            ranges = _divided([each for each, value in left if value.time <= best.time])
        return best, reached

    def _last(self, time: float) -> int:
        """Returns the last m with which so short a time can be reached."""
        return int(self._times.searchsorted(time / self._microbatches, side="right")) - 1

    def _value(self, index: int, cost: float) -> _Value:
        """The value of a mapping with this m; or of any with a greater one and this cost, a bound."""
        if math.isinf(cost):
            return _NONE
        excess, stages = divmod(cost, self._programme.scale)
        return _Value(self._microbatches * float(self._times[index]) + max(0.0, excess), stages)

    def _bounds(self, ranges: Sequence[_Range], best: float) -> tuple[list[_Value], float]:
        """Values without a limit to the number of stages, and memory as if there were one in each node."""
        lows, tops = zip(*((self._times[low], self._times[top]) for low, top in ranges), strict=True)
        left = self._programme.costs(lows, tops, self._nodes)
        costs = left[BEFORE, :, 0, -1].tolist()
        values = [self._value(low, cost) for (low, _), cost in zip(ranges, costs, strict=True)]
        place = min(range(len(ranges)), key=lambda place: values[place])
        if lows[place] == tops[place] or values[place].time > best:
            return values, math.inf
        cut = self._cut_of([left[:, place]], (lows[place], tops[place]))
        return values, math.inf if cut is None else self._time(cut)

    def _time(self, cut: Cut) -> float:
        return iteration_time(cut.of(self._programme.stage), self._microbatches)

    def _counted(self, ranges: Sequence[_Range], best: float) -> tuple[list[_Value], float]:
        """Values as they are; those that are greater than the best may be less than they are."""
        values, reachable = self._bounds(ranges, best)
        best = min(best, reachable)
        for place in sorted(range(len(ranges)), key=lambda place: values[place]):
            low, top = ranges[place]
            if values[place].time <= best:
                tables = list(self._tables(low, top, best))
                values[place] = min(self._value(low, float(left[BEFORE, 0, -1])) for left in tables)
                cut = self._cut_of(tables, (float(self._times[low]), float(self._times[top])))
                best = best if cut is None else min(best, self._time(cut))
        return values, best

    def _tables(self, low: int, top: int, best: float) -> Iterator[Numbers]:
        """Yields what is left to pay by the stages to go, for mappings whose time is no longer than the best."""
        least, most = float(self._times[low]), float(self._times[top])
        budget = (best - self._microbatches * least + 1) * self._programme.scale - 1
        return counted_costs(self._programme, least, most, self._nodes, self._most_stages, budget)

    def _traced(self, index: int) -> Cut | None:
        time = float(self._times[index])
        return self._cut_of([self._programme.costs([time], [time], self._nodes)[:, 0]], (time, time))

    def _traced_counted(self, index: int, best: _Value) -> Cut | None:
        time = float(self._times[index])
        budget = (best.time - self._microbatches * time) * self._programme.scale + best.stages
        return trace(
            self._programme,
            list(islice(self._tables(index, index, best.time), int(best.stages) + 1)),
            (time, time),
            budget,
        )


def _divided(ranges: Sequence[_Range]) -> list[_Range]:
    """Returns ranges that make up the same, each at most half of the longest; about :data:`_AT_ONCE` of them."""
    lengths = [top - low + 1 for low, top in ranges]
    size = max(1, min(math.ceil(sum(lengths) / _AT_ONCE), max(lengths, default=0) // 2))
    return [(part, min(top, part + size - 1)) for low, top in ranges for part in range(low, top + 1, size)]
