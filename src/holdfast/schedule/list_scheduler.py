"""The fast engine: simulates a step in which every free worker starts the most urgent operation that it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heapify, heappop, heappush

from holdfast.schedule.problem import Problem

__all__ = ["Schedule", "Turns", "list_schedule", "plain_urgency", "precedence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A timed schedule of a problem.

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


_BEHIND = 1 << 40
"""More moments than any step has."""


class Turns(Enum):
    """1F1B's rule: a free worker starts an F after a B, and a B after an F; the other one where that cannot be.

    Of several B that are ready comes the one that was ready first, then the more urgent one. Of several F:
    """

    READY = auto()
    """The same."""
    GUESTS = auto()
    """Those of other pipelines' micro-batches before all others; then the same."""
    IN_ORDER = auto()
    """The most urgent one; and room is kept for the first that a worker has yet to run."""


def precedence(problem: Problem, ahead: int) -> list[int]:
    """Returns all visits in the order of their micro-batches: by index and then by pipeline.

    Micro-batches that leave their pipeline somewhere meet there those of another one. If they come last, they wait in
    that pipeline's queues up to the end of the step, and all wait for them.

    Args:
        problem: the problem.
        ahead: those that leave their pipeline go before all others whose index is less by no more than this; 0: they do
            not go ahead.
    """
    if not ahead:
        return list(range(problem.num_visits))
    pipeline_of = [worker.pipeline for worker in problem.workers]
    turns = [
        (microbatch.index - ahead * leaves, not leaves, journey.start)
        for microbatch, journey in zip(problem.microbatches, problem.journeys, strict=True)
        for leaves in (any(pipeline_of[problem.worker_of[visit]] != microbatch.pipeline for visit in journey),)
    ]
    order = sorted(range(len(turns)), key=turns.__getitem__)
    return [visit for number in order for visit in problem.journeys[number]]


def plain_urgency(problem: Problem, ahead: int = 0, *, forward_first: bool = False) -> list[int]:
    """Returns all operations, most urgent first: I before F before W, each by :func:`precedence`.

    Args:
        problem: the problem.
        ahead: see :func:`precedence`.
        forward_first: F before I before W: of two operations that are ready, F has the longer way before it. Memory, or
            a limit, is what keeps F from running far ahead then.

    Source:
        SlipStream's heuristic: backwards for the input as soon as possible, W where nothing else can run.
    """
    visits, forward = problem.num_visits, precedence(problem, ahead)
    back, weight = ([visit + kind * visits for visit in forward] for kind in (1, 2))
    return [*forward, *back, *weight] if forward_first else [*back, *forward, *weight]


def list_schedule(
    problem: Problem,
    urgency: Sequence[int],
    *,
    patience: float = 0.0,
    limits: Sequence[int] | None = None,
    turns: Turns | None = None,
) -> Schedule:
    """Returns the schedule in which every free worker starts the most urgent operation that is ready.

    F starts only if memory allows, so the limit is never exceeded. Where every worker comes at the same depth on all
    routes, it cannot deadlock: the last stage can always drain what it holds; hence it takes any forward in the end,
    and so do the stages before it. Elsewhere workers may wait for one another's room for ever: then what they wait with
    is not in the schedule.

    Args:
        problem: the problem.
        urgency: all operations, most urgent first.
        patience: a worker stays idle for an I that arrives within this fraction of what it would start instead; if an F
            is the most urgent of all, only instead of W.
        limits: micro-batches that a worker of group 0, 1, ... may hold between F and I or B; default: memory alone.
        turns: whether F and B take turns, where the backward is coupled.

    Cost: a few microseconds per operation.
    """
    return _Simulation(problem, urgency, patience, limits, turns).run()


