"""The engine for large grids: the list scheduler's rules, for all workers at once, one moment after the other.

Whoever is free starts I before F before W, or F before I before W, each in the order of arrival. A moment costs a
fraction of a millisecond, however many workers act in it; so it is fast wherever many operations start together, as in
large grids whose times are multiples of one unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np
import numpy.typing as npt

from holdfast.schedule.engine import Schedule
from holdfast.schedule.list_scheduler import precedence
from holdfast.schedule.problem import Problem

__all__ = ["array_schedule", "suits"]

_MANY, _PER_MOMENT = 20_000, 60
"""From so many operations, so many per moment, it is faster than the list scheduler."""

_Times = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

_FORWARD, _BACK, _WEIGHT = 0, 1, 2


def suits(problem: Problem) -> bool:
    """Whether a regular grid's operations are many and start together, so that this engine is the faster one."""
    if not problem.regular or problem.num_operations < _MANY:
        return False
    times = [Fraction(str(time)) for row in (*problem.durations, problem.comm) for time in row]
    unit = Fraction(gcd(*(time.numerator for time in times)), lcm(*(time.denominator for time in times)))
    load = max(Counter(problem.worker_of).values())
    span = load * max(part.total for part in problem.parts) + problem.parts[0].total * len(problem.parts)
    return unit > 0 and problem.num_operations * float(unit) >= _PER_MOMENT * span


def array_schedule(
    problem: Problem,
    *,
    patience: float = 0.0,
    limits: Sequence[int] | None = None,
    eager: bool = False,
    ahead: int = 0,
    forward_first: bool = False,
) -> Schedule:
    """Returns the schedule in which every free worker starts the first I that has arrived, else F, else W.

    F starts only if memory allows. It cannot deadlock, for the same reason as the list scheduler.

    Args:
        problem: the problem.
        patience: a worker stays idle for an I that arrives within this fraction of what it would start instead.
        limits: micro-batches that a worker of stage 0, 1, ... may hold between F and I or B; default: memory alone.
        eager: the limits hold only from a worker's first I or B on.
        ahead: of what is there at the same moment, the first in :func:`precedence` goes first.
        forward_first: F that memory and limits allow comes before I.

    Cost: some 0.2 ms per moment at which something starts or ends, and 0.1 µs per operation.
    """
    limits = limits or [problem.num_visits] * problem.num_groups
    return _ArraySimulation(problem, patience, limits, eager, precedence(problem, ahead), forward_first).run()


