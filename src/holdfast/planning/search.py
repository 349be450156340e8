"""A timed search over list schedules: rules first, then urgencies learned from the best schedule so far."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from holdfast.planning.list_scheduler import Schedule, list_schedule, plain_urgency
from holdfast.planning.shop import Shop
from holdfast.planning.timing import as_late_as_possible, measure, settle

__all__ = ["Found", "improve", "search"]

_PATIENCE = (0.0, 0.5, 0.25, 0.75, 1.0)
_NOISE = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A schedule and what it comes to: the period if the optimizer is staggered, else the makespan."""

    schedule: Schedule
    value: float


def search(
    shop: Shop,
    *,
    staggered: bool,
    goal: float,
    time_limit_s: float,
    limits: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Found:
    """Returns the best schedule found until one reaches the goal or the time is over; at least one is made.

    Args:
        shop: the problem.
        staggered: whether the period counts, else the makespan.
        goal: a lower bound; no schedule is better.
        time_limit_s: seconds; may be exceeded by one schedule.
        limits: micro-batches that a worker of stage 0, 1, ... may hold between F and I or B.
        seed: of the random numbers.
    """
    until = time.monotonic() + time_limit_s
    best: Found | None = None
    for patience in _PATIENCE:
        found = _judge(shop, list_schedule(shop, plain_urgency(shop), patience=patience, limits=limits), staggered)
        best = found if best is None or found.value < best.value else best
        if _reached(best, goal) or time.monotonic() >= until:
            return best
    assert best is not None
    return improve(shop, best, staggered=staggered, goal=goal, until=until, limits=limits, seed=seed)


def improve(
    shop: Shop,
    best: Found,
    *,
    staggered: bool,
    goal: float,
    until: float,
    limits: tuple[int, ...] | None = None,
    seed: int = 0,
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
        limits: as in :func:`search`.
        seed: of the random numbers.
    """
    rng = random.Random(seed)
    current = best
    for round_index in count():
        if _reached(best, goal) or time.monotonic() >= until:
            return best
        noise = _NOISE[round_index % len(_NOISE)]
        patience = _PATIENCE[rng.randrange(len(_PATIENCE))]
        urgency = _urgency(shop, current.schedule, staggered, noise, rng)
        found = _judge(shop, list_schedule(shop, urgency, patience=patience, limits=limits), staggered)
        if found.value <= current.value or rng.random() < 0.02:
            current = found
        if found.value < best.value:
            best = found
    raise AssertionError


def _judge(shop: Shop, schedule: Schedule, staggered: bool) -> Found:
    settled = settle(shop, schedule, staggered=staggered)
    found = measure(shop, settled, staggered=staggered)
    return Found(schedule=settled, value=found.period if staggered else found.makespan)


def _reached(found: Found, goal: float) -> bool:
    return found.value <= goal * (1 + 1e-12)


def _urgency(shop: Shop, schedule: Schedule, staggered: bool, noise: float, rng: random.Random) -> list[int]:
    deadlines = _deadlines(shop, schedule, staggered)
    latest = as_late_as_possible(shop, schedule, deadlines).starts
    spread = noise * max(shop.durations[0])
    keys = [start + spread * rng.random() for start in latest] if spread else latest
    return sorted(range(len(keys)), key=keys.__getitem__)


def _deadlines(shop: Shop, schedule: Schedule, staggered: bool) -> list[float]:
    ends = [
        max(schedule.starts[row[-1]] + shop.durations[row[-1] // shop.num_visits][stage] for row in rows if row)
        for stage, rows in _rows_by_stage(shop, schedule)
    ]
    return ends if staggered else [max(ends)] * shop.num_stages


def _rows_by_stage(shop: Shop, schedule: Schedule) -> Iterator[tuple[int, list[list[int]]]]:
    pipelines = shop.grid.pipelines
    for stage in range(shop.num_stages):
        yield stage, schedule.rows[stage * pipelines : (stage + 1) * pipelines]
