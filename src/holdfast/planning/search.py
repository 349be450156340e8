"""A timed search over list schedules: rules first, then urgencies learned from the best schedule so far."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice, product

from holdfast.planning.array_scheduler import array_schedule, suits
from holdfast.planning.list_scheduler import Schedule, list_schedule, plain_urgency
from holdfast.planning.shop import Shop
from holdfast.planning.timing import as_late_as_possible, measure, settle, stage_windows

__all__ = ["Found", "improve", "reached", "search"]

_PATIENCE = (0.0, 0.5, 1.0)
_DEPTHS = ((1.25, 0), (1.0, 0), (1.5, 0), (1.0, 1), (1.25, 1), (1.5, 1), (1.25, 2), (1.0, 2), (1.5, 3), (2.0, 0))
"""Multiples of 1F1B's micro-batches per stage, and how many more: first what is often best for the period, last what is
for the makespan."""
_AT_ONCE = (
    (1.25, 0, False),
    (1.25, 2, True),
    (1.0, 2, True),
    (1.0, 0, False),
    (1.5, 0, False),
    (1.5, 1, True),
    (1.0, 1, False),
    (1.25, 1, False),
    (1.5, 1, False),
    (1.25, 2, False),
    (1.0, 2, False),
    (1.5, 3, False),
    (2.0, 0, False),
)
_AT_ONCE_MAKESPAN = (
    (1.25, 1, True),
    (1.5, 1, False),
    (1.0, 1, True),
    (2.0, 0, False),
    (1.5, 0, False),
    (1.25, 2, True),
    (1.5, 1, True),
    (1.5, 2, False),
    (1.0, 2, True),
    (1.75, 0, False),
    (1.125, 1, True),
    (1.5, 3, False),
)
"""The same for large grids; true: the limits hold only from the first backward on."""
_NOISE = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_LARGE = 200_000
"""Operations above which times are settled in fewer rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A schedule and what it comes to: the period if the optimizer is staggered, else the makespan."""

    schedule: Schedule
    value: float


def search(
    shop: Shop, *, staggered: bool, goal: float, time_limit_s: float, seed: int = 0, tries: int | None = None
) -> Found:
    """Returns the best schedule found until one reaches the goal or the time is over; at least one is made.

    First come rules: how many micro-batches a stage may hold, as a multiple of 1F1B's own number and more, and for how
    long a worker waits for a backward. 1F1B's number and a little more is often best, as in ZB-H1: who runs ahead with
    forwards lacks the memory, or the work, later on.

    Args:
        shop: the problem.
        staggered: whether the period counts, else the makespan.
        goal: a lower bound; no schedule is better.
        time_limit_s: seconds; may be exceeded by one schedule.
        seed: of the random numbers.
        tries: the most schedules to make, at least 1; None: no limit. With it and endless time, equal arguments give
            equal schedules.

    Source:
        Zero Bubble Pipeline Parallelism (Qi et al.) for the schedules ZB-H1 and ZB-H2.
    """
    until = time.monotonic() + time_limit_s
    best: Found | None = None
    rules = _make_at_once(shop, staggered) if suits(shop) else _make_plain(shop, staggered)
    made = 0
    for found in islice(rules, tries):
        made += 1
        best = found if best is None or found.value < best.value else best
        if reached(best.value, goal) or time.monotonic() >= until:
            return best
    assert best is not None
    if suits(shop):
        return best
    left = None if tries is None else tries - made
    return improve(shop, best, staggered=staggered, goal=goal, until=until, seed=seed, tries=left)


def improve(
    shop: Shop,
    best: Found,
    *,
    staggered: bool,
    goal: float,
    until: float,
    seed: int = 0,
    tries: int | None = None,
) -> Found:
    """Returns the best schedule found by forward-backward justification until the goal or the time is reached.

    The latest start of every operation in a schedule says how urgent it is; the next schedule follows these urgencies,
    with a little noise. A schedule that is not worse takes the place of the one before.

    Args:
        shop: the problem.
        best: where to begin.
        staggered: whether the period counts, else the makespan.
        goal: a lower bound.
        until: when to stop, by ``time.monotonic``.
        seed: of the random numbers.
        tries: the most schedules to make; None: no limit.
    """
    rng = random.Random(seed)
    current = best
    for _ in count() if tries is None else range(tries):
        if reached(best.value, goal) or time.monotonic() >= until:
            break
        urgency = _urgency(shop, current.schedule, rng)
        patience = rng.choice(_PATIENCE)
        found = _judge(shop, list_schedule(shop, urgency, patience=patience, limits=_any_limits(shop, rng)), staggered)
        if found.value <= current.value or rng.random() < 0.01:
            current = found
        if found.value < best.value:
            best = found
    return best


def _limits(shop: Shop, depths: Iterable[tuple[float, int]]) -> Iterator[tuple[int, ...] | None]:
    for factor, more in depths:
        yield _limit(shop, factor, more)
    yield None


def _limit(shop: Shop, factor: float, more: int) -> tuple[int, ...]:
    depth = shop.num_stages
    return tuple(int((depth - stage) * factor) + more for stage in range(depth))


def _any_limits(shop: Shop, rng: random.Random) -> tuple[int, ...] | None:
    if rng.random() < 0.3:
        return None
    depth, factor = shop.num_stages, rng.uniform(1, 2)
    return tuple(int((depth - stage) * factor) + rng.randrange(3) for stage in range(depth))


def _make_plain(shop: Shop, staggered: bool) -> Iterator[Found]:
    for patience, limits in product(_PATIENCE, _limits(shop, _DEPTHS if staggered else _DEPTHS[::-1])):
        yield _judge(shop, list_schedule(shop, plain_urgency(shop), patience=patience, limits=limits), staggered)


def _make_at_once(shop: Shop, staggered: bool) -> Iterator[Found]:
    for patience, (factor, more, eager) in product(_PATIENCE, _AT_ONCE if staggered else _AT_ONCE_MAKESPAN):
        schedule = array_schedule(shop, patience=patience, limits=_limit(shop, factor, more), eager=eager)
        yield _found(shop, settle(shop, schedule, staggered=staggered, rounds=2, early=True), staggered)


def _judge(shop: Shop, schedule: Schedule, staggered: bool) -> Found:
    large = shop.num_operations > _LARGE
    if not (large and not staggered):
        schedule = settle(shop, schedule, staggered=staggered, rounds=1 if large else 6)
    return _found(shop, schedule, staggered)


def _found(shop: Shop, settled: Schedule, staggered: bool) -> Found:
    found = measure(shop, settled, staggered=staggered)
    return Found(schedule=settled, value=found.period if staggered else found.makespan)


def reached(value: float, goal: float) -> bool:
    """Returns whether a value is its lower bound, but for rounding."""
    return value <= goal * (1 + 1e-12)


def _urgency(shop: Shop, schedule: Schedule, rng: random.Random) -> list[int]:
    """Returns all operations by their latest starts that leave the end of every stage where it is, or by their starts.

    Noise moves either a little of everything, or some operations by much.
    """
    if rng.random() < 0.5:
        keys = list(schedule.starts)
    else:
        keys = as_late_as_possible(shop, schedule, stage_windows(shop, schedule)[1]).starts
    unit = max(stage.total for stage in shop.grid.each)
    if rng.random() < 0.3:
        spread = unit * rng.choice(_NOISE)
        keys = [key + spread * rng.random() for key in keys]
    else:
        for _ in range(rng.randint(1, 6)):
            keys[rng.randrange(len(keys))] += unit * rng.gauss(0, 3)
    return sorted(range(len(keys)), key=keys.__getitem__)
