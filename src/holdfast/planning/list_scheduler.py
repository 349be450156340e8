"""The fast engine: simulates a step in which every free worker starts the most urgent operation that it can."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from holdfast.planning.shop import Shop

__all__ = ["Schedule", "list_schedule", "plain_urgency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A timed schedule of a shop.

    Attributes:
        starts: the start of every operation, by its number; those of W are unused where the backward is coupled.
        rows: the operations of every worker, in order.
        sequence: all operations in an order in which each comes after what it needs.
    """

    starts: list[float]
    rows: list[list[int]]
    sequence: list[int]


def plain_urgency(shop: Shop) -> list[int]:
    """Returns all operations, most urgent first: I before F before W, each by micro-batch.

    Source:
        SlipStream's heuristic: backwards for the input as soon as possible, W where nothing else can run.
    """
    visits = shop.num_visits
    return [*range(visits, 2 * visits), *range(visits), *range(2 * visits, 3 * visits)]


def list_schedule(
    shop: Shop,
    urgency: Sequence[int],
    *,
    patience: float = 0.0,
    releases: Sequence[float] | None = None,
    limits: Sequence[int] | None = None,
) -> Schedule:
    """Returns the schedule in which every free worker starts the most urgent operation that is ready.

    F starts only if memory allows, so the limit is never exceeded. It cannot deadlock: the last stage can always drain
    what it holds; hence it takes any forward in the end, and so do the stages before it.

    Args:
        shop: the problem.
        urgency: all operations, most urgent first.
        patience: a worker stays idle for an I that arrives within this fraction of what it would start instead.
        releases: no worker of stage 0, 1, ... starts before this.
        limits: micro-batches that a worker of stage 0, 1, ... may hold between F and I or B; default: memory alone.

    Cost: a few microseconds per operation.
    """
    return _Simulation(shop, urgency, patience, releases, limits).run()


class _Simulation:
    def __init__(
        self,
        shop: Shop,
        urgency: Sequence[int],
        patience: float,
        releases: Sequence[float] | None,
        limits: Sequence[int] | None,
    ) -> None:
        self._shop = shop
        self._urgency = urgency
        self._patience = patience
        self._releases = releases or [0] * shop.num_stages
        self._limits = limits or [shop.num_visits] * shop.num_stages

    def run(self) -> Schedule:
        """One long loop over flat lists on purpose: calls would double its time."""
        shop, urgency, patience = self._shop, self._urgency, self._patience
        visits, num_stages, workers = shop.num_visits, shop.num_stages, shop.num_workers
        pipelines, coupled, at = shop.grid.pipelines, shop.coupled, shop.worker_of
        last, twice = num_stages - 1, 2 * visits
        takes_f, takes_i, takes_w = shop.durations
        comm = shop.grid.comm
        each = shop.grid.each
        takes = [stage.takes for stage in each]
        gives_i = [stage.gives_input + (stage.gives_weight if coupled else 0) for stage in each]
        gives_w = [stage.gives_weight for stage in each]
        rank = [0] * len(urgency)
        for position, number in enumerate(urgency):
            rank[number] = position
        stage_of = [worker // pipelines for worker in range(workers)]
        room = [shop.room[stage] for stage in stage_of]
        slots = [self._limits[stage] for stage in stage_of]
        free = [True] * workers
        forwards: list[list[int]] = [[] for _ in range(workers)]
        others: list[list[int]] = [[] for _ in range(workers)]
        due: list[deque[float]] = [deque() for _ in range(workers)]
        rows: list[list[int]] = [[] for _ in range(workers)]
        starts: list[float] = [0] * (3 * visits)
        sequence: list[int] = []
        ends: dict[float, list[int]] = {}
        arrivals: dict[float, list[int]] = {}
        times: list[float] = []
        for visit in range(0, visits, num_stages):
            forwards[at[visit]].append(rank[visit])
        for heap in forwards:
            heapify(heap)
        gates = {0, *self._releases}
        times += sorted(gates)
        for gate in gates:
            ends[gate] = []
        releases = [self._releases[stage] for stage in stage_of]
        everybody = range(workers)
        while times:
            now = heappop(times)
            touched = [] if now not in gates else [w for w in everybody if releases[w] <= now]
            for number in arrivals.pop(now, ()):
                worker = at[number % visits]
                if number < visits:
                    heappush(forwards[worker], rank[number])
                else:
                    heappush(others[worker], rank[number])
                    if patience:
                        due[worker].popleft()
                touched.append(worker)
            for number in ends.pop(now, ()):
                if number < visits:
                    worker = at[number]
                    stage = stage_of[worker]
                    if stage == last:
                        heappush(others[worker], rank[number + visits])
                    elif comm[stage]:
                        when = now + comm[stage]
                        if when in arrivals:
                            arrivals[when].append(number + 1)
                        else:
                            arrivals[when] = [number + 1]
                            if when not in ends:
                                heappush(times, when)
                    else:
                        peer = at[number + 1]
                        heappush(forwards[peer], rank[number + 1])
                        touched.append(peer)
                elif number < twice:
                    visit = number - visits
                    worker = at[visit]
                    stage = stage_of[worker]
                    room[worker] += gives_i[stage]
                    slots[worker] += 1
                    if not coupled:
                        heappush(others[worker], rank[number + visits])
                    if stage == 0:
                        pass
                    elif comm[stage - 1]:
                        when = now + comm[stage - 1]
                        if when in arrivals:
                            arrivals[when].append(number - 1)
                        else:
                            arrivals[when] = [number - 1]
                            if when not in ends:
                                heappush(times, when)
                    else:
                        peer = at[visit - 1]
                        heappush(others[peer], rank[number - 1])
                        if patience:
                            due[peer].popleft()
                        touched.append(peer)
                else:
                    worker = at[number - twice]
                    room[worker] += gives_w[stage_of[worker]]
                free[worker] = True
                touched.append(worker)
            for worker in touched:
                if not free[worker] or releases[worker] > now:
                    continue
                stage = stage_of[worker]
                queue = others[worker]
                waiting = forwards[worker]
                if waiting and room[worker] >= takes[stage] and slots[worker] and (not queue or waiting[0] < queue[0]):
                    number = urgency[waiting[0]]
                    length = takes_f[stage]
                elif queue:
                    number = urgency[queue[0]]
                    length = takes_i[stage] if number < twice else takes_w[stage]
                else:
                    continue
                if patience and due[worker] and not visits <= number < twice:  # noqa: SIM102  as fast as it gets
                    if due[worker][0] - now < patience * length:
                        continue
                free[worker] = False
                starts[number] = now
                rows[worker].append(number)
                sequence.append(number)
                end = now + length
                if number < visits:
                    heappop(waiting)
                    room[worker] -= takes[stage]
                    slots[worker] -= 1
                else:
                    heappop(queue)
                    if patience and stage and number < twice:
                        due[at[number - visits - 1]].append(end + comm[stage - 1])
                if end in ends:
                    ends[end].append(number)
                else:
                    ends[end] = [number]
                    if end not in arrivals:
                        heappush(times, end)
        return Schedule(starts=starts, rows=rows, sequence=sequence)
