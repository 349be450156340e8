"""From some pipelines to others when nodes are lost: reinstantiate, borrow, merge."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.errors import ConfigError, InfeasiblePlan

__all__ = ["Pipelines", "reconfigured"]

_Nodes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """Which nodes form pipelines.

    Attributes:
        pipelines: the nodes of each, in the order of its stages; sorted by size, then by first node.
        dormant: nodes that are in none, in the order in which they are to be used.
    """

    pipelines: tuple[_Nodes, ...]
    dormant: _Nodes = ()

    def __post_init__(self) -> None:
        nodes = [*self.dormant, *(node for pipeline in self.pipelines for node in pipeline)]
        for node in sorted(set(nodes)):
            if node < 0 or nodes.count(node) > 1:
                raise ConfigError(f"node {node} of {self.pipelines} is impossible: expected numbers from 0, each once")

    @property
    def nodes(self) -> frozenset[int]:
        """All nodes."""
        return frozenset(self.dormant).union(*self.pipelines)


def reconfigured(
    before: Pipelines, lost: Collection[int], minimum: int, sizes: Collection[int] | None = None
) -> Pipelines:
    """Returns the pipelines that the nodes that are left form.

    A pipeline that has lost nodes stays, on those it has left, if they are enough. A short one takes dormant nodes,
    then borrows from the end of the biggest pipeline that has more than ``minimum``, the last one among equals, if all
    such nodes together are enough for it; one that has no node left, too. Else it is merged with the next short one,
    or, if it is the only one, with the first that has enough. All others are left as they are.

    Args:
        before: the pipelines, with those that are lost.
        lost: nodes that are gone.
        minimum: n0, the fewest nodes of a pipeline.
        sizes: sizes for which there are templates, n0 among them; None: all from ``minimum`` on. Nodes by which a
            pipeline is above the next one below become dormant.

    Raises:
        ConfigError: a lost node is in no pipeline, or ``minimum`` is not above 0.
        InfeasiblePlan: fewer than ``minimum`` nodes are left.

    Every node that is left is used, in pipelines of ``minimum`` to ``2 * minimum - 1`` nodes or no more than before. If
    there are enough nodes for f + 1 pipelines and there were so many, there are still: a merger takes place only where
    the nodes do not suffice for all that there are.

    Source: Oobleck, section 5.1 and figure 8. It does not say that borrowing must suffice; nodes that are borrowed for
    a pipeline that is merged all the same would have moved for nothing.

    >>> reconfigured(Pipelines(pipelines=((0, 1), (2, 3, 4))), {2, 4}, 2).pipelines
    ((3, 0, 1),)
    """
    _check(before, lost, minimum)
    dormant = [node for node in before.dormant if node not in lost]
    left = [[node for node in pipeline if node not in lost] for pipeline in before.pipelines]
    for pipeline in left:
        while dormant and len(pipeline) < minimum:
            pipeline.append(dormant.pop(0))
    while (short := next((place for place, pipeline in enumerate(left) if len(pipeline) < minimum), None)) is not None:
        if sum(max(0, len(pipeline) - minimum) for pipeline in left) >= minimum - len(left[short]):
            _borrow(left, short, minimum)
        else:
            _merge(left, short, minimum)
    return _sorted(left, dormant, None if sizes is None else frozenset(sizes))


def _check(before: Pipelines, lost: Collection[int], minimum: int) -> None:
    if minimum < 1:
        raise ConfigError(f"a minimum of {minimum} nodes is impossible: expected at least 1")
    if unknown := sorted(set(lost) - before.nodes):
        raise ConfigError(f"node {unknown[0]} is in no pipeline, so it cannot be lost")
    if len(alive := before.nodes - set(lost)) < minimum:
        raise InfeasiblePlan(
            f"{len(alive)} node(s) are left, but a pipeline needs {minimum}: expected at least as many"
        )


def _borrow(pipelines: list[list[int]], short: int, minimum: int) -> None:
    while len(pipelines[short]) < minimum:
        lender = max(range(len(pipelines)), key=lambda place: (len(pipelines[place]), place))
        pipelines[short].append(pipelines[lender].pop())


def _merge(pipelines: list[list[int]], short: int, minimum: int) -> None:
    """Merges the first short pipeline with the next one, or else with the first that is not."""
    others = [place for place in range(len(pipelines)) if place != short]
    other = min(others, key=lambda place: (len(pipelines[place]) >= minimum, place))
    pipelines[short] += pipelines[other]
    del pipelines[other]


def _sorted(pipelines: list[list[int]], dormant: list[int], sizes: frozenset[int] | None) -> Pipelines:
    kept = []
    for pipeline in pipelines:
        size = len(pipeline) if sizes is None else max(size for size in sizes if size <= len(pipeline))
        kept.append(tuple(pipeline[:size]))
        dormant += pipeline[size:]
    return Pipelines(
        pipelines=tuple(sorted(kept, key=lambda pipeline: (len(pipeline), pipeline[0]))), dormant=tuple(dormant)
    )
