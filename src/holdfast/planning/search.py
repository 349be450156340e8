"""A timed search over list schedules: known rules first, then rules like the best of them, and urgencies learned from
the best schedule so far, by turns."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, product
from math import inf

from holdfast.schedule.array_scheduler import array_schedule, suits
from holdfast.schedule.engine import Schedule
from holdfast.schedule.list_scheduler import list_schedule, plain_urgency
from holdfast.schedule.problem import Problem
from holdfast.schedule.timing import as_late_as_possible, group_windows, measure, settle

__all__ = ["BestFound", "reached", "search"]

_PATIENCE = (0.0, 0.5, 1.0)
_FINER_PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class _Start:
    """Rules that the search begins with.

    Attributes:
        factor: limits as multiples of 1F1B's micro-batches per group; infinite: memory alone.
        more: and how many more.
        eager, ahead, forward_first: see :class:`_Rules`.
    """

    factor: float
    more: int
    eager: bool = False
    ahead: int = 0
    forward_first: bool = False


_DEPTHS = (
    _Start(1.25, 0),
    _Start(1.0, 0),
    _Start(1.5, 0),
    _Start(1.0, 1),
    _Start(1.25, 1),
    _Start(1.5, 1),
    _Start(1.25, 2),
    _Start(1.0, 2),
    _Start(1.5, 3),
    _Start(2.0, 0),
)
"""First what is often best for the period, last what is for the makespan."""
_MEMORY_ALONE = _Start(inf, 0)
_WITH_MESSAGES = (
    (_MEMORY_ALONE, 0.0, True),
    (_MEMORY_ALONE, 0.5, False),
    (_Start(1.25, 0), 0.0, True),
    (_Start(2.0, 0), 0.5, True),
    (_MEMORY_ALONE, 0.0, False),
    (_Start(1.5, 0), 0.0, True),
    (_Start(2.0, 0), 0.5, False),
    (_Start(1.25, 1), 0.0, True),
    (_Start(1.25, 0), 0.0, False),
    (_Start(1.5, 3), 0.0, True),
    (_Start(1.0, 2), 0.5, True),
    (_Start(1.25, 2), 0.0, False),
)
"""Where messages take time, the dozen that left least to all others on 70 random grids: start, patience, and whether
messages are taken to need no time."""
_AT_ONCE = (
    _Start(1.5, 0, ahead=1),
    _Start(1.25, 2, eager=True, ahead=1),
    _Start(1.75, 0, ahead=1, forward_first=True),
    _Start(1.25, 2, eager=True),
    _Start(1.5, 0, ahead=2),
    _Start(1.5, 1, eager=True),
    _Start(1.5, 0, forward_first=True),
    _Start(1.25, 2, eager=True, ahead=2),
    _Start(1.25, 1, ahead=1),
    _Start(1.25, 0),
    _Start(1.0, 2, eager=True, ahead=1),
    _Start(1.75, 0, forward_first=True),
    _Start(1.5, 1, eager=True, ahead=2),
    _Start(2.0, 0, ahead=1),
    _Start(1.25, 0, forward_first=True),
    _Start(1.5, 3),
    _Start(1.0, 2, ahead=2),
    _Start(1.0, 0),
)
"""The same for large grids, for the period; no single one is good for all numbers of failures."""
_AT_ONCE_MAKESPAN = (
    _Start(1.75, 0, forward_first=True),
    _Start(1.875, 0, forward_first=True),
    _Start(1.25, 1, eager=True),
    _Start(1.125, 1, eager=True, ahead=1),
    _Start(1.875, 1, forward_first=True),
    _Start(1.25, 1, eager=True, ahead=1),
    _Start(1.625, 0, forward_first=True),
    _Start(1.0, 1, eager=True, ahead=1),
    _Start(1.875, 0, ahead=1, forward_first=True),
    _Start(1.25, 2, eager=True, ahead=1),
    _Start(1.75, 0, ahead=1, forward_first=True),
    _Start(1.5, 1, eager=True, ahead=1),
    _Start(1.0, 2, eager=True, ahead=1),
    _Start(1.5, 1),
    _Start(2.0, 0, ahead=1),
    _Start(1.5, 2),
)
"""The same for the makespan."""
_MANY = 4_000
"""Operations above which urgencies hardly ever shorten a schedule."""
_BY_RULES, _BY_RULES_LARGE = 0.5, 0.9
"""Which share of the schedules of a climb is made by rules, the others by urgencies: usually, and with so many."""
_DRAWS = 8
"""How often rules are drawn until some are new; near the best of a small grid nearly all are known."""
_NOISE = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_LARGE = 200_000
"""Operations above which times are settled in fewer rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What a list schedule is made by.

    Attributes:
        patience: a worker stays idle for an I that arrives within this fraction of what it would start instead.
        limits: micro-batches that a worker of group 0, 1, ... may hold between F and I.
        eager: the limits hold only from the first backward on; engine of large grids only.
        ahead: by how many indices micro-batches that leave their pipeline go before others.
        forward_first: F that memory and limits allow comes before I.
        instant: whether messages are taken to need no time while the schedule is made; its times do count them. Who is
            free just before a message comes would start something else otherwise, and be late for what all wait for.
    """

    patience: float
    limits: tuple[int, ...]
    eager: bool = False
    ahead: int = 0
    forward_first: bool = False
    instant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFound:
    """A schedule and what it comes to: the period if the optimizer is staggered, else the makespan."""

    schedule: Schedule
    value: float


def search(
    problem: Problem, *, staggered: bool, goal: float, time_limit_s: float, seed: int = 0, tries: int | None = None
) -> BestFound:
    """Returns the best schedule found until one reaches the goal or the time is over; at least one is made.

    First come rules: how many micro-batches a group may hold, as a multiple of 1F1B's own number and more, and for how
    long a worker waits for a backward. 1F1B's number and a little more is often best, as in ZB-H1: who runs ahead with
    forwards lacks the memory, or the work, later on. Then come rules like the best of them, and urgencies by turns.

    Args:
        problem: the problem.
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
    best: BestFound | None = None
    best_rules, made = None, 0
    at_once = suits(problem)
    instant = replace(problem, comm=(0,) * len(problem.comm))
    follow = partial(_follow_at_once if at_once else _follow, problem, instant, staggered)
    known = _known_rules(problem, staggered, at_once)
    for rules in known[:tries]:
        found = follow(rules)
        made += 1
        if best is None or found.value < best.value:
            best, best_rules = found, rules
        if reached(best.value, goal) or time.monotonic() >= until:
            return best
    assert best is not None
    assert best_rules is not None
    by_rules = 1.0 if at_once else _BY_RULES_LARGE if problem.num_operations > _MANY else _BY_RULES
    climb = _climb(problem, best, best_rules, set(known), follow, by_rules, staggered, random.Random(seed))
    for found in climb if tries is None else islice(climb, tries - made):
        best = found if found.value < best.value else best
        if reached(best.value, goal) or time.monotonic() >= until:
            break
    return best


