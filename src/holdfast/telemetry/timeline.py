"""What every worker was doing when, as a value read from a run's events; real and simulated runs alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from holdfast.telemetry.events import (
    Agreed,
    Detected,
    Event,
    FaultInjected,
    Installed,
    Migrating,
    Parted,
    Ran,
    Rebuilt,
    StepOps,
    Synced,
    Timed,
    WorkerReady,
)
from holdfast.telemetry.report import FATAL_KINDS, report

__all__ = [
    "BOUNDARY",
    "Generation",
    "TimelineMark",
    "Mode",
    "Row",
    "RunTimeline",
    "Stretch",
    "next_mode",
    "run_timeline",
]

BOUNDARY = "boundary"
"""The strategy of a generation that nobody's failure brought about: workers came or went between two steps."""
FALLBACK = "fallback"
"""The strategy of a generation that may do without workers who are there."""


class Mode(StrEnum):
    """What a worker is to the job.

    ``absent`` it is not there; ``lost`` it was killed, or held for lost, from when the fault struck it where that is
    known; ``arriving`` it is there and waits to be let in; ``entering`` it takes part, but
    computes nothing and has no state yet; ``member`` it computes, or waits for others; ``recovering`` a member whose
    step was given up, from its last finished step until it can run again.
    """

    ABSENT = "absent"
    LOST = "lost"
    ARRIVING = "arriving"
    ENTERING = "entering"
    MEMBER = "member"
    RECOVERING = "recovering"


