"""Which layers are replayed by whom, so that everybody holds what a plan says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.plan import Plan
from holdfast.core.replay import Replay

__all__ = ["Logging", "grouped", "logged_boundaries", "plan_replays"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """How a job logs what crosses nodes.

    Attributes:
        nodes: workers that share a node, or a group of nodes: nothing is logged between them. Whoever is in none is on
            one of its own.
        helpers: how many workers replay lost layers besides those that are to hold them.
    """

    nodes: tuple[tuple[WorkerId, ...], ...] = ()
    helpers: int = 0

    @property
    def node_of(self) -> dict[WorkerId, int]:
        """The node of each worker."""
        return {worker: index for index, node in enumerate(self.nodes) for worker in node}


def grouped(
    nodes: tuple[tuple[WorkerId, ...], ...], groups: Iterable[Iterable[int]]
) -> tuple[tuple[WorkerId, ...], ...]:
    """Returns nodes as if those of each group were one: nothing is logged between them, and they are replayed together.

    >>> nodes = ((WorkerId(0, 0),), (WorkerId(0, 1),), (WorkerId(0, 2),))
    >>> [[str(worker) for worker in node] for node in grouped(nodes, [[1, 2]])]
    [['0.0'], ['0.1', '0.2']]
    """
    first = {node: min(group) for group in map(tuple, groups) for node in group}
    members: dict[int, list[WorkerId]] = {}
    for number, workers in enumerate(nodes):
        members.setdefault(first.get(number, number), []).extend(workers)
    return tuple(map(tuple, members.values()))


def plan_replays(
    target: Placement,
    held: Mapping[WorkerId, Iterable[int]],
    microbatches: tuple[MicroBatch, ...],
    logged: Iterable[int],
    *,
    helpers: int = 0,
    ties: tuple[tuple[int, ...], ...] = (),
    start: int,
    stop: int,
) -> tuple[Replay, ...]:
    """Returns the replays after which all hold what they are to hold, in the order in which each worker runs its own.

    Layers beside each other are replayed together; so are those beyond them up to the next boundary at which something
    was logged. Everybody who lacks some of them takes part, and so many helpers. Where layers that share weights are
    all lost, their replays go side by side and come first: nobody else knows the sums.

    Args:
        target: who is to hold what.
        held: what those who live hold now.
        microbatches: of a step, sorted.
        logged: boundaries at which everything that crossed was logged in each of these steps.
        helpers: so many more take part.
        ties: tuples of layers that share weights.
        start: the step that the checkpoint is of.
        stop: the first step that is not replayed.
    """
    here = {worker: frozenset(layers) for worker, layers in held.items()}
    lacking = {
        worker: frozenset(target.held_layers(worker)) - here.get(worker, frozenset()) for worker in target.workers
    }
    ranges = _runs(frozenset().union(*lacking.values()), frozenset(logged), target.num_layers)
    busy = {worker for worker, layers in lacking.items() if layers}
    free = [worker for worker in sorted(here) if worker not in busy]
    replays = []
    for layers in ranges:
        takers = {worker for worker in busy if not lacking[worker].isdisjoint(layers.indices)}
        beside = {worker for worker in free if not here[worker].isdisjoint({layers.start - 1, layers.stop})}
        far = [worker for worker in free if worker not in beside]  # what a neighbour replays would be lost with its own
        helping = (far + sorted(beside))[:helpers] if stop > start else []
        free = [worker for worker in free if worker not in helping]
        replays.append(
            Replay(
                layers=layers,
                workers=tuple(sorted({*takers, *helping})),
                start=start,
                stop=stop,
                microbatches=microbatches,
            )
        )
    return tuple(_side_by_side(replays, ties))


def _side_by_side(replays: Sequence[Replay], ties: tuple[tuple[int, ...], ...]) -> Sequence[Replay]:
    """The same, where sums of ties are made by several of them; these come first.

    Unless somebody takes part in two of these: it runs one after the other, so each would wait for the other.
    """
    shared = defaultdict[LayerRange, list[tuple[tuple[int, ...], tuple[WorkerId, ...]]]](list)
    for tie in ties:
        meeting = [each for each in replays if not set(tie).isdisjoint(each.layers.indices)]
        if len(meeting) > 1 and all(any(layer in each.layers for each in meeting) for layer in tie):
            workers = tuple(sorted({worker for each in meeting for worker in each.workers}))
            for each in meeting:
                shared[each.layers].append((tie, workers))
    taking_part = Counter(worker for each in replays if each.layers in shared for worker in each.workers)
    if max(taking_part.values(), default=0) > 1:
        return replays
    found = [replace(each, shared=tuple(shared[each.layers])) for each in replays]
    return sorted(found, key=lambda each: not each.shared)


def logged_boundaries(plan: Plan, logging: Logging) -> frozenset[int]:
    """Returns where all that crosses a boundary under a plan goes to another node."""
    node_of = logging.node_of
    crossing, within = set[int](), set[int]()
    for route in plan.routes.routes:
        for before, after in zip(route.visits, route.visits[1:], strict=False):
            one, other = (node_of.get(visit.worker, visit.worker) for visit in (before, after))
            (crossing if one != other else within).add(after.layers.start)
    return frozenset(crossing - within)


def _runs(layers: frozenset[int], logged: frozenset[int], num_layers: int) -> list[LayerRange]:
    """Contiguous ranges that hold these layers, and end where something was logged."""
    ends = sorted({0, num_layers, *logged})
    blocks = [LayerRange(a, b) for a, b in pairwise(ends)]
    needed = [block for block in blocks if not layers.isdisjoint(block.indices)]
    joined: list[LayerRange] = []
    for block in needed:
        if joined and joined[-1].stop == block.start:
            joined[-1] = LayerRange(joined[-1].start, block.stop)
        else:
            joined.append(block)
    return joined