class _Simulation:
    """What is going on at the present moment, in flat lists: one entry per worker, part or operation.

    The functions that work on them are made once, as closures: they run once per moment or operation, and find their
    lists at the price of local variables, which looking them up in an object would double.
    """

    def __init__(
        self,
        problem: Problem,
        urgency: Sequence[int],
        patience: float,
        limits: Sequence[int] | None,
        turns: Turns | None,
    ) -> None:
        workers = range(problem.num_workers)
        self._problem, self._urgency, self._patience, self._turns = problem, urgency, patience, turns
        self._ages = [0, 0]  # by how much what becomes ready now comes behind what was ready before: F, and others
        self._rank = [0] * len(urgency)
        for position, number in enumerate(urgency):
            self._rank[number] = position
        self._room = [problem.room[group] for group in problem.group_of]
        self._slots = [limits[group] if limits else problem.num_visits for group in problem.group_of]
        self._free = [True for _ in workers]
        self._forwards: list[list[int]] = [[] for _ in workers]
        self._others: list[list[int]] = [[] for _ in workers]
        self._due: list[list[float]] = [[] for _ in workers]
        self._rows: list[list[int]] = [[] for _ in workers]
        self._starts: list[float] = [0] * (3 * problem.num_visits)
        self._sequence: list[int] = []
        self._ends: dict[float, list[int]] = {}
        self._arrivals: dict[float, list[int]] = {}
        self._times: list[float] = []
        self._touched: list[int] = []
        if turns is Turns.GUESTS:
            for microbatch, journey in zip(problem.microbatches, problem.journeys, strict=True):
                for visit in journey:
                    at_home = problem.workers[problem.worker_of[visit]].pipeline == microbatch.pipeline
                    self._rank[visit] += _BEHIND * len(urgency) * at_home
        for journey in problem.journeys:
            self._forwards[problem.worker_of[journey.start]].append(self._rank[journey.start])
        for heap in self._forwards:
            heapify(heap)

    def run(self) -> Schedule:
        """Goes from moment to moment: messages arrive, operations end, and workers that this concerns start others."""
        times, ends, arrivals = self._times, self._ends, self._arrivals
        deliver = self._deliverer()
        finish, start = self._finisher(deliver), self._starter()
        self._touched += range(self._problem.num_workers)
        start(0)
        last = 0.0
        while times:
            now = heappop(times)
            if self._turns is not None and now != last:
                last = now
                self._ages[0] += len(self._urgency) if self._turns is not Turns.IN_ORDER else 0
                self._ages[1] += len(self._urgency)
            for number in arrivals.pop(now, ()):
                deliver(number)
            for number in ends.pop(now, ()):
                finish(now, number)
            start(now)
        return Schedule(starts=self._starts, rows=self._rows, sequence=self._sequence)

    def _deliverer(self) -> Callable[[int], None]:
        """Returns what makes an F or I ready whose message has arrived."""
        at, visits, patience, rank = self._problem.worker_of, self._problem.num_visits, self._patience, self._rank
        forwards, others, due, touched, ages = self._forwards, self._others, self._due, self._touched, self._ages

        def deliver(number: int) -> None:
            if number < visits:
                worker = at[number]
                heappush(forwards[worker], rank[number] + ages[0])
            else:
                worker = at[number - visits]
                heappush(others[worker], rank[number] + ages[1])
                if patience:
                    heappop(due[worker])
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
        problem, post = self._problem, self._poster(deliver)
        at, visits, twice, coupled = problem.worker_of, problem.num_visits, 2 * problem.num_visits, problem.coupled
        begins, ends, part_of, comm = problem.begins, problem.ends, problem.part_of, problem.comm
        gives_w = [part.gives_weight for part in problem.parts]
        gives_i = [part.gives_input + (part.gives_weight if coupled else 0) for part in problem.parts]
        rank, others, ages = self._rank, self._others, self._ages
        room, slots, free, touched = self._room, self._slots, self._free, self._touched

        def finish(now: float, number: int) -> None:
            if number < visits:
                worker = at[number]
                if ends[number]:
                    heappush(others[worker], rank[number + visits] + ages[1])
                else:
                    post(number + 1, now, comm[part_of[number]])
            elif number < twice:
                visit = number - visits
                worker = at[visit]
                room[worker] += gives_i[part_of[visit]]
                slots[worker] += 1
                if not coupled:
                    heappush(others[worker], rank[number + visits])
                if not begins[visit]:
                    post(number - 1, now, comm[part_of[visit - 1]])
            else:
                visit = number - twice
                worker = at[visit]
                room[worker] += gives_w[part_of[visit]]
            free[worker] = True
            touched.append(worker)

        return finish

    def _starter(self) -> Callable[[float], None]:
        """Returns what lets every worker that is touched start the most urgent operation that it can."""
        choose, occupy = self._chooser(), self._occupier()
        if self._turns is not None:
            choose, occupy = self._turn_taker(self._turns, occupy)
        free, touched = self._free, self._touched

        def start(now: float) -> None:
            for worker in touched:
                if free[worker]:
                    number = choose(worker, now)
                    if number >= 0:
                        occupy(worker, number, now)
            touched.clear()

        return start

    def _chooser(self) -> Callable[[int, float], int]:
        """Returns what finds the operation that a worker starts; -1 if it waits."""
        visits, twice, patience = self._problem.num_visits, 2 * self._problem.num_visits, self._patience
        forwards, others, due = self._forwards, self._others, self._due
        urgency, room, slots, part_of = self._urgency, self._room, self._slots, self._problem.part_of
        takes = [part.takes for part in self._problem.parts]
        durations, forward_first = self._problem.durations, urgency[0] < visits

        def choose(worker: int, now: float) -> int:
            queue, waiting = others[worker], forwards[worker]
            if (
                waiting
                and slots[worker]
                and (not queue or waiting[0] < queue[0])
                and room[worker] >= takes[part_of[urgency[waiting[0]]]]
            ):
                number = urgency[waiting[0]]
            elif queue:
                number = urgency[queue[0]]
            else:
                return -1
            if patience and due[worker] and not (visits <= number < twice or (forward_first and number < visits)):
                length = durations[number // visits][part_of[number % visits]]
                return -1 if due[worker][0] - now < patience * length else number
            return number

        return choose

    def _turn_taker(
        self, turns: Turns, occupy: Callable[[int, int, float], None]
    ) -> tuple[Callable[[int, float], int], Callable[[int, int, float], None]]:
        """Returns what finds the operation that a worker starts, and what starts it, where F and B take turns."""
        problem, urgency, forwards, others = self._problem, self._urgency, self._forwards, self._others
        room, slots, visits, every = self._room, self._slots, self._problem.num_visits, len(self._urgency)
        takes = [problem.parts[part].takes for part in problem.part_of]
        forward_next = [True] * problem.num_workers
        to_run: list[list[int]] = [[] for _ in range(problem.num_workers)]
        most = [0.0] * problem.num_workers
        in_order = turns is Turns.IN_ORDER
        for visit, worker in enumerate(problem.worker_of if in_order else ()):
            to_run[worker].append(visit)
            most[worker] = max(most[worker], takes[visit])

        def choose(worker: int, now: float) -> int:
            queue, waiting = others[worker], forwards[worker]
            if waiting and (forward_next[worker] or not queue):
                visit = urgency[waiting[0] % every]
                spare = in_order and to_run[worker][0] != visit
                if slots[worker] > spare and takes[visit] <= (room[worker] - most[worker] if spare else room[worker]):
                    return visit
            return urgency[queue[0] % every] if queue else -1

        def take(worker: int, number: int, now: float) -> None:
            occupy(worker, number, now)
            forward_next[worker] = number >= visits
            if in_order and number < visits:
                to_run[worker].remove(number)

        return choose, take

    def _occupier(self) -> Callable[[int, int, float], None]:
        """Returns what starts an operation on a worker."""
        visits, twice, patience, at = (
            self._problem.num_visits,
            2 * self._problem.num_visits,
            self._patience,
            self._problem.worker_of,
        )
        takes = [part.takes for part in self._problem.parts]
        durations, comm = self._problem.durations, self._problem.comm
        part_of, begins = self._problem.part_of, self._problem.begins
        forwards, others, due = self._forwards, self._others, self._due
        room, slots, free, rows = self._room, self._slots, self._free, self._rows
        starts, sequence, ends, arrivals, times = self._starts, self._sequence, self._ends, self._arrivals, self._times

        def occupy(worker: int, number: int, now: float) -> None:
            kind, visit = divmod(number, visits)
            part = part_of[visit]
            end = now + durations[kind][part]
            free[worker] = False
            starts[number] = now
            rows[worker].append(number)
            sequence.append(number)
            if number < visits:
                heappop(forwards[worker])
                room[worker] -= takes[part]
                slots[worker] -= 1
            else:
                heappop(others[worker])
                if patience and number < twice and not begins[visit]:
                    heappush(due[at[visit - 1]], end + comm[part_of[visit - 1]])
            if end in ends:
                ends[end].append(number)
            else:
                ends[end] = [number]
                if end not in arrivals:
                    heappush(times, end)

        return occupy