def _climb(
    problem: Problem,
    best: BestFound,
    rules: _Rules,
    known: set[_Rules],
    follow: Callable[[_Rules], BestFound],
    by_rules: float,
    staggered: bool,
    rng: random.Random,
) -> Iterator[BestFound]:
    """Schedules without end, by a climb over rules and by forward-backward justification, from the best so far.

    A share ``by_rules`` is made by rules in which some groups may hold a little more or less than by the best ones so
    far; only that shortens large schedules. For the others, the latest start of every operation in a schedule says how
    urgent it is; the next one follows these urgencies, with a little noise. What is not worse takes the place of what
    was before.
    """
    current, least, most = best, best.value, _most(problem)
    while True:
        other = _other(problem, rules, most, known, rng) if rng.random() < by_rules else None
        if other is not None:
            found = follow(other)
            if found.value <= least:
                rules, least = other, found.value
        else:
            found = _urge(problem, current, rules, rng, staggered)
        if found.value <= current.value or rng.random() < 0.01:
            current = found
        yield found


def _known_rules(problem: Problem, staggered: bool, at_once: bool) -> tuple[_Rules, ...]:
    """The rules to begin with, each once: memory makes some alike, and so does a grid without failures.

    For the period, those for the makespan come in turns with its own, theirs first: what makes a short step with a
    synchronous optimizer makes one that is no longer with a staggered one. For large grids, of which few are made, they
    come last. Where messages take time, others come first.
    """
    starts: tuple[_Start, ...] = _AT_ONCE_MAKESPAN if at_once else (*_DEPTHS[::-1], _MEMORY_ALONE)
    if staggered:
        by_turns = chain.from_iterable(zip(starts, _DEPTHS, strict=False))
        starts = (*_AT_ONCE, *starts) if at_once else (*by_turns, _MEMORY_ALONE)
    ways = [(start, patience, False) for patience, start in product(_PATIENCE, starts)]
    if any(problem.comm):
        timeless = [(start, 0.0, True) for start in starts]
        ways = (
            [*ways[: len(starts)], *timeless, *ways[len(starts) :]] if at_once else [*_WITH_MESSAGES, *ways, *timeless]
        )
    most = _most(problem)
    found = (
        _Rules(
            patience=patience,
            limits=tuple(map(min, _limit(problem, start.factor, start.more), most)),
            eager=start.eager,
            ahead=start.ahead if problem.failed else 0,
            forward_first=start.forward_first,
            instant=instant,
        )
        for start, patience, instant in ways
    )
    return tuple(dict.fromkeys(found))


def _limit(problem: Problem, factor: float, more: int) -> tuple[int, ...]:
    return tuple(int(min(left * factor, problem.num_visits)) + more for left in problem.left)


def _most(problem: Problem) -> tuple[int, ...]:
    """How many micro-batches the memory of a worker of every group holds between F and I, if it has so many."""
    load = max(Counter(problem.worker_of).values())
    return tuple(
        load if not takes else int(min(load, room / takes))
        for takes, room in zip(_least(problem), problem.room, strict=True)
    )


