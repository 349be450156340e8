"""For every micro-batch the workers that it visits, and how routes change when workers fail."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise

from holdfast.core.ids import Batch, MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, Placement
from holdfast.errors import ConfigError, InfeasiblePlan, StateUnavailable

__all__ = ["Route", "Routes", "home_routes", "reroute"]


@dataclass(frozen=True, slots=True)
class Route:
    """The workers that one micro-batch visits: forward in this order, backward in the opposite one.

    Attributes:
        microbatch: the micro-batch.
        workers: at least one worker, none twice; their layers, one after another, are all layers of the model.
    """

    microbatch: MicroBatch
    workers: tuple[WorkerId, ...]

    def __post_init__(self) -> None:
        if not self.workers or len(set(self.workers)) < len(self.workers):
            names = " ".join(str(worker) for worker in self.workers) or "nobody"
            raise ConfigError(f"the route of micro-batch {self.microbatch} must visit workers once each, not {names}")


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of all micro-batches of a step, sorted by micro-batch."""

    routes: tuple[Route, ...]

    def __post_init__(self) -> None:
        for earlier, later in pairwise(self.routes):
            if not earlier.microbatch < later.microbatch:
                raise ConfigError(
                    f"routes must list each micro-batch once, sorted: "
                    f"{later.microbatch} comes after {earlier.microbatch}"
                )

    @property
    def microbatches(self) -> tuple[MicroBatch, ...]:
        """The micro-batches, sorted."""
        return tuple(route.microbatch for route in self.routes)

    @property
    def batch(self) -> Batch:
        """The micro-batches of a step by their names; all of them must have routes."""
        return Batch(tuple(Counter(route.microbatch.pipeline for route in self.routes).values()))

    def of(self, microbatch: MicroBatch) -> tuple[WorkerId, ...]:
        """Returns the workers that a micro-batch visits.

        Raises:
            ConfigError: the micro-batch has no route.
        """
        at = bisect_left(self.routes, microbatch, key=_microbatch_of)
        if at == len(self.routes) or self.routes[at].microbatch != microbatch:
            raise ConfigError(f"micro-batch {microbatch} has no route among the {len(self.routes)} of this plan")
        return self.routes[at].workers

    def through(self, worker: WorkerId) -> tuple[MicroBatch, ...]:
        """Returns the micro-batches that visit a worker, sorted."""
        return tuple(route.microbatch for route in self.routes if worker in route.workers)


_StandIns = dict[tuple[MicroBatch, WorkerId], WorkerId]
"""Who runs a micro-batch in the place of a failed worker."""


def home_routes(num_pipelines: int, num_stages: int, microbatches: int) -> Routes:
    """Returns the routes of a healthy regular grid: every micro-batch stays in its own pipeline.

    Args:
        num_pipelines: at least 1.
        num_stages: at least 1.
        microbatches: micro-batches per pipeline, at least 1.

    Raises:
        ConfigError: one of the numbers is below 1.
    """
    for name, value in (("pipelines", num_pipelines), ("stages", num_stages), ("microbatches", microbatches)):
        if value < 1:
            raise ConfigError(f"grid.{name} = {value} is impossible: expected at least 1")
    rows = [tuple(WorkerId(p, s) for s in range(num_stages)) for p in range(num_pipelines)]
    batch = Batch((microbatches,) * num_pipelines)
    return Routes(tuple(Route(each, rows[each.pipeline]) for each in batch.microbatches))


def reroute(placement: Placement, routes: Routes, failed: Iterable[WorkerId]) -> Routes:
    """Returns the routes around failed workers: their micro-batches go to living peers that hold the same layers.

    Each micro-batch of a failed worker goes to the least-loaded living peer, ties in turn, so that the loads of the
    peers of a stage end up differing by at most one. Micro-batches of living workers stay where they are. The result
    depends on the *set* of failed workers only: call it with the home routes and all workers failed so far, never with
    routes that were already re-routed.

    Args:
        placement: who holds what, failed workers included.
        routes: the home routes.
        failed: all workers that are gone.

    Raises:
        StateUnavailable: a layer is left without an owner; only a checkpoint can bring it back.
        InfeasiblePlan: all layers have owners, but no living worker holds exactly the failed worker's range.
        ConfigError: a failed worker is not in the placement.

    Source:
        SlipStream, adaptive pipelining. There the micro-batches of one failed worker go round its peers; here the turn
        goes on over all failed peers of a stage, and each further failed stage starts at another peer, so that
        remainders do not gather in one pipeline.
    """
    gone = frozenset(failed)
    _check_survivable(placement, gone)
    visits: defaultdict[WorkerId, list[MicroBatch]] = defaultdict(list)
    for route in routes.routes:
        for worker in route.workers:
            visits[worker].append(route.microbatch)
    stand_ins: _StandIns = {}
    for turn, (layers, lost) in enumerate(sorted(_failed_by_range(placement, gone).items())):
        peers = [(len(visits[w]), w) for w, held in placement.ranges if held == layers and w not in gone]
        if not peers:
            raise InfeasiblePlan(
                f"worker {lost[0]} is gone and no living worker holds exactly its layers {layers}: "
                "re-routing keeps ranges whole, so layers have to move first"
            )
        turn %= len(peers)
        strays = [(microbatch, worker) for worker in lost for microbatch in visits[worker]]
        stand_ins |= _share(strays, peers[turn:] + peers[:turn])
    return Routes(tuple(_detour(route, gone, stand_ins) for route in routes.routes))


def _check_survivable(placement: Placement, gone: frozenset[WorkerId]) -> None:
    unknown = gone - frozenset(placement.workers)
    if unknown:
        names = ", ".join(str(worker) for worker in sorted(unknown))
        raise ConfigError(f"failed worker(s) {names} are not in the placement of {len(placement.ranges)} workers")
    lost = placement.without(gone).unowned_layers()
    if lost:
        raise StateUnavailable(lost, f"after losing {', '.join(str(worker) for worker in sorted(gone))}")


def _failed_by_range(placement: Placement, gone: frozenset[WorkerId]) -> dict[LayerRange, list[WorkerId]]:
    groups: defaultdict[LayerRange, list[WorkerId]] = defaultdict(list)
    for worker, layers in placement.ranges:
        if worker in gone:
            groups[layers].append(worker)
    return dict(groups)


def _share(visits: list[tuple[MicroBatch, WorkerId]], peers: list[tuple[int, WorkerId]]) -> _StandIns:
    """Gives each visit to the least-loaded peer; equal ones take turns in the order given.

    Args:
        visits: the visits to failed workers that hold the same layers.
        peers: the load and the name of the living workers that hold these layers.
    """
    heap = [(load, turn, peer) for turn, (load, peer) in enumerate(peers)]
    heapify(heap)
    shares: _StandIns = {}
    for visit in sorted(visits, key=lambda visit: (visit[0].index, visit[0].pipeline)):
        load, turn, shares[visit] = heap[0]
        heapreplace(heap, (load + 1, turn, shares[visit]))
    return shares


def _detour(route: Route, gone: frozenset[WorkerId], stand_ins: _StandIns) -> Route:
    if gone.isdisjoint(route.workers):
        return route
    workers = tuple(stand_ins.get((route.microbatch, worker), worker) for worker in route.workers)
    return Route(route.microbatch, workers)


def _microbatch_of(route: Route) -> MicroBatch:
    return route.microbatch
