"""Which node takes which place of some pipelines, so that the fewest bytes are copied."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.core.placement import LayerRange

__all__ = ["Seating", "cheapest_assignment", "seat"]

Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating(Generic[Node]):
    """Nodes at their places.

    Attributes:
        nodes: the node at place 0, 1, ...
        copied_bytes: what all of them lack of the layers there.
    """

    nodes: tuple[Node, ...]
    copied_bytes: int


def seat(
    places: Sequence[LayerRange],
    nodes: Sequence[Node],
    held: Mapping[Node, Collection[int]],
    state_bytes: Sequence[int],
) -> Seating[Node]:
    """Returns nodes at the places where they lack the fewest bytes, exactly.

    Args:
        places: the layers of each place, of one pipeline or of several.
        nodes: as many nodes; among equals they stay in this order where they can.
        held: the layers whose state a node has; none if it is not named.
        state_bytes: what another node needs to have a layer, by layer.

    Cost: as :func:`cheapest_assignment`.
    """
    lacking = [
        [sum(state_bytes[layer] for layer in layers.indices if layer not in has) for layers in places]
        for has in (frozenset(held.get(node, ())) for node in nodes)
    ]
    taken = cheapest_assignment(lacking)
    by_place = sorted(range(len(taken)), key=taken.__getitem__)
    return Seating(
        nodes=tuple(nodes[row] for row in by_place),
        copied_bytes=sum(row[place] for row, place in zip(lacking, taken, strict=True)),
    )


def cheapest_assignment(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Returns a column for each row, no two the same, so that the sum of their costs is the least, exactly.

    Args:
        costs: a square matrix, by rows; whole numbers are added exactly.

    The Hungarian method, which no dependency has: rows are added one after another, each by a shortest path in reduced
    costs that lets rows which are there change their columns.

    Cost: O(n^3) for n rows: about a second for 200.

    >>> cheapest_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])
    (1, 0, 2)
    """
    size = len(costs)
    row_price, column_price = [0.0] * size, [0.0] * (size + 1)
    row_at = [-1] * (size + 1)  # the column behind the last one holds the row that is added
    for added in range(size):
        row_at[size] = added
        reached, column = [math.inf] * size, size
        came_from, done = [size] * size, [False] * (size + 1)
        while row_at[column] >= 0:
            done[column] = True
            row = row_at[column]
            for other in range(size):
                reduced = costs[row][other] - row_price[row] - column_price[other]
                if not done[other] and reduced < reached[other]:
                    reached[other], came_from[other] = reduced, column
            nearest = min((other for other in range(size) if not done[other]), key=lambda other: reached[other])
            step = reached[nearest]
            for other in range(size + 1):
                if done[other]:
                    row_price[row_at[other]] += step
                    column_price[other] -= step
                elif other < size:
                    reached[other] -= step
            column = nearest
        while column != size:
            row_at[column] = row_at[came_from[column]]
            column = came_from[column]
    columns = [0] * size
    for column, row in enumerate(row_at[:size]):
        columns[row] = column
    return tuple(columns)
