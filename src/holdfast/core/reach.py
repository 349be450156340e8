"""Who can go on together where some nodes cannot reach each other, though somebody can reach them all."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import Placement

__all__ = ["cover"]

_Pairs = frozenset[tuple[NodeId, NodeId]]


def cover(
    pairs: Collection[tuple[NodeId, NodeId]], where: Mapping[WorkerId, NodeId], placement: Placement
) -> frozenset[NodeId]:
    """Returns the nodes without which all who are left can reach each other, as few workers, then nodes, as possible.

    Args:
        pairs: nodes, two different ones each, that cannot reach each other.
        where: the node of each worker.
        placement: of the workers that live; every layer that has an owner still has one without these nodes.

    Returns:
        None of them if there are no pairs, or if any choice would leave a layer without an owner.
    """
    owned = [frozenset(where[owner] for owner in owners) for owners in placement.owners_by_layer if owners]
    workers = list(where.values())
    best: frozenset[NodeId] | None = None

    def cost(nodes: frozenset[NodeId]) -> tuple[int, int]:
        return sum(node in nodes for node in workers), len(nodes)

    def choose(left: _Pairs, chosen: frozenset[NodeId]) -> None:
        nonlocal best
        if best is not None and cost(chosen) >= cost(best):
            return
        if any(owners <= chosen for owners in owned):
            return
        if not left:
            best = chosen
            return
        ends = [end for pair in left for end in pair]
        node = max(sorted(set(ends), reverse=True), key=ends.count)  # it goes, or all that it cannot reach do
        others = frozenset(end for pair in left if node in pair for end in pair if end != node)
        for go in (frozenset({node}), others):
            choose(frozenset(pair for pair in left if go.isdisjoint(pair)), chosen | go)

    choose(frozenset(pairs), frozenset())
    return best or frozenset()
