"""The fast engine: simulates a step in which every free worker starts the most urgent operation that it can."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from holdfast.planning.shop import Shop

__all__ = ["Schedule", "list_schedule", "plain_urgency", "precedence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A timed schedule of a shop.

    Attributes:
        starts: the start of every operation, by its number; those of W are unused where the backward is coupled.
        rows: the operations of every worker, in order.
        sequence: all operations in an order in which each comes after what it needs.
        fused: the visits whose I and W are one B; the start of I is its own, and W starts, without length, at its end.
    """

    starts: list[float]
    rows: list[list[int]]
    sequence: list[int]
    fused: frozenset[int] = frozenset()


def precedence(shop: Shop, ahead: int) -> list[int]:
    """Returns all visits in the order of their micro-batches: by index and then by pipeline.

    Micro-batches that leave their pipeline somewhere meet there those of another one. If they come last, they wait in
    that pipeline's queues up to the end of the step, and all wait for them.

    Args:
        shop: the problem.
        ahead: those that leave their pipeline go before all others whose index is less by no more than this; 0: they do
            not go ahead.
    """
    stages, pipelines = shop.num_stages, shop.grid.pipelines
    numbers = range(shop.num_visits // stages)
    if ahead:
        leaves = [
            any(worker % pipelines != n % pipelines for worker in shop.worker_of[n * stages : (n + 1) * stages])
            for n in numbers
        ]
        order = sorted(numbers, key=lambda n: (n // pipelines - ahead * leaves[n], not leaves[n], n))
    else:
        order = list(numbers)
    return [number * stages + stage for number in order for stage in range(stages)]


def plain_urgency(shop: Shop, ahead: int = 0, *, forward_first: bool = False) -> list[int]:
    """Returns all operations, most urgent first: I before F before W, each by :func:`precedence`.

    Args:
        shop: the problem.
        ahead: see :func:`precedence`.
        forward_first: F before I before W: of two operations that are ready, F has the longer way before it. Memory, or
            a limit, is what keeps F from running far ahead then.

    Source:
        SlipStream's heuristic: backwards for the input as soon as possible, W where nothing else can run.
    """
    visits, forward = shop.num_visits, precedence(shop, ahead)
    back, weight = ([visit + kind * visits for visit in forward] for kind in (1, 2))
    return [*forward, *back, *weight] if forward_first else [*back, *forward, *weight]


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
        patience: a worker stays idle for an I that arrives within this fraction of what it would start instead; if an F
            is the most urgent of all, only instead of W.
        releases: no worker of stage 0, 1, ... starts before this.
        limits: micro-batches that a worker of stage 0, 1, ... may hold between F and I or B; default: memory alone.

    Cost: a few microseconds per operation.
    """
    return _Simulation(shop, urgency, patience, releases, limits).run()


class _Simulation:
    """What is going on at the present moment, in flat lists: one entry per worker, stage or operation.

    The functions that work on them are made once, as closures: they run once per moment or operation, and find their
    lists at the price of local variables, which looking them up in an object would double.
    """

    def __init__(
        self,
        shop: Shop,
        urgency: Sequence[int],
        patience: float,
        releases: Sequence[float] | None,
        limits: Sequence[int] | None,
    ) -> None:
        workers, stages = range(shop.num_workers), range(shop.num_stages)
        self._shop, self._urgency, self._patience = shop, urgency, patience
        self._rank = [0] * len(urgency)
        for position, number in enumerate(urgency):
            self._rank[number] = position
        self._stage_of = stage_of = [worker // shop.grid.pipelines for worker in workers]
        self._release = [releases[stage] if releases else 0 for stage in stage_of]
        self._room = [shop.room[stage] for stage in stage_of]
        slots = limits or [shop.num_visits for _ in stages]
        self._slots = [slots[stage] for stage in stage_of]
        self._free = [True for _ in workers]
        self._forwards: list[list[int]] = [[] for _ in workers]
        self._others: list[list[int]] = [[] for _ in workers]
        self._due: list[deque[float]] = [deque() for _ in workers]
        self._rows: list[list[int]] = [[] for _ in workers]
        self._starts: list[float] = [0] * (3 * shop.num_visits)
        self._sequence: list[int] = []
        self._ends: dict[float, list[int]] = {}
        self._arrivals: dict[float, list[int]] = {}
        self._times: list[float] = []
        self._touched: list[int] = []
        for visit in range(0, shop.num_visits, shop.num_stages):
            self._forwards[shop.worker_of[visit]].append(self._rank[visit])
        for heap in self._forwards:
            heapify(heap)

    def run(self) -> Schedule:
        """Goes from moment to moment: messages arrive, operations end, and workers that this concerns start others."""
        times, ends, arrivals, release = self._times, self._ends, self._arrivals, self._release
        gates = {0, *release}
        times += sorted(gates)
        ends.update({gate: [] for gate in gates})
        deliver = self._deliverer()
        finish, start = self._finisher(deliver), self._starter()
        while times:
            now = heappop(times)
            if now in gates:
                self._touched += [worker for worker, least in enumerate(release) if least <= now]
            for number in arrivals.pop(now, ()):
                deliver(number)
            for number in ends.pop(now, ()):
                finish(now, number)
            start(now)
        return Schedule(starts=self._starts, rows=self._rows, sequence=self._sequence)

    def _deliverer(self) -> Callable[[int], None]:
        """Returns what makes an F or I ready whose message has arrived."""
        at, visits, patience, rank = self._shop.worker_of, self._shop.num_visits, self._patience, self._rank
        forwards, others, due, touched = self._forwards, self._others, self._due, self._touched

        def deliver(number: int) -> None:
            if number < visits:
                worker = at[number]
                heappush(forwards[worker], rank[number])
            else:
                worker = at[number - visits]
                heappush(others[worker], rank[number])
                if patience:
                    due[worker].popleft()
            touched.append(worker)

        return deliver

    def _poster(self, deliver: Callable[[int], None]) -> Callable[[int, float, float], None]:
        """Returns what sends the message that makes an operation ready."""
        ends, arrivals, times = self._ends, self._arrivals, self._times

        def post(number: int, now: float, delay: float) -> None:
            when = now + delay
            if not delay:
                deliver(number)
            elif when in arrivals:
                arrivals[when].append(number)
            else:
                arrivals[when] = [number]
                if when not in ends:
                    heappush(times, when)

        return post

    def _finisher(self, deliver: Callable[[int], None]) -> Callable[[float, int], None]:
        """Returns what an operation's end brings about."""
        shop, post = self._shop, self._poster(deliver)
        at, visits, twice, coupled = shop.worker_of, shop.num_visits, 2 * shop.num_visits, shop.coupled
        last, comm, each = shop.num_stages - 1, shop.grid.comm, shop.grid.each
        gives_w = [stage.gives_weight for stage in each]
        gives_i = [stage.gives_input + (stage.gives_weight if coupled else 0) for stage in each]
        stage_of, rank, others = self._stage_of, self._rank, self._others
        room, slots, free, touched = self._room, self._slots, self._free, self._touched

        def finish(now: float, number: int) -> None:
            if number < visits:
                worker = at[number]
                stage = stage_of[worker]
                if stage == last:
                    heappush(others[worker], rank[number + visits])
                else:
                    post(number + 1, now, comm[stage])
            elif number < twice:
                worker = at[number - visits]
                stage = stage_of[worker]
                room[worker] += gives_i[stage]
                slots[worker] += 1
                if not coupled:
                    heappush(others[worker], rank[number + visits])
                if stage:
                    post(number - 1, now, comm[stage - 1])
            else:
                worker = at[number - twice]
                room[worker] += gives_w[stage_of[worker]]
            free[worker] = True
            touched.append(worker)

        return finish

    def _starter(self) -> Callable[[float], None]:
        """Returns what lets every worker that is touched start the most urgent operation that it can."""
        choose, occupy = self._chooser(), self._occupier()
        free, release, touched = self._free, self._release, self._touched

        def start(now: float) -> None:
            for worker in touched:
                if free[worker] and release[worker] <= now:
                    number = choose(worker, now)
                    if number >= 0:
                        occupy(worker, number, now)
            touched.clear()

        return start

    def _chooser(self) -> Callable[[int, float], int]:
        """Returns what finds the operation that a worker starts; -1 if it waits."""
        visits, twice, patience = self._shop.num_visits, 2 * self._shop.num_visits, self._patience
        stage_of, forwards, others, due = self._stage_of, self._forwards, self._others, self._due
        urgency, room, slots = self._urgency, self._room, self._slots
        takes = [stage.takes for stage in self._shop.grid.each]
        durations, forward_first = self._shop.durations, urgency[0] < visits

        def choose(worker: int, now: float) -> int:
            stage, queue, waiting = stage_of[worker], others[worker], forwards[worker]
            if waiting and room[worker] >= takes[stage] and slots[worker] and (not queue or waiting[0] < queue[0]):
                number = urgency[waiting[0]]
            elif queue:
                number = urgency[queue[0]]
            else:
                return -1
            if patience and due[worker] and not (visits <= number < twice or (forward_first and number < visits)):
                length = durations[number // visits][stage]
                return -1 if due[worker][0] - now < patience * length else number
            return number

        return choose

    def _occupier(self) -> Callable[[int, int, float], None]:
        """Returns what starts an operation on a worker."""
        visits, twice, patience, at = (
            self._shop.num_visits,
            2 * self._shop.num_visits,
            self._patience,
            self._shop.worker_of,
        )
        takes = [stage.takes for stage in self._shop.grid.each]
        durations, comm = self._shop.durations, self._shop.grid.comm
        stage_of, forwards, others, due = self._stage_of, self._forwards, self._others, self._due
        room, slots, free, rows = self._room, self._slots, self._free, self._rows
        starts, sequence, ends, arrivals, times = self._starts, self._sequence, self._ends, self._arrivals, self._times

        def occupy(worker: int, number: int, now: float) -> None:
            stage = stage_of[worker]
            end = now + durations[number // visits][stage]
            free[worker] = False
            starts[number] = now
            rows[worker].append(number)
            sequence.append(number)
            if number < visits:
                heappop(forwards[worker])
                room[worker] -= takes[stage]
                slots[worker] -= 1
            else:
                heappop(others[worker])
                if patience and stage and number < twice:
                    due[at[number - visits - 1]].append(end + comm[stage - 1])
            if end in ends:
                ends[end].append(number)
            else:
                ends[end] = [number]
                if end not in arrivals:
                    heappush(times, end)

        return occupy
