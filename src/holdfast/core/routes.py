"""For every micro-batch the workers that it visits and what they run of it, and how that changes when workers fail."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, groupby, islice, pairwise, repeat
from math import lcm

from holdfast.core.ids import Batch, Interval, MicroBatch, WorkerId, intervals
from holdfast.core.placement import LayerRange, Placement
from holdfast.errors import ConfigError, StateUnavailable

__all__ = ["Route", "Routes", "Visit", "home_routes", "reroute"]


@dataclass(frozen=True, slots=True, order=True)
class Visit:
    """What one worker runs of a micro-batch.

    Attributes:
        worker: who.
        layers: which layers, a contiguous part of what the worker holds.
    """

    worker: WorkerId
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Route:
    """The visits of one micro-batch: forward in this order, backward in the opposite one.

    Attributes:
        microbatch: the micro-batch.
        visits: at least one, of any worker at most one; their layers, one after another, are all layers of the model.
    """

    microbatch: MicroBatch
    visits: tuple[Visit, ...]

    def __post_init__(self) -> None:
        if not self.visits or len({visit.worker for visit in self.visits}) < len(self.visits):
            names = " ".join(str(visit.worker) for visit in self.visits) or "nobody"
            raise ConfigError(f"the route of micro-batch {self.microbatch} must visit workers once each, not {names}")

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The workers that it visits, in order."""
        return tuple(visit.worker for visit in self.visits)

    def visit(self, worker: WorkerId) -> Visit:
        """Returns the visit to a worker.

        Raises:
            ConfigError: there is none.
        """
        for visit in self.visits:
            if visit.worker == worker:
                return visit
        raise ConfigError(f"micro-batch {self.microbatch} does not visit worker {worker}")


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of all micro-batches of a step, sorted by micro-batch."""

    routes: tuple[Route, ...]
    excerpt_of: tuple[Interval, ...] = field(default=(), compare=False)
    """In an excerpt, all micro-batches of the plan; else empty."""

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
    def counted(self) -> tuple[Interval, ...]:
        """The micro-batches that a step of the plan sums up, also those whose routes an excerpt leaves out."""
        return self.excerpt_of or intervals(route.microbatch.number for route in self.routes)

    @property
    def batch(self) -> Batch:
        """The micro-batches of a step by their names; all of them must have routes."""
        return Batch(tuple(Counter(route.microbatch.pipeline for route in self.routes).values()))

    @property
    def by_index(self) -> tuple[Route, ...]:
        """The routes by index and then by pipeline: the first micro-batch of every pipeline comes before any second."""
        return tuple(sorted(self.routes, key=lambda route: (route.microbatch.index, route.microbatch.pipeline)))

    @property
    def covering(self) -> tuple[Route, ...]:
        """The routes, by index and then by pipeline, that visit a worker which none before them visits."""
        found: list[Route] = []
        covered: set[WorkerId] = set()
        for route in self.by_index:
            if not covered.issuperset(route.workers):
                found.append(route)
                covered.update(route.workers)
        return tuple(found)

    def of(self, microbatch: MicroBatch) -> Route:
        """Returns the route of a micro-batch.

        Raises:
            ConfigError: the micro-batch has no route.
        """
        at = bisect_left(self.routes, microbatch, key=_microbatch_of)
        if at == len(self.routes) or self.routes[at].microbatch != microbatch:
            raise ConfigError(f"micro-batch {microbatch} has no route among the {len(self.routes)} of this plan")
        return self.routes[at]

    def through(self, worker: WorkerId) -> tuple[MicroBatch, ...]:
        """Returns the micro-batches that visit a worker, sorted."""
        return tuple(route.microbatch for route in self.routes if worker in route.workers)


def home_routes(placement: Placement, batch: Batch) -> Routes:
    """Returns the routes of a whole grid: every micro-batch stays in its own pipeline, and runs all that is held there.

    Of a stage of several lanes it visits one: micro-batches take them by turns.

    Args:
        placement: who holds what; the workers of a pipeline, by their stages, hold all layers one after another, and
            those of one stage the same ones.
        batch: the micro-batches of every pipeline.

    Raises:
        ConfigError: there are not as many pipelines as have micro-batches.
    """
    rows: dict[int, list[Visit]] = {}
    for worker, layers in placement.ranges:
        rows.setdefault(worker.pipeline, []).append(Visit(worker, layers))
    if list(rows) != list(range(len(batch.counts))):
        raise ConfigError(f"micro-batches for {len(batch.counts)} pipelines, but workers are in {len(rows)}")
    ways = [_ways(row, count) for row, count in zip(rows.values(), batch.counts, strict=True)]
    return Routes(tuple(Route(mb, ways[mb.pipeline][mb.index % len(ways[mb.pipeline])]) for mb in batch.microbatches))


def _ways(row: list[Visit], count: int) -> list[tuple[Visit, ...]]:
    """Returns what the first, second, ... of so many micro-batches of a pipeline visits, until that begins anew."""
    stages = [list(lanes) for _, lanes in groupby(row, key=lambda visit: visit.layers)]
    turns = min(count, lcm(*map(len, stages)))
    return [tuple(lanes[turn % len(lanes)] for lanes in stages) for turn in range(turns)]


def reroute(placement: Placement, routes: Routes, failed: Iterable[WorkerId]) -> Routes:
    """Returns the routes around failed workers: others that hold the layers, or parts of them, are visited instead.

    Where all living owners of its layers hold just these, each visit to a failed worker goes to the least-loaded of
    them, ties in turn, so that the loads of the peers of a stage end up differing by at most one. Where micro-batches
    visit one worker only, each peer gets as many, but neighbours, whose gradients add up to fewer parts (see
    :mod:`holdfast.core.sum_order`); in pipelines they would come to it too early or too late. Elsewhere owners take
    parts of the layers, one micro-batch after another, each time those whose highest load is lowest. Should one worker
    be needed for two parts of one micro-batch, that is led anew, from each layer on to the owner that reaches furthest.
    Where each holds one range that always ends: a worker that has been visited holds none of the layers that are left.
    Visits to living workers stay where they are otherwise. The result depends on the *set* of failed workers only: call
    it with the home routes and all workers failed so far, never with routes that were already re-routed.

    Args:
        placement: who holds what, failed workers included.
        routes: the home routes.
        failed: all workers that are gone.

    Raises:
        StateUnavailable: a layer is left without an owner; only a checkpoint can bring it back. Or, where workers hold
            several ranges, every way visits one of them twice.
        ConfigError: a failed worker is not in the placement.

    Source:
        SlipStream, adaptive pipelining. There the micro-batches of one failed worker go round its peers; here the turn
        goes on over all failed peers of a stage, and each further failed stage starts at another peer, so that
        remainders do not gather in one pipeline. Unlike pipelines are our own addition.
    """
    gone = frozenset(failed)
    _check_survivable(placement, gone)
    if not gone:
        return routes
    whole = Routes(_to_peers(placement, routes, gone))
    strays = [route for route in whole.by_index if not gone.isdisjoint(route.workers)]
    if not strays:
        return whole
    cover = _Cover(placement.without(gone), whole.routes)
    led = {route.microbatch: cover.lead(route) for route in strays}
    return Routes(tuple(led.get(route.microbatch, route) for route in whole.routes))


def _check_survivable(placement: Placement, gone: frozenset[WorkerId]) -> None:
    unknown = gone - frozenset(placement.workers)
    if unknown:
        names = ", ".join(str(worker) for worker in sorted(unknown))
        raise ConfigError(f"failed worker(s) {names} are not in the placement of {len(placement.ranges)} workers")
    lost = placement.without(gone).unowned_layers()
    if lost:
        raise StateUnavailable(lost, f"after losing {', '.join(str(worker) for worker in sorted(gone))}")


_StandIns = dict[tuple[MicroBatch, WorkerId], WorkerId]
"""Who runs a micro-batch in the place of a failed worker."""


def _to_peers(placement: Placement, routes: Routes, gone: frozenset[WorkerId]) -> tuple[Route, ...]:
    """Returns the routes on which the lost have been replaced wherever all other owners hold the same layers."""
    loads: Counter[WorkerId] = Counter()
    strays: defaultdict[LayerRange, list[tuple[MicroBatch, WorkerId]]] = defaultdict(list)
    for route in routes.routes:
        for visit in route.visits:
            loads[visit.worker] += 1
            if visit.worker in gone:
                strays[visit.layers].append((route.microbatch, visit.worker))
    whole = placement.single_ranges
    share = _share_in_runs if all(len(route.visits) == 1 for route in routes.routes) else _share_by_turns
    stand_ins: _StandIns = {}
    for turn, (layers, visits) in enumerate(sorted(strays.items(), key=lambda each: each[0])):
        owners = [w for w, held in placement.ranges if held.meets(layers) and w not in gone]
        if all(whole.get(w) == layers for w in owners):
            peers = [(loads[w], w) for w in owners]
            turn %= len(peers)
            stand_ins |= share(visits, peers[turn:] + peers[:turn])
    return tuple(_detour(route, gone, stand_ins) for route in routes.routes)


def _share_by_turns(visits: list[tuple[MicroBatch, WorkerId]], peers: list[tuple[int, WorkerId]]) -> _StandIns:
    """Gives each visit to the least-loaded peer; equal ones take turns in the order given.

    Args:
        visits: the visits to failed workers that hold the same layers.
        peers: the load and the name of the living workers that hold these layers.
    """
    by_index = sorted(visits, key=lambda visit: (visit[0].index, visit[0].pipeline))
    return dict(zip(by_index, _least_loaded(peers), strict=False))


def _share_in_runs(visits: list[tuple[MicroBatch, WorkerId]], peers: list[tuple[int, WorkerId]]) -> _StandIns:
    """Gives each peer as many visits as by turns, but a run of neighbours.

    The first run goes to the worker before the first of the failed, whose own visits end where it begins, and so on
    backwards and around, so that the last one goes to the worker behind.
    """
    first = min(worker for _, worker in visits)
    backwards = sorted(peers, key=lambda peer: (peer[1] < first, peer[1]), reverse=True)
    counts = Counter(islice(_least_loaded(backwards), len(visits)))
    runs = chain.from_iterable(repeat(peer, counts[peer]) for _, peer in backwards)
    return dict(zip(sorted(visits), runs, strict=True))


def _least_loaded(peers: list[tuple[int, WorkerId]]) -> Iterator[WorkerId]:
    """Yields, without end, the least-loaded peer, which takes one more; equal ones take turns in the order given."""
    heap = [(load, turn, peer) for turn, (load, peer) in enumerate(peers)]
    heapify(heap)
    while True:
        load, turn, peer = heap[0]
        yield peer
        heapreplace(heap, (load + 1, turn, peer))


def _detour(route: Route, gone: frozenset[WorkerId], stand_ins: _StandIns) -> Route:
    if gone.isdisjoint(route.workers):
        return route
    visits = (
        Visit(stand_ins.get((route.microbatch, visit.worker), visit.worker), visit.layers) for visit in route.visits
    )
    return Route(route.microbatch, tuple(visits))


class _Cover:
    """Leads micro-batches around lost workers whose layers others hold in other parts, one after another."""

    def __init__(self, living: Placement, routes: Iterable[Route]) -> None:
        self._living = frozenset(living.workers)
        self._reach = {(worker, at): part.stop for worker, part in living.ranges for at in part.indices}
        self._several = frozenset(worker for worker, count in Counter(w for w, _ in living.ranges).items() if count > 1)
        self._owners = living.owners_by_layer
        self._end = living.num_layers
        self._starts = sorted({layers.start for _, layers in living.ranges})
        self._loads: Counter[WorkerId] = Counter()
        for route in routes:
            self._count(route.visits)

    def lead(self, route: Route) -> Route:
        """Returns the route with all gaps closed, and counts it into the loads."""
        visits = [visit for visit in route.visits if visit.worker in self._living]
        used = {visit.worker for visit in visits}
        for gap in list(self._gaps(visits)):
            found = self._close(gap, used)
            if found is None:
                self._loads.subtract({visit.worker: len(visit.layers.indices) for visit in visits})
                led = Route(route.microbatch, self._furthest())
                self._count(led.visits)
                return led
            self._count(found)
            visits += found
            used.update(visit.worker for visit in found)
        return Route(route.microbatch, tuple(sorted(visits, key=lambda visit: visit.layers)))

    def _count(self, visits: Iterable[Visit]) -> None:
        for visit in visits:
            self._loads[visit.worker] += len(visit.layers.indices)

    def _gaps(self, visits: list[Visit]) -> Iterator[LayerRange]:
        ends = [0, *(visit.layers.stop for visit in visits)]
        starts = [*(visit.layers.start for visit in visits), self._end]
        return (LayerRange(end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def _close(self, gap: LayerRange, used: set[WorkerId]) -> tuple[Visit, ...] | None:
        """Returns visits over a gap, with the highest load as low as it gets; None if only the used could close it.

        A worker runs all that it holds of the gap, or as far as to where another's layers begin.
        """
        ways: list[tuple[int, int, int, int, tuple[Visit, ...]]] = [(0, 0, 0, gap.start, ())]
        seen: set[int] = set()
        while ways:
            highest, length, total, at, visits = heappop(ways)
            if at == gap.stop:
                return visits
            if at in seen:
                continue
            seen.add(at)
            taken = used.union(visit.worker for visit in visits)
            for worker in self._owners[at]:
                if worker in taken:
                    continue
                end = min(self._reach[worker, at], gap.stop)
                for stop in (end, *(start for start in self._starts if at < start < end)):
                    load = self._loads[worker] + stop - at
                    way = (*visits, Visit(worker, LayerRange(at, stop)))
                    heappush(ways, (max(highest, load), length + 1, total + load, stop, way))
        return None

    def _furthest(self) -> tuple[Visit, ...]:
        """Returns visits from each layer on to the owner that reaches furthest, the least-loaded of them.

        Of those who hold one range no other needs to be tried. One that holds several may be needed at another of them.

        Raises:
            StateUnavailable: the layers from some one on are only on workers that all ways have visited before.

        Cost: linear in layers and owners; exponential at worst in workers that hold several ranges.
        """
        visits: list[Visit] = []
        hopeless: set[tuple[int, frozenset[WorkerId]]] = set()
        at, used, ways = 0, frozenset[WorkerId](), [iter(self._candidates(0, frozenset()))]
        while at < self._end:
            worker = next(ways[-1], None)
            if worker is not None:
                visits.append(Visit(worker, LayerRange(at, self._reach[worker, at])))
            elif visits:
                hopeless.add((at, used))
                ways.pop()
                visits.pop()
            else:
                stuck = max((layer for layer, _ in hopeless), default=0)
                raise StateUnavailable((stuck,), "but workers that every way has visited before")
            at = visits[-1].layers.stop if visits else 0
            used = self._several.intersection(visit.worker for visit in visits)
            if worker is not None:
                ways.append(iter(() if (at, used) in hopeless else self._candidates(at, used)))
        return tuple(visits)

    def _candidates(self, at: int, used: frozenset[WorkerId]) -> list[WorkerId]:
        """The owners of a layer that were not visited, those that reach furthest first; one alone of one range."""
        if at == self._end:
            return []
        owners = sorted(self._owners[at], key=lambda each: (-self._reach[each, at], self._loads[each], each))
        single = [worker for worker in owners if worker not in self._several][:1]
        return [worker for worker in owners if worker in single or worker in self._several - used]


def _microbatch_of(route: Route) -> MicroBatch:
    return route.microbatch