class _ArraySimulation:
    """All workers as arrays: column w is worker w, row k is kind k (F, I or B, W)."""

    def __init__(
        self,
        problem: Problem,
        patience: float,
        limits: Sequence[int],
        eager: bool,
        order: Sequence[int],
        forward_first: bool,
    ) -> None:
        workers, each = problem.num_workers, problem.parts
        self._problem, self._patience = problem, patience
        self._at: _Whole = np.asarray(problem.worker_of, dtype=np.int64)
        self._stage: _Whole = np.asarray(problem.group_of, dtype=np.int64)
        self._length: _Times = np.asarray(problem.durations, dtype=np.float64)[:, self._stage]
        comm = np.asarray(problem.comm, dtype=np.float64)
        self._delay: _Times = np.stack([comm[self._stage], np.roll(comm, 1)[self._stage], np.zeros(workers)])
        given = [(-e.takes, e.gives_input + (e.gives_weight if problem.coupled else 0), e.gives_weight) for e in each]
        self._given: _Times = np.asarray(given, dtype=np.float64)[self._stage].T
        self._room: _Times = np.asarray(problem.room, dtype=np.float64)[self._stage]
        self._slots: _Whole = np.asarray(limits, dtype=np.int64)[self._stage]
        self._filling: _Flags = np.full(workers, eager)
        self._rank: _Whole = np.argsort(order)
        self._first, self._second = (_FORWARD, _BACK) if forward_first else (_BACK, _FORWARD)
        self._queues()
        self._free: _Flags = self._tail[_FORWARD] >= 0
        self._ends: _Times = np.full(workers, np.inf)
        self._kind: _Whole = np.zeros(workers, dtype=np.int64)
        self._starts: _Times = np.zeros(3 * problem.num_visits)
        self._mail: dict[float, list[_Whole]] = {}
        self._times: list[float] = []
        self._log: list[_Whole] = []

    def _queues(self) -> None:
        """First in, first out; the queue of W is that of I, as W becomes ready in the order in which I ran."""
        workers, visits = self._problem.num_workers, self._problem.num_visits
        loads = np.bincount(self._at, minlength=workers)
        first = np.cumsum(loads) - loads
        self._queue: _Whole = np.zeros((2, visits), dtype=np.int64)
        self._due: _Times = np.full(visits + 1, np.inf)
        self._due_tail: _Whole = first.copy()
        self._head: _Whole = np.stack([first] * 3)
        self._tail: _Whole = np.stack([first] * 3)
        self._deliver(np.arange(0, visits, self._problem.num_groups))

    def run(self) -> Schedule:
        now = 0.0
        while now < np.inf:
            self._finish(now)
            for numbers in self._mail.pop(now, ()):
                self._deliver(numbers)
            self._start(now)
            while self._times and self._times[0] not in self._mail:
                heappop(self._times)
            now = min(float(self._ends.min()), self._times[0] if self._times else np.inf)
        return self._schedule()

    def _finish(self, now: float) -> None:
        done = np.flatnonzero(self._ends <= now)
        kind = self._kind[done]
        self._ends[done] = np.inf
        self._free[done] = True
        self._room[done] += np.where(kind == _FORWARD, 0, self._given[kind, done])
        back = done[kind == _BACK]
        self._slots[back] += 1
        self._filling[back] = False
        if not self._problem.coupled:
            self._tail[_WEIGHT, back] += 1

    def _deliver(self, numbers: _Whole) -> None:
        """Puts visits of F and I into the queues of their workers; several may come to one worker at a time."""
        kinds, visits = np.divmod(numbers, self._problem.num_visits)
        workers = self._at[visits]
        place = kinds * self._problem.num_workers + workers
        order = np.lexsort((self._rank[visits], place))
        place = place[order]
        new = np.flatnonzero(np.diff(place, prepend=-1))
        nth = np.arange(len(place)) - np.repeat(new, np.diff(new, append=len(place)))
        tail = self._tail.reshape(-1)
        self._queue[kinds[order], tail[place] + nth] = visits[order]
        tail += np.bincount(place, minlength=len(tail))

    def _start(self, now: float) -> None:
        worker = np.flatnonzero(self._free)
        ready = self._head[:, worker] < self._tail[:, worker]
        ready[_FORWARD] &= (self._room[worker] >= -self._given[_FORWARD, worker]) & (
            self._filling[worker] | (self._slots[worker] > 0)
        )
        first, second = self._first, self._second
        kind = np.where(ready[first], first, np.where(ready[second], second, _WEIGHT))
        starts = ready.any(axis=0)
        if self._patience:
            soon = self._next_back(worker) - now < self._patience * self._length[kind, worker]
            starts &= (kind == first) | ready[_BACK] | ~soon  # nobody waits for an I that would not come first
        worker, kind = worker[starts], kind[starts]
        if not len(worker):
            return
        place = self._head[kind, worker]
        visit = self._queue[np.minimum(kind, _BACK), place]
        self._head[kind, worker] += 1
        number = visit + kind * self._problem.num_visits
        end = now + self._length[kind, worker]
        self._starts[number], self._ends[worker], self._kind[worker] = now, end, kind
        self._free[worker] = False
        forward = worker[kind == _FORWARD]
        self._room[forward] += self._given[_FORWARD, forward]
        self._slots[forward] -= 1
        self._log.append(number)
        self._send(worker, kind, number, end)

    def _next_back(self, worker: _Whole) -> _Times:
        """Returns when the next I arrives at workers; infinite if none is under way."""
        place = self._tail[_BACK, worker]
        return np.where(place < self._due_tail[worker], self._due[place], np.inf)

    def _send(self, worker: _Whole, kind: _Whole, number: _Whole, end: _Times) -> None:
        """Posts what the operations that start now make ready elsewhere: the next F, the first I, the next I."""
        stage = self._stage[worker]
        turn = (kind == _FORWARD) & (stage == self._problem.num_groups - 1)
        step = np.where(kind == _FORWARD, np.where(turn, self._problem.num_visits, 1), -1)
        sent = (kind == _FORWARD) | ((kind == _BACK) & (stage > 0))
        target, when = (number + step)[sent], (end + self._delay[kind, worker])[sent]
        for time in np.unique(when).tolist():
            if time not in self._mail:
                self._mail[time] = []
                heappush(self._times, time)
            self._mail[time].append(target[when == time])
        if self._patience:
            back = (kind == _BACK)[sent]
            self._announce(self._at[target[back] - self._problem.num_visits], when[back])

    def _announce(self, workers: _Whole, when: _Times) -> None:
        order = np.argsort(workers, kind="stable")
        workers, when = workers[order], when[order]
        new = np.flatnonzero(np.diff(workers, prepend=-1))
        nth = np.arange(len(workers)) - np.repeat(new, np.diff(new, append=len(workers)))
        self._due[self._due_tail[workers] + nth] = when
        self._due_tail += np.bincount(workers, minlength=len(self._due_tail))

    def _schedule(self) -> Schedule:
        sequence = np.concatenate(self._log)
        owner = self._at[sequence % self._problem.num_visits]
        rows = sequence[np.argsort(owner, kind="stable")]
        cuts = np.cumsum(np.bincount(owner, minlength=self._problem.num_workers))[:-1]
        times = [*self._problem.comm, *(t for row in self._problem.durations for t in row)]
        starts = self._starts.astype(np.int64) if all(isinstance(t, int) for t in times) else self._starts
        return Schedule(
            starts=starts.tolist(), rows=[row.tolist() for row in np.split(rows, cuts)], sequence=sequence.tolist()
        )