def _least(problem: Problem) -> list[float]:
    """The least memory that a micro-batch takes of a worker of every group."""
    if problem.regular:
        return [part.takes for part in problem.parts]
    found = [inf] * problem.num_groups
    for worker, part in zip(problem.worker_of, problem.part_of, strict=True):
        group = problem.group_of[worker]
        found[group] = min(found[group], problem.parts[part].takes)
    return found


def _other(
    problem: Problem, rules: _Rules, most: tuple[int, ...], known: set[_Rules], rng: random.Random
) -> _Rules | None:
    """Rules like these that are not known yet, if that many draws find some; they are known from now on."""
    for _ in range(_DRAWS):
        other = _varied(problem, rules, most, rng)
        if other not in known:
            known.add(other)
            return other
    return None


def _varied(problem: Problem, rules: _Rules, most: tuple[int, ...], rng: random.Random) -> _Rules:
    """Rules with another patience or precedence, or that let neighbouring groups hold one or two more, or fewer."""
    if rng.random() < 0.15:
        return replace(rules, patience=rng.choice(_FINER_PATIENCE))
    if rng.random() < 0.05:
        return replace(rules, forward_first=not rules.forward_first)
    if any(problem.comm) and rng.random() < 0.1:
        return replace(rules, instant=not rules.instant)
    if problem.failed and rng.random() < 0.15:
        return replace(rules, ahead=rng.randrange(4))
    limits = list(rules.limits)
    first = rng.randrange(len(limits))
    last = first if rng.random() < 0.5 else rng.randrange(len(limits))
    more = rng.choice((-2, -1, -1, 1, 1, 2))
    for group in range(min(first, last), max(first, last) + 1):
        limits[group] = min(most[group], max(1, limits[group] + more))
    return replace(rules, limits=tuple(limits))


def _follow(problem: Problem, instant: Problem, staggered: bool, rules: _Rules) -> BestFound:
    """The schedule of some rules; ``instant``: the same problem with messages that need no time."""
    urgency = plain_urgency(problem, rules.ahead, forward_first=rules.forward_first)
    made_for = instant if rules.instant else problem
    schedule = list_schedule(made_for, urgency, patience=rules.patience, limits=rules.limits)
    return _judge(problem, schedule, staggered, early=not rules.instant)


def _follow_at_once(problem: Problem, instant: Problem, staggered: bool, rules: _Rules) -> BestFound:
    """The same by the engine of large grids."""
    schedule = array_schedule(
        instant if rules.instant else problem,
        patience=rules.patience,
        limits=rules.limits,
        eager=rules.eager,
        ahead=rules.ahead,
        forward_first=rules.forward_first,
    )
    settled = settle(problem, schedule, staggered=staggered, rounds=2, early=not rules.instant)
    return _found(problem, settled, staggered)


def _urge(problem: Problem, before: BestFound, rules: _Rules, rng: random.Random, staggered: bool) -> BestFound:
    """A schedule by the urgencies of another one, within the limits of the rules or within any."""
    limits = rules.limits if rng.random() < 0.5 else _any_limits(problem, rng)
    urgency = _urgency(problem, before.schedule, rng)
    return _judge(problem, list_schedule(problem, urgency, patience=rng.choice(_PATIENCE), limits=limits), staggered)


def _any_limits(problem: Problem, rng: random.Random) -> tuple[int, ...] | None:
    if rng.random() < 0.3:
        return None
    factor = rng.uniform(1, 2)
    return tuple(limit + rng.randrange(3) for limit in _limit(problem, factor, 0))


def _judge(problem: Problem, schedule: Schedule, staggered: bool, *, early: bool = True) -> BestFound:
    """What a schedule comes to; ``early``: whether every start is as early as it can be already."""
    if len(schedule.sequence) < problem.num_operations:
        return BestFound(schedule=schedule, value=inf)
    large = problem.num_operations > _LARGE
    if staggered or not early or not large:
        schedule = settle(problem, schedule, staggered=staggered, rounds=1 if large else 6)
    return _found(problem, schedule, staggered)


def _found(problem: Problem, settled: Schedule, staggered: bool) -> BestFound:
    found = measure(problem, settled, staggered=staggered)
    return BestFound(schedule=settled, value=found.worth(staggered=staggered))


def reached(value: float, goal: float) -> bool:
    """Returns whether a value is its lower bound, but for rounding."""
    return value <= goal * (1 + 1e-12)


def _urgency(problem: Problem, schedule: Schedule, rng: random.Random) -> list[int]:
    """Returns all operations by their latest starts that leave the end of every group where it is, or by their starts.

    Noise moves either a little of everything, or some operations by much.
    """
    if rng.random() < 0.5:
        keys = list(schedule.starts)
    else:
        keys = as_late_as_possible(problem, schedule, group_windows(problem, schedule)[1]).starts
    unit = max(part.total for part in problem.parts)
    if rng.random() < 0.3:
        spread = unit * rng.choice(_NOISE)
        keys = [key + spread * rng.random() for key in keys]
    else:
        for _ in range(rng.randint(1, 6)):
            keys[rng.randrange(len(keys))] += unit * rng.gauss(0, 3)
    return sorted(range(len(keys)), key=keys.__getitem__)
