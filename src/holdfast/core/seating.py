"""Which node each worker of a job begins on: so that as many nodes as can be may be lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from itertools import groupby

from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import Placement

__all__ = ["seat", "survives"]

_Seats = dict[WorkerId, NodeId]
_NOWHERE: Mapping[WorkerId, NodeId] = {}


def survives(placement: Placement, where: Mapping[WorkerId, Hashable]) -> int:
    """Returns how many nodes may be lost, whichever they are, and every layer still has an owner; -1: one has none.

    Args:
        placement: of the plan.
        where: the node of each worker in it, by whatever tells it from others.
    """
    return min(_spread(placement, where)) - 1


def seat(
    placement: Placement, free: Mapping[NodeId, int], stay: Mapping[WorkerId, NodeId] = _NOWHERE
) -> dict[WorkerId, NodeId]:
    """Returns the node of each worker that has none.

    Pipelines come in order, each onto one node where it fits, since what its workers send each other is best not sent
    far; of those that with the fewest workers, and then with the most room. Then workers change places as long as that
    spreads the owners of a layer over more nodes.

    Args:
        placement: of the plan.
        free: how many workers each node has room for; together at least as many as are to be placed.
        stay: the nodes of those that have one.
    """
    where, left = dict(stay), dict(free)
    placed = [worker for worker in placement.workers if worker not in stay]
    for _, group in groupby(placed, key=lambda worker: worker.pipeline):
        pipeline = list(group)
        node = _best(left, where, len(pipeline))
        for number, worker in enumerate(pipeline):
            node = node if left[node] else _best(left, where, len(pipeline) - number)
            where[worker], left[node] = node, left[node] - 1
    while better := next(_better(placement, where, placed), None):
        where = better
    return {worker: where[worker] for worker in placed}


def _best(left: Mapping[NodeId, int], where: _Seats, workers: int) -> NodeId:
    """Where so many workers, or the first of them, are to be."""
    there = Counter(where.values())
    return max(sorted(left), key=lambda node: (min(left[node], workers), -there[node], left[node]))


def _better(placement: Placement, where: _Seats, movable: list[WorkerId]) -> Iterator[_Seats]:
    """What becomes of it when two workers change places, as often as that helps the layers that are worst off."""
    spread = _spread(placement, where)
    num_nodes, now = len(set(where.values())), _worst(spread)
    for layer, owners in enumerate(placement.owners_by_layer):
        if spread[layer] > min(spread) or spread[layer] == min(num_nodes, len(owners)):
            continue
        taken = [where[owner] for owner in owners]
        for owner in owners:
            if owner not in movable or taken.count(where[owner]) == 1:
                continue
            for other in movable:
                if where[other] not in taken:
                    swapped = {**where, owner: where[other], other: where[owner]}
                    if _worst(_spread(placement, swapped)) > now:
                        yield swapped


def _worst(spread: list[int]) -> tuple[int, int]:
    """On how many nodes the layer is that is on the fewest, and, negative, how many layers are on so few."""
    return min(spread), -spread.count(min(spread))


def _spread(placement: Placement, where: Mapping[WorkerId, Hashable]) -> list[int]:
    """On how many nodes each layer has owners."""
    return [len({where[owner] for owner in owners}) for owners in placement.owners_by_layer]
