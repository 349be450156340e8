"""What no schedule of given routes can beat.

Bounds of regular grids (:mod:`holdfast.schedule.bounds`) hold for whatever routes the plan chooses; these, for any
placement, only for those that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf

from holdfast.core.profile import StageCosts
from holdfast.schedule.bounds import Bound, BoundRules, forced_weights, idle_after_last_forward, most_held
from holdfast.schedule.problem import Problem

__all__ = ["route_bound"]


def route_bound(problem: Problem, rules: BoundRules, *, thorough: bool = True) -> Bound:
    """Returns lower bounds for every schedule of a problem.

    Of each worker alone, for the whole step and, if the optimizer is staggered, for the window of each layer, which
    begins with the first start on one of those who have it:

    - *One at a time*: no operation starts before its micro-batch can have come there from where the window begins, and
      after each there is a way left to the window's end. One worker runs what it has no sooner than if it could
      interrupt operations and always ran the one with the longest way left.
    - *Memory*: it is idle while the first micro-batches, and the last, are on their way to the last stage and back, as
      in :func:`holdfast.schedule.bounds.bound`.

    Args:
        problem: the problem.
        rules: what schedules may do.
        thorough: whether the window of every layer is looked at, which takes workers times visits, or only what each
            worker itself needs for a step.

    Source:
        Jackson's preemptive schedule, for one machine with heads and tails (Carlier, 1982).
    """
    ways, machines = _Ways(problem, rules), _machines(problem, rules)
    step = _whole_step(problem)
    makespan = max(_least(machine, ways, step) for machine in machines)
    if not rules.staggered:
        return Bound(period=makespan + max(problem.optimizer), makespan=makespan)
    period = max(_least(machine, ways, _alone(problem, machine.number)) for machine in machines)
    for frame in _frames(problem) if thorough else ():
        period = max(period, *(_least(machine, ways, frame) for machine in machines))
    return Bound(period=period, makespan=makespan)


@dataclass(frozen=True, slots=True)
class _Frame:
    """A part of the step whose length is bounded.

    Attributes:
        entry: for every visit, that of the same micro-batch with which the frame begins; one beyond all: it never does.
        members: the workers of which all operations are within it.
        step: the optimizer step that ends it; None for the whole step.
    """

    entry: Sequence[int]
    members: frozenset[int]
    step: float | None = None


def _whole_step(problem: Problem) -> _Frame:
    entry = tuple(journey.start for journey in problem.journeys for _ in journey)
    return _Frame(entry, frozenset(problem.worker_of))


def _frames(problem: Problem) -> Iterator[_Frame]:
    """Of each layer, with the shortest optimizer step of those who have it; and of each worker alone."""
    number = {worker: n for n, worker in enumerate(problem.workers)}
    steps = [problem.optimizer[group] for group in problem.group_of]
    visited = frozenset(problem.worker_of)
    for layer, workers in enumerate(problem.placement.members_by_layer):
        members = visited & {number[worker] for worker in workers}
        has = [layer in layers for layers in problem.layers]
        entry = _entries(problem, [has[part] for part in problem.part_of])
        yield _Frame(entry, members, min(steps[member] for member in members))
    for worker in sorted(visited):
        entry = _entries(problem, [other == worker for other in problem.worker_of])
        yield _Frame(entry, frozenset({worker}), steps[worker])


def _alone(problem: Problem, worker: int) -> _Frame:
    """Of a worker, as it concerns itself: its own visits enter it."""
    step = problem.optimizer[problem.group_of[worker]]
    return _Frame(range(problem.num_visits), frozenset({worker}), step)


def _entries(problem: Problem, enters: Sequence[bool]) -> tuple[int, ...]:
    """For every visit, the first of the same micro-batch that enters the frame."""
    found: list[int] = []
    for journey in problem.journeys:
        found += [next((visit for visit in journey if enters[visit]), problem.num_visits)] * len(journey)
    return tuple(found)


class _Ways:
    """How long the ways are between the visits of a micro-batch.

    Attributes:
        part: per visit.
        forward, back, after: the time of F, of I within B, or of B, and of the W that is left, per part, at least.
        down: per visit, the time from the start of its micro-batch's first F to that of its own.
        up: the time from the end of its I to that of the first visit.
        home: the time from the end of its I to the end of what comes after that, its own W included.
        turn: the time from the start of its F to that of its I.
    """

    def __init__(self, problem: Problem, rules: BoundRules) -> None:
        least = [part.weight if rules.coupled else min(part.split, part.weight) for part in problem.parts]
        self.part = problem.part_of
        self.forward = [part.forward for part in problem.parts]
        self.back = [part.input + more for part, more in zip(problem.parts, least, strict=True)]
        self.after = [part.weight - more for part, more in zip(problem.parts, least, strict=True)]
        self.down: list[float] = []
        self.up: list[float] = []
        self.home: list[float] = []
        self.turn: list[float] = []
        for journey in problem.journeys:
            parts = [problem.part_of[visit] for visit in journey]
            down = list(accumulate((self.forward[part] + problem.comm[part] for part in parts[:-1]), initial=0))
            up = list(accumulate((self.back[part] + problem.comm[part] for part in parts[:-1]), initial=0))
            whole = down[-1] + self.forward[parts[-1]] + self.back[parts[-1]] + up[-1]
            self.down += down
            self.up += up
            latest = accumulate((self.after[part] - u for part, u in zip(parts, up, strict=True)), max)
            self.home += [u + late for u, late in zip(up, latest, strict=True)]
            self.turn += [whole - d - u - self.back[part] for d, u, part in zip(down, up, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class _Machine:
    """One worker.

    Attributes:
        number: its number.
        visits: what visits it.
        costs: of the visit that takes the least memory, with the longest times.
        held: how many micro-batches it may hold between F and I.
        coupled: whether every backward is one operation.
    """

    number: int
    visits: tuple[int, ...]
    costs: StageCosts
    held: float
    coupled: bool


def _machines(problem: Problem, rules: BoundRules) -> list[_Machine]:
    visits: dict[int, list[int]] = {}
    for visit, worker in enumerate(problem.worker_of):
        visits.setdefault(worker, []).append(visit)
    made = []
    for worker, row in sorted(visits.items()):
        group = problem.group_of[worker]
        costs = _easiest(
            [problem.parts[part] for part in sorted({problem.part_of[visit] for visit in row})], problem.room[group]
        )
        held = min(most_held(costs), problem.left[group]) if rules.classic else most_held(costs)
        made.append(_Machine(worker, tuple(row), costs, held, rules.coupled))
    return made


def _easiest(parts: Iterable[StageCosts], room: float) -> StageCosts:
    """Costs with which a worker is idle no longer than with these by turns."""
    each = tuple(parts)
    takes, weight = min(part.takes for part in each), max(part.weight for part in each)
    both = max(part.input_apart + part.weight for part in each)
    return StageCosts(
        forward=max(part.forward for part in each),
        input=both - weight,
        weight=weight,
        optimizer=0,
        takes=takes,
        gives_input=takes - min(part.takes - part.gives_input for part in each),
        gives_weight=0,
        capacity=None if room == inf else room,
    )


def _least(machine: _Machine, ways: _Ways, frame: _Frame) -> float:
    """Returns how long a frame is at least, as this worker shows; 0 if it shows nothing."""
    member = machine.number in frame.members
    step = frame.step or 0
    jobs: list[_Job] = []
    heads: list[float] = []
    tails: list[float] = []
    for visit in machine.visits:
        entry, part = frame.entry[visit], ways.part[visit]
        if entry > visit and not member:
            continue
        f, b, w, turn = ways.forward[part], ways.back[part], ways.after[part], ways.turn[visit]
        head = ways.down[visit] - ways.down[entry] if entry <= visit else 0
        tail = w + step if member else 0
        if frame.step is None:
            tail = max(tail, ways.home[visit])
        elif entry <= visit:
            way = ways.up[visit] - ways.up[entry]
            tail = max(tail, way + ways.after[ways.part[entry]] + step)
        heads.append(head)
        tails.append(tail)
        jobs += [(head, f, turn - f + b + tail), (head + turn, b, tail)]
        if member:
            jobs.append((head + turn + b, w, step))
    alone = _one_machine(jobs)
    if len(heads) < len(machine.visits):
        return alone
    work = sum(length for _, length, _ in jobs)
    idle = min(heads) + _idle(machine, ways)
    if member:
        alone = max(alone, idle + work + step)
        work -= sum(ways.after[ways.part[visit]] for visit in machine.visits)
    return max(alone, idle + work + _forced(machine, ways) + min(tails))


_Job = tuple[float, float, float]
"""From when on an operation can start, how long it takes, and how much comes after it at least."""


def _one_machine(jobs: Iterable[_Job]) -> float:
    """Returns when one machine, which may interrupt jobs, has done them all and what comes after each."""
    coming = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []
    now, end = 0.0, 0.0
    while coming or ready:
        now = now if ready else max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, length, tail = coming.pop()
            heappush(ready, (-tail, length))
        tail, length = heappop(ready)
        until = coming[-1][0] if coming else inf
        if now + length <= until:
            now += length
            end = max(end, now - tail)
        else:
            heappush(ready, (tail, length - (until - now)))
            now = until
    return end


def _idle(machine: _Machine, ways: _Ways) -> float:
    """Returns how long a worker is idle before its first I or B and between its last F and the I or B of that."""
    load, turn = len(machine.visits), min(ways.turn[visit] for visit in machine.visits)
    way = min(ways.turn[visit] - ways.forward[ways.part[visit]] for visit in machine.visits)
    fill = max(0, turn - min(machine.held, load) * machine.costs.forward)
    drain = idle_after_last_forward(machine.costs, machine.held, way, coupled=machine.coupled)
    return fill + drain if load > machine.held else max(fill, drain)


def _forced(machine: _Machine, ways: _Ways) -> float:
    """Returns the time of W that memory does not let wait until the last F has started."""
    least = min(ways.after[ways.part[visit]] for visit in machine.visits)
    return forced_weights(machine.costs, len(machine.visits)) * least
