"""The engine: simulates a step in which every free worker starts the most urgent operation that it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from holdfast.errors import InternalError
from holdfast.schedule.operations import INPUT, Operations

__all__ = ["StartRules", "Schedule", "ranked", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A timed schedule of operations.

    Attributes:
        starts: the start of every operation, by its number; of those that are not run it has no meaning.
        rows: the operations of every worker, in order.
        sequence: all operations in an order in which each comes after what it needs.
        fused: the visits whose I and W are one B; the start of I is its own, and W starts, without length, at its end.
    """

    starts: list[float]
    rows: list[list[int]]
    sequence: list[int]
    fused: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRules:
    """By what a free worker chooses among the operations that are ready.

    Attributes:
        urgency: all operations, most urgent first.
        rank: the place of each in ``urgency``; a multiple of their number may be added, to come behind all others.
        places: how many micro-batches every worker may hold at once.
        patience: a worker stays idle for an operation of kind INPUT that arrives within this fraction of what it would
            start instead.
        patient: instead of which kinds.
        turns: whether a worker starts what opens after what does not, and the other way round; of several that do not
            open the one that was ready first, then the more urgent one.
        first_come: whether that holds for those that open, too.
        keeps_room: whether a worker opens another than the first that it has yet to, by number, only if a place is left
            for that one, and room for the largest.

    ``patience`` is for workers that do not take turns; ``first_come`` and ``keeps_room`` are for those that do.
    """

    urgency: Sequence[int]
    rank: Sequence[int]
    places: Sequence[int]
    patience: float = 0.0
    patient: tuple[bool, bool, bool] = (True, False, True)
    turns: bool = False
    first_come: bool = True
    keeps_room: bool = False


def ranked(urgency: Sequence[int]) -> list[int]:
    """Returns the place of every operation in an order of all of them."""
    found = [0] * len(urgency)
    for place, number in enumerate(urgency):
        found[number] = place
    return found


def simulate(operations: Operations, rules: StartRules) -> Schedule:
    """Returns the schedule in which every free worker starts the most urgent operation that is ready.

    What opens starts only if places and memory allow. Workers may wait for one another's room for ever: then what they
    wait with is not in the schedule.

    Cost: a few microseconds per operation.
    """
    if rules.patience and (rules.turns or operations.more or operations.late):
        raise InternalError("patience is known for messages of `sends` alone, where workers take no turns")
    return _Simulation(operations, rules).run()


