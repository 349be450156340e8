"""From costs back to the mapping that has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.planning.templates.programme import AFTER, BEFORE, Numbers, Programme

__all__ = ["Cut", "trace"]

_Place = tuple[int, int]
"""Phase, and GPUs to go."""
_Way = tuple[float, tuple[int, ...]]
"""What a way has cost beyond the budget, and the GPUs of its stages: of two ways to one place the lesser is kept."""


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """A mapping.

    Attributes:
        starts: the first layer of each stage.
        gpus: the GPUs of each.
    """

    starts: tuple[int, ...]
    gpus: tuple[int, ...]

    def of(self, table: Numbers) -> tuple[float, ...]:
        """Returns what a table, with axes as of :attr:`Programme.stage`, has for the stages."""
        stops = (*self.starts[1:], table.shape[1])
        return tuple(
            float(table[count - 1, start, stop - start - 1])
            for start, stop, count in zip(self.starts, stops, self.gpus, strict=True)
        )


def trace(programme: Programme, tables: Sequence[Numbers], slowest: tuple[float, float], budget: float) -> Cut | None:
    """Returns the mapping with the smallest first layers that costs no more than a budget; None if that does not fit.

    All ways to the same first layers are followed together. Memory is checked with the stages that are to go in truth,
    whatever the tables take for that; where they take less, what is followed may come to nothing.

    Args:
        programme: the programme.
        tables: what is left to pay with 0, 1, ... stages to go; the mapping has one stage fewer than there are tables.
        slowest: the range of m, the time of its slowest stage, for which the tables are.
        budget: the cost.
    """
    weights = programme.weights(slowest[:1], slowest[1:])
    before, after, turn = weights.stay[BEFORE, 0], weights.stay[AFTER, 0], weights.turn[0]
    moves = {BEFORE: ((BEFORE, before), (AFTER, turn)), AFTER: ((AFTER, after),)}
    ways: dict[_Place, _Way] = {(BEFORE, tables[0].shape[2] - 1): (-budget, ())}
    starts, first = list[int](), 0
    for to_go, left in reversed(list(enumerate(tables[:-1], 1))):
        starts.append(first)
        for many in range(1, min(weights.widest, programme.layers - first) + 1):
            stage = (first, many - 1)
            fits = programme.most_held[:, *stage] >= min(programme.microbatches, to_go)
            reached: dict[_Place, _Way] = {}
            for (phase, behind), way in _taken(programme, ways, moves, stage):
                if fits[way[1][-1] - 1] and way[0] + left[phase, first + many, behind] <= 0:
                    reached[phase, behind] = min(reached.get((phase, behind), way), way)
            if reached:
                break
        else:
            return None
        ways, first = reached, first + many
    end = ways.get((AFTER, 0))
    return None if end is None or first < programme.layers else Cut(starts=tuple(starts), gpus=end[1])


def _taken(
    programme: Programme,
    ways: Mapping[_Place, _Way],
    moves: Mapping[int, Sequence[tuple[int, Numbers]]],
    stage: tuple[int, int],
) -> Iterator[tuple[_Place, _Way]]:
    """Yields the ways with one stage more, on any number of the GPUs that are left of its node."""
    for (phase, to_go), (spent, gpus) in ways.items():
        for count in range(1, (to_go - 1) % programme.gpus + 2):
            for to, costs in moves[phase]:
                yield (to, to_go - count), (spent + float(costs[count - 1, *stage]), (*gpus, count))
