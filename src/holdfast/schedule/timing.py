"""Times, measures and proves schedules in flat form; arrays, so that a million operations take a second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from holdfast.core.plan import Plan
from holdfast.core.schedule import Orders
from holdfast.core.timeline import Span, Timeline, timeline
from holdfast.errors import InvalidSchedule
from holdfast.schedule.engine import Schedule
from holdfast.schedule.problem import Problem, rows_of

__all__ = [
    "Measure",
    "as_late_as_possible",
    "as_soon_as_possible",
    "check",
    "from_orders",
    "fuse",
    "measure",
    "rows_to_run",
    "sequence_of",
    "settle",
    "split_up",
    "group_windows",
    "to_timeline",
]

_Array = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]

_MANY, _TOGETHER = 20_000, 50
"""So many operations, and so many per moment, are moved at once; fewer one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What a schedule comes to, in the units of the costs; as in :class:`holdfast.core.timeline.Timeline`."""

    period: float
    makespan: float

    def worth(self, *, staggered: bool) -> float:
        """What is to be short: the period if the optimizer is staggered, else the makespan."""
        return self.period if staggered else self.makespan


def measure(problem: Problem, schedule: Schedule, *, staggered: bool, behind: Sequence[float] = ()) -> Measure:
    """Returns the period and the makespan of a schedule, exactly as its times give them.

    Args:
        problem: the problem.
        schedule: a schedule of it.
        staggered: whether each group updates as soon as its own workers are done.
        behind: how much longer each group takes than to its last operation; empty: none does.
    """
    first, last = group_windows(problem, schedule)
    last = [end + more for end, more in zip(last, behind, strict=True)] if behind else last
    makespan = max(last) - min(first)
    if not staggered:
        return Measure(period=makespan + max(problem.optimizer), makespan=makespan)
    period = max(
        max(last[group] for group in window.waits_for) - first[window.group] + window.optimizer
        for window in problem.windows
    )
    return Measure(period=period, makespan=makespan)


def group_windows(problem: Problem, schedule: Schedule) -> tuple[list[float], list[float]]:
    """Returns the first start and the last end on group 0, 1, ...; infinite and less than nothing where none runs."""
    first, last = [inf] * problem.num_groups, [-inf] * problem.num_groups
    for group, row in zip(problem.group_of, schedule.rows, strict=True):
        if row:
            first[group] = min(first[group], schedule.starts[row[0]])
            last[group] = max(last[group], schedule.starts[row[-1]] + _length(problem, schedule.fused, row[-1]))
    return first, last


def _length(problem: Problem, fused: frozenset[int], number: int) -> float:
    """Returns the time that an operation takes."""
    kind, visit = divmod(number, problem.num_visits)
    part = problem.part_of[visit]
    if visit not in fused or not kind:
        return problem.durations[kind][part]
    return problem.parts[part].backward if kind == 1 else 0


def _lengths(problem: Problem, fused: frozenset[int]) -> list[float]:
    """Returns the time that every operation takes."""
    found = [row[part] for row in problem.durations for part in problem.part_of]
    for visit in fused:
        for number in (visit + problem.num_visits, visit + 2 * problem.num_visits):
            found[number] = _length(problem, fused, number)
    return found


def as_soon_as_possible(problem: Problem, schedule: Schedule, free: Sequence[float] | None = None) -> Schedule:
    """Returns the schedule with the same orders and every start as early as it can be.

    Args:
        problem: the problem.
        schedule: any schedule of it.
        free: from when on every worker is; default: from 0.
    """
    visits, at, comm, part_of = problem.num_visits, problem.worker_of, problem.comm, problem.part_of
    begins, ends, lengths = problem.begins, problem.ends, _lengths(problem, schedule.fused)
    ready: list[float] = [0] * problem.num_workers if free is None else list(free)
    starts: list[float] = [0] * (3 * visits)
    for number in schedule.sequence:
        kind, visit = divmod(number, visits)
        worker = at[visit]
        start = ready[worker]
        if kind == 0 and not begins[visit]:
            start = max(start, starts[number - 1] + lengths[number - 1] + comm[part_of[visit - 1]])
        elif kind == 1 and not ends[visit]:
            start = max(start, starts[number + 1] + lengths[number + 1] + comm[part_of[visit]])
        starts[number] = start
        ready[worker] = start + lengths[number]
    return replace(schedule, starts=starts)


def as_late_as_possible(problem: Problem, schedule: Schedule, deadlines: Sequence[float]) -> Schedule:
    """Returns the schedule with the same orders and every start as late as it can be.

    Args:
        problem: the problem.
        schedule: any schedule of it.
        deadlines: every worker of group 0, 1, ... ends by this.
    """
    moments = _moments(problem, schedule)
    if moments is not None:
        return _late_at_once(problem, schedule, moments, deadlines)
    visits, at, comm, part_of = problem.num_visits, problem.worker_of, problem.comm, problem.part_of
    begins, ends, lengths = problem.begins, problem.ends, _lengths(problem, schedule.fused)
    left, fused = [deadlines[group] for group in problem.group_of], schedule.fused
    starts: list[float] = [0] * (3 * visits)
    for number in reversed(schedule.sequence):
        kind, visit = divmod(number, visits)
        worker = at[visit]
        end = left[worker]
        if kind == 0 and not ends[visit]:
            end = min(end, starts[number + 1] - comm[part_of[visit]])
        elif kind == 1 and not begins[visit]:
            end = min(end, starts[number - 1] - comm[part_of[visit - 1]])
        starts[number] = left[worker] = end - lengths[number]
        if kind == 1 and visit in fused:
            starts[number + visits] = end  # W is a part of this B, and ends with it
    return replace(schedule, starts=starts)


def _moments(problem: Problem, schedule: Schedule) -> list[_Whole] | None:
    """Returns the operations that start together, first moment first; None if few do, or if some take no time."""
    if len(schedule.sequence) < _MANY or min(map(min, problem.durations)) <= 0 or schedule.fused:
        return None
    order = np.asarray(schedule.sequence, dtype=np.int64)
    starts = np.asarray(schedule.starts, dtype=np.float64)[order]
    sort = np.argsort(starts, kind="stable")
    cuts = np.flatnonzero(np.diff(starts[sort])) + 1
    return np.split(order[sort], cuts) if len(cuts) * _TOGETHER < len(order) else None


def _late_at_once(problem: Problem, schedule: Schedule, moments: list[_Whole], deadlines: Sequence[float]) -> Schedule:
    """As late as possible, for all operations of a moment at once: none of them waits for another of them."""
    visits = problem.num_visits
    worker = np.tile(np.asarray(problem.worker_of, dtype=np.int64), 3)
    length = np.asarray(problem.durations, dtype=np.float64)[:, problem.part_array].reshape(-1)
    waits, delay = _who_waits(problem)
    left = np.asarray(deadlines, dtype=np.float64)[np.asarray(problem.group_of)]
    starts = np.full(3 * visits + 1, np.inf)
    for numbers in reversed(moments):
        at = worker[numbers]
        end = np.minimum(left[at], starts[waits[numbers]] - delay[numbers])
        starts[numbers] = left[at] = end - length[numbers]
    starts[np.isinf(starts)] = 0
    whole = isinstance(schedule.starts[0], int) and bool(np.all(starts[:-1] == np.rint(starts[:-1])))
    found = starts[:-1].astype(np.int64) if whole else starts[:-1]
    return replace(schedule, starts=found.tolist())


def _who_waits(problem: Problem) -> tuple[_Whole, _Array]:
    """Returns who waits for the message of every operation (a number after the last if nobody), and its time."""
    visits, number = problem.num_visits, np.arange(problem.num_visits)
    delay = np.asarray(problem.comm, dtype=np.float64)[problem.part_array]
    nobody = np.full(visits, 3 * visits)
    waits = [np.where(problem.ends, nobody, number + 1), np.where(problem.begins, nobody, number + visits - 1), nobody]
    return np.concatenate(waits), np.concatenate([delay, np.roll(delay, 1), np.zeros(visits)])


def settle(problem: Problem, schedule: Schedule, *, staggered: bool, rounds: int = 8, early: bool = False) -> Schedule:
    """Returns the schedule with the same orders and the times that make its period short.

    With a synchronous optimizer, that is as soon as possible. Staggered, groups may also begin later: the latest starts
    that leave the ends where they are, repeated while groups with slack may end later, and the best of all rounds.

    Args:
        problem: the problem.
        schedule: any schedule of it.
        staggered: whether the period counts with each layer's own optimizer.
        rounds: at most so many.
        early: whether every start is as early as it can be already.
    """
    best = schedule = schedule if early else as_soon_as_possible(problem, schedule)
    if not staggered:
        return best
    deadlines = group_windows(problem, schedule)[1]
    for _ in range(rounds):
        schedule = as_late_as_possible(problem, schedule, deadlines)
        first, _ = group_windows(problem, schedule)
        period = measure(problem, schedule, staggered=True).period
        if period < measure(problem, best, staggered=True).period:
            best = schedule
        allowed = [inf] * problem.num_groups
        for window in problem.windows:
            latest = first[window.group] + period - window.optimizer
            for group in window.waits_for:
                allowed[group] = min(allowed[group], latest)
        wider = [max(both) for both in zip(deadlines, allowed, strict=True)]
        if wider == deadlines:
            break
        deadlines = wider
    return _from_zero(best)


def _from_zero(schedule: Schedule) -> Schedule:
    earliest = min(schedule.starts[row[0]] for row in schedule.rows if row)
    starts = [start - earliest for start in schedule.starts] if earliest else schedule.starts
    return replace(schedule, starts=starts)


def check(problem: Problem, schedule: Schedule) -> None:
    """Returns if a schedule is right.

    Rules: every operation runs once, on the worker of its visit; the I and the W of a B follow one another; no worker
    runs two at a time; every operation starts after what it needs has ended and arrived; the memory held never exceeds
    the limit. Times that keep all this are a proof that the orders do not deadlock.

    Raises:
        InvalidSchedule: a rule is broken.
    """
    rows = [np.asarray(row, dtype=np.int64) for row in schedule.rows]
    starts = np.asarray(schedule.starts, dtype=np.float64)
    _check_rows(problem, rows)
    _check_fused(problem, schedule)
    ends = starts + np.asarray(_lengths(problem, schedule.fused), dtype=np.float64)
    slack = 1e-9 * max(1.0, float(np.max(ends)))
    _check_needs(problem, starts, ends, slack)
    for worker, row in enumerate(rows):
        if len(row) and np.any(starts[row[1:]] < ends[row[:-1]] - slack):
            raise InvalidSchedule("two operations run at the same time", worker=_name(problem, worker))
        _check_memory(problem, worker, row)


def _check_rows(problem: Problem, rows: Sequence[_Whole]) -> None:
    everything = np.concatenate(rows)
    expected = np.arange(problem.num_visits * (2 if problem.coupled else 3))
    if not np.array_equal(np.sort(everything), expected):
        raise InvalidSchedule("not every operation runs exactly once")
    owner = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    astray = np.nonzero(np.asarray(problem.worker_of)[everything % problem.num_visits] != owner)[0]
    if len(astray):
        raise InvalidSchedule("a micro-batch does not visit this worker", worker=_name(problem, int(owner[astray[0]])))


def _check_fused(problem: Problem, schedule: Schedule) -> None:
    """I and W of a B follow one another; the row of each fused visit is searched in one pass."""
    visits, left = problem.num_visits, set(schedule.fused)
    for row in schedule.rows if left else ():
        left -= {before - visits for before, after in pairwise(row) if visits <= before == after - visits}
    if left:
        raise InvalidSchedule(
            "I and W of one B do not follow one another", worker=_name(problem, problem.worker_of[min(left)])
        )


def _check_needs(problem: Problem, starts: _Array, ends: _Array, slack: float) -> None:
    start, end = starts.reshape(3, -1), ends.reshape(3, -1)
    sends = np.flatnonzero(np.logical_not(problem.ends))
    comm = np.asarray(problem.comm, dtype=np.float64)[problem.part_array[sends]]
    late = {
        "F starts before its input is there": start[0, sends + 1] < end[0, sends] + comm - slack,
        "a backward starts before its gradient is there": start[1, sends] < end[1, sends + 1] + comm - slack,
        "a backward starts before its own forward has ended": start[1] < end[0] - slack,
    }
    if not problem.coupled:
        late["W starts before its I has ended"] = start[2] < end[1] - slack
    for rule, places in late.items():
        if np.any(places):
            raise InvalidSchedule(rule)


def _check_memory(problem: Problem, worker: int, row: _Whole) -> None:
    held, room = _held(problem, row), problem.room[problem.group_of[worker]]
    if len(held) and float(np.max(held)) > room * (1 + 1e-9):
        raise InvalidSchedule(
            f"holds {np.max(held):g} of memory for micro-batches, more than the {room:g} that it has",
            worker=_name(problem, worker),
        )


def _held(problem: Problem, row: _Whole) -> _Array:
    """The memory held during every operation of a row."""
    kinds, visits = np.divmod(row, problem.num_visits)
    parts = problem.part_array[visits]
    none = [0.0] * len(problem.parts)
    given = [part.gives_input + (part.gives_weight if problem.coupled else 0) for part in problem.parts]
    taken = np.asarray([[part.takes for part in problem.parts], none, none])[kinds, parts]
    returned = np.asarray([none, given, [part.gives_weight for part in problem.parts]])[kinds, parts]
    return np.asarray(np.cumsum(taken) - np.cumsum(returned) + returned)


def _name(problem: Problem, worker: int) -> str:
    return str(problem.workers[worker])


def fuse(problem: Problem, schedule: Schedule, *, staggered: bool) -> Schedule:
    """Returns the schedule with I and W as one B wherever nothing is gained by their split; never a longer one.

    That is where W follows its I at once and whoever waits for the gradient does not start before B has ended, and
    where I takes as long apart from W as B. If B is shorter than both, the times are settled anew.

    Args:
        problem: the problem.
        schedule: a schedule of it; one that has B already stays as it is.
        staggered: whether the period counts, else the makespan.
    """
    if problem.coupled or schedule.fused:
        return schedule
    made = _fused(problem, schedule, staggered=staggered)
    if not staggered or not any(part.split for part in problem.parts):
        return made
    early = _fused(problem, as_soon_as_possible(problem, schedule), staggered=True)  # more of it may fit there
    return min(made, early, key=lambda each: measure(problem, each, staggered=True).worth(staggered=True))


def _fused(problem: Problem, schedule: Schedule, *, staggered: bool) -> Schedule:
    visits, starts, fused = problem.num_visits, list(schedule.starts), frozenset(_fusible(problem, schedule))
    for visit in fused:
        starts[visit + 2 * visits] = starts[visit + visits] + problem.parts[problem.part_of[visit]].backward
    found = replace(schedule, starts=starts, fused=fused)
    if not fused or not any(part.split for part in problem.parts):
        return found
    settled = settle(problem, found, staggered=staggered)
    return min(settled, found, key=lambda made: measure(problem, made, staggered=staggered).worth(staggered=staggered))


def _fusible(problem: Problem, schedule: Schedule) -> Iterator[int]:
    visits, starts, part_of = problem.num_visits, schedule.starts, problem.part_of
    for before, number in chain.from_iterable(map(pairwise, schedule.rows)):
        if number < 2 * visits or before != number - visits:
            continue
        visit = before - visits
        takes_i, takes_b = problem.durations[1][part_of[visit]], problem.parts[part_of[visit]].backward
        if starts[number] != starts[before] + takes_i:
            continue
        needed = inf if problem.begins[visit] else starts[before - 1] - problem.comm[part_of[visit - 1]]
        if needed >= starts[before] + takes_b or takes_i >= takes_b:
            yield visit


def split_up(problem: Problem, coupled: Schedule) -> Schedule:
    """Returns a coupled schedule as one of the problem in which I and W may be apart: all of them are one B.

    Args:
        problem: the problem.
        coupled: a schedule of the same problem with coupled backwards.
    """
    visits = problem.num_visits

    def apart(row: Iterable[int]) -> list[int]:
        return [each for number in row for each in ((number, number + visits) if number >= visits else (number,))]

    starts = list(coupled.starts)
    for visit in range(visits):
        starts[visit + 2 * visits] = starts[visit + visits] + problem.parts[problem.part_of[visit]].backward
    rows = [apart(row) for row in coupled.rows]
    return Schedule(starts=starts, rows=rows, sequence=apart(coupled.sequence), fused=frozenset(range(visits)))


def rows_to_run(problem: Problem, schedule: Schedule) -> list[list[int]]:
    """Returns the operations of every worker, with one number for a B: that of its W and the visits."""
    visits, fused = problem.num_visits, schedule.fused
    if not fused:
        return schedule.rows
    inputs = {visit + visits for visit in fused}
    weights = {visit + 2 * visits for visit in fused}
    return [[n + 2 * visits if n in inputs else n for n in row if n not in weights] for row in schedule.rows]


def to_timeline(problem: Problem, plan: Plan, schedule: Schedule, *, staggered: bool) -> Timeline:
    """Returns the timeline of a plan whose orders are those of this schedule."""
    spans: list[Span] = []
    lengths, rows = (
        _lengths(problem, schedule.fused),
        dict(zip(problem.workers, rows_to_run(problem, schedule), strict=True)),
    )
    for worker, ops in plan.orders.rows:
        for op, run in zip(ops, rows[worker] if ops else (), strict=True):
            number = run if run < 3 * problem.num_visits else run - 2 * problem.num_visits
            start = schedule.starts[number]
            spans.append(Span(worker, op, start, start + lengths[number]))
    return timeline(plan, problem.costs, tuple(spans), staggered=staggered, ties=problem.ties)


def sequence_of(problem: Problem, rows: list[list[int]]) -> list[int]:
    """Returns all operations of rows in an order in which each comes after what it needs.

    Raises:
        InvalidSchedule: workers wait for one another.
    """
    visits, begins, ends, at = problem.num_visits, problem.begins, problem.ends, problem.worker_of
    done = [False] * (3 * visits)
    position = [0] * len(rows)
    sequence: list[int] = []
    ready = list(range(len(rows)))
    while ready:
        worker = ready.pop()
        row = rows[worker]
        while position[worker] < len(row):
            number = row[position[worker]]
            kind, visit = divmod(number, visits)
            if kind == 0 and not begins[visit] and not done[number - 1]:
                break
            if kind == 1 and not ends[visit] and not done[number + 1]:
                break
            done[number] = True
            sequence.append(number)
            position[worker] += 1
            if kind == 0 and not ends[visit]:
                ready.append(at[visit + 1])
            elif kind == 1 and not begins[visit]:
                ready.append(at[visit - 1])
    if len(sequence) < sum(map(len, rows)):
        worker = next(w for w, row in enumerate(rows) if position[w] < len(row))
        raise _waits(problem, worker, position[worker], rows[worker][position[worker]])
    return sequence


def _waits(problem: Problem, worker: int, position: int, number: int) -> InvalidSchedule:
    kind, visit = divmod(number, problem.num_visits)
    what, of = ("forward", visit - 1) if kind == 0 else ("backward", visit + 1)
    microbatch = next(m for m, each in zip(problem.microbatches, problem.journeys, strict=True) if visit in each)
    source, waits = problem.workers[problem.worker_of[of]], "F" if kind == 0 else "B" if problem.coupled else "I or B"
    return InvalidSchedule(
        f"waits for ever for the {what} result of micro-batch {microbatch} from worker {source}",
        worker=_name(problem, worker),
        position=position,
        op=f"{waits}{microbatch}",
    )


def from_orders(problem: Problem, orders: Orders) -> Schedule:
    """Returns orders of this problem as a schedule in which every operation starts as soon as it can.

    Raises:
        InvalidSchedule: workers wait for one another.
    """
    rows, fused = rows_of(problem, orders)
    unstarted = Schedule(starts=[], rows=rows, sequence=sequence_of(problem, rows), fused=fused)
    return as_soon_as_possible(problem, unstarted)