class _Simulation:
    """What is going on at the present moment, in flat lists: one entry per worker or operation.

    The functions that work on them are made once, as closures: they run once per moment or operation, and find their
    lists at the price of local variables, which looking them up in an object would double.
    """

    def __init__(self, operations: Operations, rules: StartRules) -> None:
        self._operations, self._rules = operations, rules
        workers = range(len(operations.room))
        self._ages = [0, 0]  # by how much what becomes ready now comes behind what was before: what opens, and others
        self._room, self._places = list(operations.room), list(rules.places)
        self._several = dict(operations.several)
        self._free = [True for _ in workers]
        self._opening: list[list[int]] = [[] for _ in workers]
        self._others: list[list[int]] = [[] for _ in workers]
        self._due: list[list[float]] = [[] for _ in workers]
        self._rows: list[list[int]] = [[] for _ in workers]
        self._starts: list[float] = [0] * len(operations.worker)
        self._sequence: list[int] = []
        self._ends: dict[float, list[int]] = {}
        self._arrivals: dict[float, list[int]] = {at: list(some) for at, some in operations.late.items()}
        self._times: list[float] = sorted(self._arrivals)
        self._touched: list[int] = list(workers)
        for number in operations.roots:
            heaps = self._opening if operations.opens[number] else self._others
            heaps[operations.worker[number]].append(rules.rank[number])
        for heap in (*self._opening, *self._others):
            heapify(heap)

    def run(self) -> Schedule:
        """Goes from moment to moment: messages arrive, operations end, and workers that this concerns start others."""
        times, ends, arrivals, rules = self._times, self._ends, self._arrivals, self._rules
        queue = self._queuer()
        deliver = self._deliverer(queue)
        finish, start = self._finisher(queue, deliver), self._starter()
        start(0)
        last, older = 0.0, len(rules.urgency)
        while times:
            now = heappop(times)
            if rules.turns and now != last:
                last = now
                self._ages[0] += older if rules.first_come else 0
                self._ages[1] += older
            for number in arrivals.pop(now, ()):
                deliver(number)
            for number in ends.pop(now, ()):
                finish(now, number)
            start(now)
        return Schedule(starts=self._starts, rows=self._rows, sequence=self._sequence)

    def _queuer(self) -> Callable[[int], None]:
        """Returns what makes an operation ready, unless it waits for something else, too."""
        at, opens, rank, several = self._operations.worker, self._operations.opens, self._rules.rank, self._several
        opening, others, ages = self._opening, self._others, self._ages

        def queue(number: int) -> None:
            if several and several.get(number, 1) > 1:
                several[number] -= 1
            elif opens[number]:
                heappush(opening[at[number]], rank[number] + ages[0])
            else:
                heappush(others[at[number]], rank[number] + ages[1])

        return queue

    def _deliverer(self, queue: Callable[[int], None]) -> Callable[[int], None]:
        """Returns what takes a message of an operation that has arrived."""
        at, kind, patience = self._operations.worker, self._operations.kind, self._rules.patience
        due, touched = self._due, self._touched

        def deliver(number: int) -> None:
            queue(number)
            worker = at[number]
            if patience and kind[number] == INPUT:
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

    def _finisher(self, queue: Callable[[int], None], deliver: Callable[[int], None]) -> Callable[[float, int], None]:
        """Returns what an operation's end brings about."""
        operations, post = self._operations, self._poster(deliver)
        at, own, sends, lag, more = operations.worker, operations.own, operations.sends, operations.lag, operations.more
        opens, closes, gives = operations.opens, operations.closes, operations.gives
        room, places, free, touched = self._room, self._places, self._free, self._touched

        def finish(now: float, number: int) -> None:
            worker = at[number]
            if not opens[number]:
                room[worker] += gives[number]
                places[worker] += closes[number]
            if own[number] >= 0:
                queue(own[number])
            if sends[number] >= 0:
                post(sends[number], now, lag[number])
            if more:
                for then, delay in more.get(number, ()):
                    post(then, now, delay)
            free[worker] = True
            touched.append(worker)

        return finish

    def _starter(self) -> Callable[[float], None]:
        """Returns what lets every worker that is touched start the most urgent operation that it can."""
        choose, occupy = self._chooser(), self._occupier()
        if self._rules.turns:
            choose, occupy = self._turn_taker(occupy)
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
        patience, patient, urgency = self._rules.patience, self._rules.patient, self._rules.urgency
        opening, others, due, room, places = self._opening, self._others, self._due, self._room, self._places
        takes, kind, length = self._operations.takes, self._operations.kind, self._operations.length

        def choose(worker: int, now: float) -> int:
            queue, waiting = others[worker], opening[worker]
            if (
                waiting
                and places[worker]
                and (not queue or waiting[0] < queue[0])
                and room[worker] >= takes[urgency[waiting[0]]]
            ):
                number = urgency[waiting[0]]
            elif queue:
                number = urgency[queue[0]]
            else:
                return -1
            if patience and due[worker] and patient[kind[number]]:
                return -1 if due[worker][0] - now < patience * length[number] else number
            return number

        return choose

    def _turn_taker(
        self, occupy: Callable[[int, int, float], None]
    ) -> tuple[Callable[[int, float], int], Callable[[int, int, float], None]]:
        """Returns what finds the operation that a worker starts, and what starts it, where they take turns."""
        operations, urgency, opening, others = self._operations, self._rules.urgency, self._opening, self._others
        room, places, takes, opens, every = self._room, self._places, operations.takes, operations.opens, len(urgency)
        open_next = [True for _ in room]
        to_open: list[list[int]] = [[] for _ in room]
        most = [0.0 for _ in room]
        keeps_room = self._rules.keeps_room
        for number, worker in enumerate(operations.worker if keeps_room else ()):
            if opens[number]:
                to_open[worker].append(number)
                most[worker] = max(most[worker], takes[number])

        def choose(worker: int, now: float) -> int:
            queue, waiting = others[worker], opening[worker]
            if waiting and (open_next[worker] or not queue):
                number = urgency[waiting[0] % every]
                spare = keeps_room and to_open[worker][0] != number
                if places[worker] > spare and takes[number] <= room[worker] - (most[worker] if spare else 0):
                    return number
            return urgency[queue[0] % every] if queue else -1

        def take(worker: int, number: int, now: float) -> None:
            occupy(worker, number, now)
            open_next[worker] = not opens[number]
            if keeps_room and opens[number]:
                to_open[worker].remove(number)

        return choose, take

    def _occupier(self) -> Callable[[int, int, float], None]:
        """Returns what starts an operation on a worker."""
        operations, patience = self._operations, self._rules.patience
        at, kind, length, takes = operations.worker, operations.kind, operations.length, operations.takes
        opens, sends, lag = operations.opens, operations.sends, operations.lag
        opening, others, due = self._opening, self._others, self._due
        room, places, free, rows = self._room, self._places, self._free, self._rows
        starts, sequence, ends, arrivals, times = self._starts, self._sequence, self._ends, self._arrivals, self._times

        def occupy(worker: int, number: int, now: float) -> None:
            end = now + length[number]
            free[worker] = False
            starts[number] = now
            rows[worker].append(number)
            sequence.append(number)
            if opens[number]:
                heappop(opening[worker])
                room[worker] -= takes[number]
                places[worker] -= 1
            else:
                heappop(others[worker])
                if patience and kind[number] == INPUT and sends[number] >= 0:
                    heappush(due[at[sends[number]]], end + lag[number])
            if end in ends:
                ends[end].append(number)
            else:
                ends[end] = [number]
                if end not in arrivals:
                    heappush(times, end)

        return occupy