_AWAY = (Mode.ABSENT, Mode.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some time in one mode; seconds from the run's first event."""

    start: float
    end: float
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One worker.

    Attributes:
        worker: its name; what is no worker of the grid, such as ``new``, has marks only.
        stretches: in order, without gaps, from the first event of the run to the last.
        busy: (start, end) of the operations of the steps that it finished, in order.
    """

    worker: str
    stretches: tuple[Stretch, ...]
    busy: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineMark:
    """Something that happened to a worker: a fault of some ``kind``, or ``death`` for a loss that was not injected."""

    time: float
    worker: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """When a generation was installed, and by what: a strategy, ``boundary``, or nothing at the start."""

    time: float
    number: int
    strategy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """A run. All times are seconds from its first event.

    Attributes:
        duration: the time of the last event.
        rows: one per worker.
        marks: what befell the workers.
        generations: in the order of time.
        commits: (step, time) of every step that was done, by step.
    """

    duration: float
    rows: tuple[Row, ...]
    marks: tuple[TimelineMark, ...]
    generations: tuple[Generation, ...]
    commits: tuple[tuple[int, float], ...] = ()


_DIGITS = 10


def run_timeline(timed: Iterable[Timed]) -> RunTimeline:
    """Returns what every worker was doing when.

    Args:
        timed: a run's events in the order of time; an empty run has no rows.
    """
    events = list(timed)
    if not events:
        return RunTimeline(duration=0.0, rows=(), marks=(), generations=())
    origin = events[0][0]
    events = [(time - origin, event) for time, event in events]
    duration = events[-1][0]
    marks = tuple(_marks(events))
    members = {worker for _, event in events for worker in _workers_of(event)}
    names = sorted(members, key=_place) + sorted({mark.worker for mark in marks} - members)
    return RunTimeline(
        duration=duration,
        rows=tuple(_row(name, events, duration, origin) for name in names),
        marks=marks,
        generations=tuple(
            Generation(time=time, number=event.generation, strategy=event.strategy)
            for time, event in events
            if isinstance(event, Installed)
        ),
        commits=report(events).commits,
    )


def _workers_of(event: Event) -> tuple[str, ...]:
    match event:
        case Installed(workers=workers):
            return workers
        case WorkerReady(worker=worker):
            return (worker,)
    return ()


def _place(worker: str) -> tuple[float, ...]:
    """For sorting; whatever a log has in the place of a worker comes last."""
    parts = worker.split(".")
    known = all(part.isdecimal() and len(part) < _DIGITS for part in parts)
    return tuple(int(part) for part in parts) if known else (math.inf,)


def _marks(events: list[Timed]) -> Iterable[TimelineMark]:
    """The faults, and the losses that no fault of the same worker came before."""
    struck: set[str] = set()
    for time, event in events:
        if isinstance(event, FaultInjected):
            struck.add(event.worker)
            yield TimelineMark(time=time, worker=event.worker, kind=event.kind, text=event.spec)
        elif isinstance(event, Detected):
            if event.worker not in struck:
                yield TimelineMark(time=time, worker=event.worker, kind="death", text=event.how)
            struck.discard(event.worker)


def _row(worker: str, events: list[Timed], duration: float, origin: float) -> Row:
    changes = _overlay(list(_modes(worker, events)), list(_recoveries(worker, events)), list(_struck(worker, events)))
    ends = [*(time for time, _ in changes[1:]), duration]
    stretches = [Stretch(start=time, end=end, mode=mode) for (time, mode), end in zip(changes, ends, strict=True)]
    busy = tuple(_computing(worker, events, origin))
    return Row(worker=worker, stretches=tuple(s for s in stretches if s.end > s.start), busy=busy)


def _computing(worker: str, events: list[Timed], origin: float) -> Iterable[tuple[float, float]]:
    """When a worker computed; operations tell times of the log's clock."""
    for at, event in events:
        match event:
            case StepOps(worker=who, ops=ops) if who == worker:
                yield from ((start - origin, end - origin) for *_, start, end in ops)
            case Ran(workers=workers) if worker in workers:
                yield event.committed(event.first - 1, at), at


def _modes(worker: str, events: list[Timed]) -> Iterable[tuple[float, Mode]]:
    """When a worker became what to the job, recoveries left aside."""
    mode = Mode.ABSENT
    yield 0.0, mode
    moves = {event.generation for _, event in events if isinstance(event, Migrating) and worker in dict(event.moves)}
    for time, event in events:
        moving = isinstance(event, Installed) and event.generation in moves
        before, mode = mode, next_mode(worker, mode, event, moves=moving)
        if mode is not before:
            yield time, mode


def next_mode(worker: str, mode: Mode, event: Event, *, moves: bool) -> Mode:
    """Returns what a worker is to the job behind an event, recoveries left aside; ``moves``: it changes places."""
    if moves:
        return Mode.ENTERING
    match event:
        case WorkerReady(worker=who) if who == worker and mode in _AWAY:
            return Mode.ARRIVING
        case Detected(worker=who) if who == worker:
            return Mode.LOST
        case Parted(worker=who) if who == worker:
            return Mode.ABSENT
        case Synced(worker=who) if who == worker:
            return Mode.MEMBER
        case Installed(workers=workers) if worker in workers and mode in (*_AWAY, Mode.ARRIVING):
            return Mode.ENTERING if event.strategy == BOUNDARY else Mode.MEMBER
        case Installed(workers=workers) if worker not in workers and mode in (Mode.ENTERING, Mode.MEMBER):
            return Mode.ABSENT if event.strategy == FALLBACK else Mode.ARRIVING  # the grid shrinks and does without it
    return mode


def _recoveries(worker: str, events: list[Timed]) -> Iterable[tuple[float, float]]:
    """From a worker's last finished step before a failure's generation until that generation can run."""
    finished = 0.0
    for time, event in events:
        if _finishes(worker, event):
            finished = time
        elif isinstance(event, Installed) and event.generation > 1 and event.strategy != BOUNDARY:
            ready = [
                at
                for at, other in events
                if isinstance(other, Agreed | Rebuilt) and other.generation == event.generation
            ]
            yield finished, max(ready, default=time)


def _finishes(worker: str, event: Event) -> bool:
    """Whether a worker has finished a step."""
    match event:
        case StepOps(worker=who):
            return who == worker
        case Ran(workers=workers):
            return worker in workers
    return False


def _struck(worker: str, events: list[Timed]) -> Iterable[tuple[float, float]]:
    """From when a fault struck a worker until it was found to be lost by it."""
    struck: float | None = None
    for time, event in events:
        match event:
            case FaultInjected(worker=who, kind=kind) if who == worker and kind in FATAL_KINDS:
                struck = time
            case Detected(worker=who) if who == worker:
                if struck is not None:
                    yield struck, time
                struck = None
            case _ if _finishes(worker, event):
                struck = None  # it went on


def _overlay(
    changes: list[tuple[float, Mode]], recoveries: list[tuple[float, float]], struck: list[tuple[float, float]]
) -> list[tuple[float, Mode]]:
    """Returns the changes with the recoveries of whoever is a member; whoever was struck is lost from then on."""
    times = sorted({time for time, _ in changes} | {time for each in (*recoveries, *struck) for time in each})
    result: list[tuple[float, Mode]] = []
    for time in times:
        mode = [mode for at, mode in changes if at <= time][-1]
        if any(start <= time < end for start, end in struck):
            mode = Mode.LOST
        elif mode is Mode.MEMBER and any(start <= time < end for start, end in recoveries):
            mode = Mode.RECOVERING
        if not result or result[-1][1] is not mode:
            result.append((time, mode))
    return result
