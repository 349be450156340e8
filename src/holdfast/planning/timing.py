"""Times, measures and proves schedules in flat form; arrays, so that a million operations take a second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from holdfast.core.evaluate import Span, Timeline, timeline
from holdfast.core.plan import Plan
from holdfast.core.profile import StageCosts
from holdfast.core.schedule import OpKind, Orders
from holdfast.errors import InvalidSchedule
from holdfast.planning.list_scheduler import Schedule
from holdfast.planning.shop import Shop, rows_of

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
    "stage_windows",
    "to_timeline",
]

_Array = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]

_MANY, _TOGETHER = 20_000, 50
"""So many operations, and so many per moment, are moved at once; fewer one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What a schedule comes to, in the units of the costs; as in :class:`holdfast.core.evaluate.Timeline`."""

    period: float
    makespan: float


def measure(shop: Shop, schedule: Schedule, *, staggered: bool) -> Measure:
    """Returns the period and the makespan of a schedule, exactly as its times give them."""
    first, last = stage_windows(shop, schedule)
    makespan = max(last) - min(first)
    each = shop.grid.each
    if not staggered:
        return Measure(period=makespan + max(stage.optimizer for stage in each), makespan=makespan)
    waits = zip(first, shop.grid.waits_for, each, strict=True)
    period = max(max(last[other] for other in tied) - start + stage.optimizer for start, tied, stage in waits)
    return Measure(period=period, makespan=makespan)


def stage_windows(shop: Shop, schedule: Schedule) -> tuple[list[float], list[float]]:
    """Returns the first start and the last end on stage 0, 1, ..."""
    first: list[float] = []
    last: list[float] = []
    pipelines = shop.grid.pipelines
    for stage in range(shop.num_stages):
        rows = [row for row in schedule.rows[stage * pipelines : (stage + 1) * pipelines] if row]
        first.append(min(schedule.starts[row[0]] for row in rows))
        last.append(max(schedule.starts[row[-1]] + _length(shop, schedule.fused, row[-1]) for row in rows))
    return first, last


def _length(shop: Shop, fused: frozenset[int], number: int) -> float:
    """Returns the time that an operation takes."""
    kind, visit = divmod(number, shop.num_visits)
    stage = visit % shop.num_stages
    if visit not in fused or not kind:
        return shop.durations[kind][stage]
    return shop.grid.costs.of(shop.grid.stages[stage]).backward if kind == 1 else 0


def _lengths(shop: Shop, fused: frozenset[int]) -> list[float]:
    """Returns the time that every operation takes."""
    copies = shop.num_visits // shop.num_stages
    found = [time for row in shop.durations for time in row * copies]
    for visit in fused:
        for number in (visit + shop.num_visits, visit + 2 * shop.num_visits):
            found[number] = _length(shop, fused, number)
    return found


def as_soon_as_possible(shop: Shop, schedule: Schedule, releases: Sequence[float]) -> Schedule:
    """Returns the schedule with the same orders and every start as early as it can be.

    Args:
        shop: the problem.
        schedule: any schedule of it.
        releases: no worker of stage 0, 1, ... starts before this.
    """
    visits, stages, at, comm = shop.num_visits, shop.num_stages, shop.worker_of, shop.grid.comm
    lengths = _lengths(shop, schedule.fused)
    ready = [releases[worker // shop.grid.pipelines] for worker in range(shop.num_workers)]
    starts: list[float] = [0] * (3 * visits)
    for number in schedule.sequence:
        kind, visit = divmod(number, visits)
        stage, worker = visit % stages, at[visit]
        start = ready[worker]
        if kind == 0 and stage:
            start = max(start, starts[number - 1] + lengths[number - 1] + comm[stage - 1])
        elif kind == 1 and stage < stages - 1:
            start = max(start, starts[number + 1] + lengths[number + 1] + comm[stage])
        starts[number] = start
        ready[worker] = start + lengths[number]
    return replace(schedule, starts=starts)


def as_late_as_possible(shop: Shop, schedule: Schedule, deadlines: Sequence[float]) -> Schedule:
    """Returns the schedule with the same orders and every start as late as it can be.

    Args:
        shop: the problem.
        schedule: any schedule of it.
        deadlines: every worker of stage 0, 1, ... ends by this.
    """
    moments = _moments(shop, schedule)
    if moments is not None:
        return _late_at_once(shop, schedule, moments, deadlines)
    visits, stages, at, comm = shop.num_visits, shop.num_stages, shop.worker_of, shop.grid.comm
    lengths = _lengths(shop, schedule.fused)
    left = [deadlines[worker // shop.grid.pipelines] for worker in range(shop.num_workers)]
    starts: list[float] = [0] * (3 * visits)
    for number in reversed(schedule.sequence):
        kind, visit = divmod(number, visits)
        stage, worker = visit % stages, at[visit]
        end = left[worker]
        if kind == 0 and stage < stages - 1:
            end = min(end, starts[number + 1] - comm[stage])
        elif kind == 1 and stage:
            end = min(end, starts[number - 1] - comm[stage - 1])
        starts[number] = left[worker] = end - lengths[number]
    return replace(schedule, starts=starts)


def _moments(shop: Shop, schedule: Schedule) -> list[_Whole] | None:
    """Returns the operations that start together, first moment first; None if few do, or if some take no time."""
    if len(schedule.sequence) < _MANY or min(map(min, shop.durations)) <= 0 or schedule.fused:
        return None
    order = np.asarray(schedule.sequence, dtype=np.int64)
    starts = np.asarray(schedule.starts, dtype=np.float64)[order]
    sort = np.argsort(starts, kind="stable")
    cuts = np.flatnonzero(np.diff(starts[sort])) + 1
    return np.split(order[sort], cuts) if len(cuts) * _TOGETHER < len(order) else None


def _late_at_once(shop: Shop, schedule: Schedule, moments: list[_Whole], deadlines: Sequence[float]) -> Schedule:
    """As late as possible, for all operations of a moment at once: none of them waits for another of them."""
    visits, stages = shop.num_visits, shop.num_stages
    worker = np.tile(np.asarray(shop.worker_of, dtype=np.int64), 3)
    length = np.tile(np.asarray(shop.durations, dtype=np.float64), visits // stages).reshape(-1)
    waits, delay = _who_waits(shop)
    left = np.repeat(np.asarray(deadlines, dtype=np.float64), shop.grid.pipelines)
    starts = np.full(3 * visits + 1, np.inf)
    for numbers in reversed(moments):
        at = worker[numbers]
        end = np.minimum(left[at], starts[waits[numbers]] - delay[numbers])
        starts[numbers] = left[at] = end - length[numbers]
    starts[np.isinf(starts)] = 0
    whole = isinstance(schedule.starts[0], int) and bool(np.all(starts[:-1] == np.rint(starts[:-1])))
    found = starts[:-1].astype(np.int64) if whole else starts[:-1]
    return replace(schedule, starts=found.tolist())


def _who_waits(shop: Shop) -> tuple[_Whole, _Array]:
    """Returns who waits for the message of every operation (a number after the last if nobody), and its time."""
    visits, stages = shop.num_visits, shop.num_stages
    number, stage = np.arange(visits), np.tile(np.arange(stages), visits // stages)
    comm = np.asarray([*shop.grid.comm, 0.0])
    nobody = np.full(visits, 3 * visits)
    waits = [np.where(stage < stages - 1, number + 1, nobody), np.where(stage > 0, number + visits - 1, nobody), nobody]
    return np.concatenate(waits), np.concatenate([comm[stage], comm[stage - 1], np.zeros(visits)])


def settle(shop: Shop, schedule: Schedule, *, staggered: bool, rounds: int = 8, early: bool = False) -> Schedule:
    """Returns the schedule with the same orders and the times that make its period short.

    With a synchronous optimizer, that is as soon as possible. Staggered, stages may also begin later: the latest starts
    that leave the ends where they are, repeated while stages with slack may end later, and the best of all rounds.

    Args:
        shop: the problem.
        schedule: any schedule of it.
        staggered: whether the period counts with each stage's own optimizer.
        rounds: at most so many.
        early: whether every start is as early as it can be already.
    """
    best = schedule = schedule if early else as_soon_as_possible(shop, schedule, [0] * shop.num_stages)
    if not staggered:
        return best
    each = shop.grid.each
    deadlines = stage_windows(shop, schedule)[1]
    for _ in range(rounds):
        schedule = as_late_as_possible(shop, schedule, deadlines)
        first, _ = stage_windows(shop, schedule)
        period = measure(shop, schedule, staggered=True).period
        if period < measure(shop, best, staggered=True).period:
            best = schedule
        allowed = [start + period - stage.optimizer for start, stage in zip(first, each, strict=True)]
        waited_for = zip(deadlines, shop.grid.waits_for, strict=True)
        wider = [max(deadline, min(allowed[other] for other in tied)) for deadline, tied in waited_for]
        if wider == deadlines:
            break
        deadlines = wider
    return _from_zero(best)


def _from_zero(schedule: Schedule) -> Schedule:
    earliest = min(schedule.starts[row[0]] for row in schedule.rows if row)
    starts = [start - earliest for start in schedule.starts] if earliest else schedule.starts
    return replace(schedule, starts=starts)


def check(shop: Shop, schedule: Schedule) -> None:
    """Returns if a schedule is right.

    Rules: every operation runs once, on the worker of its visit; the I and the W of a B follow one another; no worker
    runs two at a time; every operation starts after what it needs has ended and arrived; the memory held never exceeds
    the limit. Times that keep all this are a proof that the orders do not deadlock.

    Raises:
        InvalidSchedule: a rule is broken.
    """
    rows = [np.asarray(row, dtype=np.int64) for row in schedule.rows]
    starts = np.asarray(schedule.starts, dtype=np.float64)
    _check_rows(shop, rows)
    _check_fused(shop, schedule)
    ends = starts + np.asarray(_lengths(shop, schedule.fused), dtype=np.float64)
    slack = 1e-9 * max(1.0, float(np.max(ends)))
    _check_needs(shop, starts, ends, slack)
    each = shop.grid.each
    for worker, row in enumerate(rows):
        if len(row) and np.any(starts[row[1:]] < ends[row[:-1]] - slack):
            raise InvalidSchedule("two operations run at the same time", worker=_name(shop, worker))
        _check_memory(shop, each[worker // shop.grid.pipelines], worker, row)


def _check_rows(shop: Shop, rows: Sequence[_Whole]) -> None:
    everything = np.concatenate(rows)
    expected = np.arange(shop.num_visits * (2 if shop.coupled else 3))
    if not np.array_equal(np.sort(everything), expected):
        raise InvalidSchedule("not every operation runs exactly once")
    owner = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    astray = np.nonzero(np.asarray(shop.worker_of)[everything % shop.num_visits] != owner)[0]
    if len(astray):
        raise InvalidSchedule("a micro-batch does not visit this worker", worker=_name(shop, int(owner[astray[0]])))


def _check_fused(shop: Shop, schedule: Schedule) -> None:
    """I and W of a B follow one another; the row of each fused visit is searched in one pass."""
    visits, left = shop.num_visits, set(schedule.fused)
    for row in schedule.rows if left else ():
        left -= {before - visits for before, after in pairwise(row) if visits <= before == after - visits}
    if left:
        raise InvalidSchedule(
            "I and W of one B do not follow one another", worker=_name(shop, shop.worker_of[min(left)])
        )


def _check_needs(shop: Shop, starts: _Array, ends: _Array, slack: float) -> None:
    shape = (3, -1, shop.num_stages)
    start, end = starts.reshape(shape), ends.reshape(shape)
    comm = np.asarray(shop.grid.comm, dtype=np.float64)
    late = {
        "F starts before its input is there": start[0, :, 1:] < end[0, :, :-1] + comm - slack,
        "a backward starts before its gradient is there": start[1, :, :-1] < end[1, :, 1:] + comm - slack,
        "a backward starts before its own forward has ended": start[1] < end[0] - slack,
    }
    if not shop.coupled:
        late["W starts before its I has ended"] = start[2] < end[1] - slack
    for rule, places in late.items():
        if np.any(places):
            raise InvalidSchedule(rule)


def _check_memory(shop: Shop, costs: StageCosts, worker: int, row: _Whole) -> None:
    held = _held(shop, costs, row)
    stage = worker // shop.grid.pipelines
    if len(held) and float(np.max(held)) > shop.room[stage] * (1 + 1e-9):
        raise InvalidSchedule(
            f"holds {np.max(held):g} of memory for micro-batches, more than the {costs.room} that it has",
            worker=_name(shop, worker),
        )


def _held(shop: Shop, costs: StageCosts, row: _Whole) -> _Array:
    """The memory held during every operation of a row."""
    given = costs.gives_input + (costs.gives_weight if shop.coupled else 0)
    kinds = row // shop.num_visits
    taken = np.asarray([costs.takes, 0.0, 0.0])[kinds]
    returned = np.asarray([0.0, given, costs.gives_weight])[kinds]
    return np.asarray(np.cumsum(taken) - np.cumsum(returned) + returned)


def _name(shop: Shop, worker: int) -> str:
    stage, pipeline = divmod(worker, shop.grid.pipelines)
    return f"{pipeline}.{stage}"


def fuse(shop: Shop, schedule: Schedule, *, staggered: bool) -> Schedule:
    """Returns the schedule with I and W as one B wherever nothing is gained by their split; never a longer one.

    That is where W follows its I at once and whoever waits for the gradient does not start before B has ended, and
    where I takes as long apart from W as B. If B is shorter than both, the times are settled anew.

    Args:
        shop: the problem.
        schedule: a schedule of it; one that has B already stays as it is.
        staggered: whether the period counts, else the makespan.
    """
    if shop.coupled or schedule.fused:
        return schedule
    visits, each = shop.num_visits, shop.grid.each
    starts, fused = list(schedule.starts), frozenset(_fusible(shop, schedule))
    for visit in fused:
        starts[visit + 2 * visits] = starts[visit + visits] + each[visit % shop.num_stages].backward
    found = replace(schedule, starts=starts, fused=fused)
    if not fused or not any(stage.split for stage in each):
        return found
    settled = settle(shop, found, staggered=staggered)
    return min(settled, found, key=lambda made: _worth(measure(shop, made, staggered=staggered), staggered))


def _worth(found: Measure, staggered: bool) -> float:
    return found.period if staggered else found.makespan


def _fusible(shop: Shop, schedule: Schedule) -> Iterator[int]:
    visits, comm, starts, each = shop.num_visits, shop.grid.comm, schedule.starts, shop.grid.each
    for worker, row in enumerate(schedule.rows):
        stage = worker // shop.grid.pipelines
        takes_i, takes_b = shop.durations[1][stage], each[stage].backward
        for before, number in pairwise(row):
            if number < 2 * visits or before != number - visits or starts[number] != starts[before] + takes_i:
                continue
            needed = starts[before - 1] - comm[stage - 1] if stage else inf
            if needed >= starts[before] + takes_b or takes_i >= takes_b:
                yield before - visits


def split_up(shop: Shop, coupled: Schedule) -> Schedule:
    """Returns a coupled schedule as one of the problem in which I and W may be apart: all of them are one B.

    Args:
        shop: the problem.
        coupled: a schedule of the same problem with coupled backwards.
    """
    visits, each = shop.num_visits, shop.grid.each

    def apart(row: Iterable[int]) -> list[int]:
        return [each for number in row for each in ((number, number + visits) if number >= visits else (number,))]

    starts = list(coupled.starts)
    for visit in range(visits):
        starts[visit + 2 * visits] = starts[visit + visits] + each[visit % shop.num_stages].backward
    rows = [apart(row) for row in coupled.rows]
    return Schedule(starts=starts, rows=rows, sequence=apart(coupled.sequence), fused=frozenset(range(visits)))


def rows_to_run(shop: Shop, schedule: Schedule) -> list[list[int]]:
    """Returns the operations of every worker, with one number for a B: that of its W and the visits."""
    visits, fused = shop.num_visits, schedule.fused
    if not fused:
        return schedule.rows
    inputs = {visit + visits for visit in fused}
    weights = {visit + 2 * visits for visit in fused}
    return [[n + 2 * visits if n in inputs else n for n in row if n not in weights] for row in schedule.rows]


def to_timeline(shop: Shop, plan: Plan, schedule: Schedule, *, staggered: bool) -> Timeline:
    """Returns the timeline of a plan that :func:`holdfast.planning.shop.to_plan` made of this schedule."""
    spans: list[Span] = []
    lengths = _lengths(shop, schedule.fused)
    for worker, ops in plan.orders.rows:
        for op in ops:
            microbatch = op.microbatch.index * shop.grid.pipelines + op.microbatch.pipeline
            number = _KINDS[op.kind] * shop.num_visits + microbatch * shop.num_stages + worker.stage
            start = schedule.starts[number]
            spans.append(Span(worker, op, start, start + lengths[number]))
    return timeline(plan, shop.grid.costs, tuple(spans), staggered=staggered, ties=shop.grid.ties)


_KINDS = {OpKind.F: 0, OpKind.I: 1, OpKind.B: 1, OpKind.W: 2}


def sequence_of(shop: Shop, rows: list[list[int]]) -> list[int]:
    """Returns all operations of rows in an order in which each comes after what it needs.

    Raises:
        InvalidSchedule: workers wait for one another.
    """
    visits, stages, at = shop.num_visits, shop.num_stages, shop.worker_of
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
            stage = visit % stages
            if kind == 0 and stage and not done[number - 1]:
                break
            if kind == 1 and stage < stages - 1 and not done[number + 1]:
                break
            done[number] = True
            sequence.append(number)
            position[worker] += 1
            if kind == 0 and stage < stages - 1:
                ready.append(at[visit + 1])
            elif kind == 1 and stage:
                ready.append(at[visit - 1])
    if len(sequence) < sum(map(len, rows)):
        worker = next(w for w, row in enumerate(rows) if position[w] < len(row))
        raise InvalidSchedule("waits for ever", worker=_name(shop, worker), position=position[worker])
    return sequence


def from_orders(shop: Shop, orders: Orders) -> Schedule:
    """Returns orders of this shop as a schedule in which every operation starts as soon as it can.

    Raises:
        InvalidSchedule: workers wait for one another.
    """
    rows = rows_of(shop, orders)
    unstarted = Schedule(starts=[], rows=rows, sequence=sequence_of(shop, rows))
    return as_soon_as_possible(shop, unstarted, [0] * shop.num_stages)
