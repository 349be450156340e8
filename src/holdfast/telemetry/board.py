"""What a board shows of a run, told by its events; of it, what has changed since somebody last asked.

Whatever is kept is bounded, however long the run is: curves by points that stand for ever more steps, lists by their
newest entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from holdfast.core.ids import WorkerId
from holdfast.core.placement import Placement
from holdfast.core.seating import survives
from holdfast.telemetry.commits import Commits, Done
from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    CheckpointFailed,
    CheckpointRejected,
    CoordinatorLost,
    Detected,
    Evaluated,
    Event,
    EventsMissing,
    ExceptionRaised,
    FaultInjected,
    Installed,
    JobEnded,
    JobStarted,
    Migrating,
    Parted,
    Rebuilt,
    Resumed,
    StepOmitted,
    Synced,
    Timed,
    WorkerReady,
)
from holdfast.telemetry.figures import Figures, Recovery
from holdfast.telemetry.timeline import Mode, next_mode

__all__ = ["Board", "Curve", "Holding", "Job", "Line", "Mark", "News", "Recovered", "Score", "Worker", "cover"]

_POINTS = 1000
"""A curve has so many points at least, once there were so many steps, and twice as many at most."""
_SCORES = 2000
_LINES = 500
_MARKS = 200
_RATE_S = 60.0

_TROUBLE = (
    CheckpointFailed | CheckpointRejected | CoordinatorLost | Detected | EventsMissing | ExceptionRaised | FaultInjected
) | StepOmitted
_MENDED = Checkpointed | Rebuilt | Resumed | Synced
_ANSWERS = Detected | Installed | Agreed | Rebuilt | JobEnded
_MARKED = {Detected: "lost", Parted: "left", Synced: "came"}


class _Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what is sent; a field that stands at its default is left out."""


class Job(_Told, frozen=True, kw_only=True):
    """How a job is as a whole.

    Attributes:
        name: of the job; empty before it has begun.
        outcome: how it has ended; empty before.
        recovering: whether a loss was found and no step was done since.
        began: seconds since 1970.
        elapsed_s: since then, or from then to its end.
        done: steps that are done, of the whole run.
        steps: that it has.
        loss: of the last step that told one; None if none did, or it is no finite number.
        samples_per_s: over the last minute of the job.
        left_s: until it has done all its steps, at this rate.
        idle_s: since the last step was done.
        present: workers that are there.
        workers: of the whole grid.
        owners: how many workers hold the state of the layer that the fewest hold.
        goodput: share of the time that its steps would have taken had nothing failed.
        checkpoint: the newest, by its step; None if there is none.
        checkpoint_age_s: since that was complete, or since the job began.
        failures: workers that were lost.
    """

    name: str
    outcome: str = ""
    recovering: bool = False
    began: float = 0.0
    elapsed_s: float = 0.0
    done: int = 0
    steps: int = 0
    loss: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    idle_s: float | None = None
    present: int = 0
    workers: int = 0
    owners: int | None = None
    goodput: float | None = None
    checkpoint: int | None = None
    checkpoint_age_s: float = 0.0
    failures: int = 0


class Worker(_Told, frozen=True, kw_only=True, omit_defaults=False):
    """A worker: what it is to the job, and the node that it runs on, empty if nobody has said."""

    mode: Mode
    node: str


class Curve(_Told, frozen=True, kw_only=True, omit_defaults=False):
    """Points of the curve of steps, from number ``first`` on; those from there on that were told before are no more.

    Attributes:
        first: the number of the first.
        steps: the last step that each stands for.
        losses: means over these steps; None where none of them told one.
        rates: samples per second.
    """

    first: int
    steps: list[int]
    losses: list[float | None]
    rates: list[float | None]


class Mark(_Told, frozen=True, kw_only=True, omit_defaults=False):
    """Something to be seen on a curve: at which step, of which kind (``lost``, ``left`` or ``came``), and who."""

    step: int
    kind: str
    worker: str


class Score(_Told, frozen=True, kw_only=True, omit_defaults=False):
    """The state before a step was evaluated."""

    step: int
    scores: dict[str, float | None]
    best: bool


class Recovered(_Told, frozen=True, kw_only=True, omit_defaults=False):
    """A recovery: see :class:`holdfast.telemetry.figures.Recovery`; ``parts`` in seconds, those that are over."""

    number: int
    step: int
    lost: list[tuple[str, str]]
    strategy: str
    redone: int
    parts: dict[str, float]
    over: bool


class Holding(_Told, frozen=True, kw_only=True, omit_defaults=False):
    """Who holds what, by the newest plan.

    Attributes:
        layers: of the model.
        held: of each worker the ranges that it holds: first layer, and one past the last.
        any: so many workers may be lost now, whichever they are, and every layer still has an owner; -1: one has none.
        most: so many may be, if it is the right ones.
        nodes: so many nodes may be lost, whichever they are; None where there is but one, or it is not known.
        why: why none of this is known; empty if it is.
    """

    layers: int = 0
    held: dict[str, list[tuple[int, int]]] = {}
    any: int = 0
    most: int = 0
    nodes: int | None = None
    why: str = ""


class Line(_Told, frozen=True, kw_only=True, omit_defaults=False):
    """A line on what happened: seconds since the beginning, what, and whether it is ``bad``, ``good`` or neither."""

    at: float
    text: str
    kind: str


class News(_Told, frozen=True, kw_only=True):
    """What has changed of a board; what has not is left out.

    Attributes:
        run: which attempt, of which board; what was told of another one is no more.
        tick: to be named when the next news are asked for.
        job: as it is now.
        workers: those that have changed.
        curve: points that are new.
        marks: likewise.
        scores: likewise; a later one of the same step replaces the earlier.
        recoveries: those that are new or have changed, by their number.
        holding: if it has changed.
        lines: those that are new.
        reading: whether the log of before is still being read.
        trouble: why what is shown is not what is: logs cannot be read, or nobody runs the job any more; empty if it is.
    """

    run: int
    tick: int
    job: Job
    workers: dict[str, Worker] = {}
    curve: Curve | None = None
    marks: list[Mark] = []
    scores: list[Score] = []
    recoveries: list[Recovered] = []
    holding: Holding | None = None
    lines: list[Line] = []
    reading: bool = False
    trouble: str = ""


_T = TypeVar("_T")


@dataclass(slots=True)
class _Growing(Generic[_T]):
    """A list that grows: its newest entries, each with the tick at which it came."""

    most: int
    entries: deque[tuple[int, _T]] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = deque(maxlen=self.most)

    def add(self, tick: int, entry: _T) -> None:
        self.entries.append((tick, entry))

    def since(self, tick: int) -> list[_T]:
        """Returns those that came later, in their order."""
        new: list[_T] = []
        for at, entry in reversed(self.entries):
            if at <= tick:
                break
            new.append(entry)
        return new[::-1]


@dataclass(slots=True)
class _Point:
    """Some steps in a row: the last of them, how many, their seconds, how many told a loss, and the sum of these."""

    step: int
    number: int
    seconds: float
    told: int
    losses: float

    def joined(self, after: _Point) -> _Point:
        number, seconds = self.number + after.number, self.seconds + after.seconds
        return _Point(after.step, number, seconds, self.told + after.told, self.losses + after.losses)


class _Curve:
    """Points, each of which stands for as many steps as keeps their number in its bounds."""

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._ticks: list[int] = []
        self._each = 1
        self._open: _Point | None = None
        self._remade = 0

    def add(self, tick: int, point: _Point) -> None:
        """Some steps were done."""
        self._open = point if self._open is None else self._open.joined(point)
        if self._open.number < self._each:
            return
        self._points.append(self._open)
        self._ticks.append(tick)
        self._open = None
        if len(self._points) >= 2 * _POINTS:
            self._points = [one.joined(two) for one, two in zip(self._points[::2], self._points[1::2], strict=True)]
            self._each *= 2
            self._remake(tick)

    def close(self, tick: int) -> None:
        """There are no more steps."""
        if self._open is not None:
            self._points.append(self._open)
            self._ticks.append(tick)
            self._open = None

    def cut(self, tick: int, step: int) -> None:
        """The steps from this one on are not done after all."""
        self._open = None
        while self._points and self._points[-1].step >= step:
            self._points.pop()
        self._remake(tick)

    def _remake(self, tick: int) -> None:
        self._ticks = [tick] * len(self._points)
        self._remade = tick

    def since(self, tick: int, samples_per_step: int) -> Curve | None:
        """Returns what is new; None if nothing is."""
        first = 0 if self._remade > tick else next((n for n, at in enumerate(self._ticks) if at > tick), None)
        if first is None:
            return None
        new = self._points[first:]
        return Curve(
            first=first,
            steps=[point.step for point in new],
            losses=[point.losses / point.told if point.told else None for point in new],
            rates=[samples_per_step * point.number / point.seconds if point.seconds else None for point in new],
        )


class Board:
    """A run as it is shown. Times are seconds of the clock by which its events are told.

    Args:
        tell: what to say of an event, if anything; and whether it is one of the beginning, before the first generation.
        run: the number before that of the first attempt; numbers that other boards do not have tell these apart.
    """

    def __init__(self, tell: Callable[[Event, bool], str | None], run: int = 0) -> None:
        self._tell = tell
        self._run, self._tick = run, 0
        self._begin()

    def _begin(self) -> None:
        """Nothing is known so far."""
        self._commits = Commits()
        self._started: JobStarted | None = None
        self._origin: float | None = None
        self._formed = False
        self._workers: dict[str, tuple[int, Worker]] = {}
        self._curve = _Curve()
        self._loss: float | None = None
        self._checkpoint: int | None = None
        self._pace: deque[tuple[float, int]] = deque()
        self._marks, self._scores = _Growing[Mark](_MARKS), _Growing[Score](_SCORES)
        self._changed: dict[int, int] = {}
        self._holding: tuple[int, Holding | None] = (0, None)
        self._placement: Placement | None = None
        self._moving: dict[int, frozenset[str]] = {}
        self._lines = _Growing[Line](_LINES)
        self.generation = 0
        """The newest."""

    def hear(self, news: Iterable[Timed]) -> None:
        """Takes events into account that are new, in the order of time."""
        self._tick += 1  # though none came: what is told behind this has a tick of its own
        for at, event in news:
            if isinstance(event, JobStarted):  # another attempt
                self._begin()
                self._run += 1
            self._hear(at, event)

    @property
    def run(self) -> int:
        """The number of the newest attempt."""
        return self._run

    @property
    def figures(self) -> Figures:
        """What is known of the newest attempt."""
        return self._commits.figures

    def _hear(self, at: float, event: Event) -> None:
        figures, tick = self.figures, self._tick
        done, before = figures.done, figures.recovery
        if isinstance(event, Migrating):
            self._moving[event.generation] = frozenset(worker for worker, _ in event.moves)
        self._origin = at if self._origin is None else self._origin
        for each in self._commits.hear(at, event):
            self._count(each)
        if figures.done < done:
            self._curve.cut(tick, figures.done)
            self._pace.clear()
        match event:
            case JobStarted():
                self._started = event
            case WorkerReady(worker=worker, node=node):
                self._see(worker, event, node)
            case Detected(worker=worker) | Parted(worker=worker) | Synced(worker=worker):
                self._see(worker, event)
                if not isinstance(event, Synced):
                    self._miss(worker)
                if not (isinstance(event, Detected) and event.spare):
                    self._marks.add(tick, Mark(step=figures.done, kind=_MARKED[type(event)], worker=worker))
            case Installed(workers=workers, generation=generation):
                self._formed, self.generation = True, generation
                for worker in {*self._workers, *workers}:
                    self._see(worker, event)
            case Migrating(generation=generation) if generation == self.generation:  # told behind it
                for worker in self._moving[generation]:
                    self._see(worker, event)
            case JobEnded():
                self._curve.close(tick)
            case Checkpointed(step=step):
                self._checkpoint = step
            case Evaluated(step=step, scores=scores):
                self._scores.add(tick, Score(step=step, scores=dict(scores), best=event.best))
        recovery = before or figures.recovery
        if recovery is not None and (figures.recovery is None or isinstance(event, _ANSWERS)):
            self._changed[recovery.number] = tick
            known = {each.number for each in self._recoveries()}
            self._changed = {number: at for number, at in self._changed.items() if number in known}
        if text := self._tell(event, not self._formed):
            self._lines.add(tick, Line(at=at - self._origin, text=text, kind=_kind(event)))

    def _see(self, worker: str, event: Event, node: str = "") -> None:
        """A worker may have become something else."""
        _, was = self._workers.get(worker, (0, Worker(mode=Mode.ABSENT, node="")))
        moves = isinstance(event, Installed | Migrating) and worker in self._moving.get(event.generation, ())
        now = Worker(mode=next_mode(worker, was.mode, event, moves=moves), node=node or was.node)
        if now != was:
            self._workers[worker] = self._tick, now

    def _count(self, done: Done) -> None:
        """A step is done."""
        self._loss = done.loss if done.told else self._loss
        known = int(done.loss is not None)
        self._curve.add(self._tick, _Point(done.step, 1, done.seconds or 0.0, known, done.loss or 0.0))
        at = self.figures.last
        self._pace.append((at, done.step + 1))
        while len(self._pace) > 2 and self._pace[0][0] < at - _RATE_S:
            self._pace.popleft()

    def hold(self, placement: Placement | None, why: str = "") -> None:
        """Takes the newest plan's placement into account; None: it is not known, and ``why``."""
        self._tick += 1  # somebody may have been told since events were heard last
        self._hold(placement, why)

    def _hold(self, placement: Placement | None, why: str = "") -> None:
        self._placement = placement
        if placement is None:
            found = Holding(why=why)
        else:
            owners, held = placement.owners_by_layer, dict[str, list[tuple[int, int]]]()
            for worker, layers in placement.ranges:
                held.setdefault(str(worker), []).append((layers.start, layers.stop))
            known = {name: worker.node for name, (_, worker) in self._workers.items()}
            where = {worker: known.get(str(worker), "") for worker in placement.workers}
            several = len(nodes := set(where.values())) > 1 and "" not in nodes
            found = Holding(
                layers=placement.num_layers,
                held=held,
                any=min(map(len, owners)) - 1,
                most=len(held) - cover(placement) if all(owners) else 0,
                nodes=max(0, survives(placement, where)) if several else None,
            )
        self._holding = self._tick, found

    def _miss(self, worker: str) -> None:
        """A worker holds nothing any more; the plan that says so comes later."""
        gone = [each for each in self._placement.workers if str(each) == worker] if self._placement else []
        if self._placement is not None and gone:
            left = [row for row in self._placement.ranges if row[0] not in gone]
            self._hold(self._placement.without(gone) if left else None, "nobody holds anything")

    def _recoveries(self) -> list[Recovery]:
        return [each for each in (*self.figures.recoveries, self.figures.recovery) if each is not None]

    def told(self, run: int, since: int, now: float, trouble: str = "", *, reading: bool = False) -> News:
        """Returns what has changed.

        Args:
            run: the attempt of which the newest that is known was told; of another one all is told.
            since: the tick that was told last; 0: none.
            now: what the clock of the run shows.
            trouble: see :class:`News`.
            reading: likewise.
        """
        since = since if run == self._run and since <= self._tick else 0
        held_at, holding = self._holding
        samples = self._started.samples_per_step if self._started else 0
        return News(
            run=self._run,
            tick=self._tick,
            job=self._job(now),
            workers={name: worker for name, (tick, worker) in self._workers.items() if tick > since},
            curve=self._curve.since(since, samples),
            marks=self._marks.since(since),
            scores=self._scores.since(since),
            recoveries=[_recovered(each) for each in self._recoveries() if self._changed[each.number] > since],
            holding=holding if held_at > since else None,
            lines=self._lines.since(since),
            reading=reading,
            trouble=trouble,
        )

    def _job(self, now: float) -> Job:
        figures, started = self.figures, self._started
        if started is None:
            return Job(name="")
        now = now if figures.ended_at is None else figures.ended_at
        rate = self._steps_per_s(now)
        return Job(
            name=figures.job,
            outcome=figures.ended,
            recovering=figures.recovery is not None and not figures.ended,
            began=started.wall_time,
            elapsed_s=max(0.0, now - figures.began),
            done=figures.done,
            steps=figures.steps,
            loss=self._loss,
            samples_per_s=None if rate is None else rate * started.samples_per_step,
            left_s=(figures.steps - figures.done) / rate if rate and not figures.ended else None,
            idle_s=figures.idle(now) if figures.committed and not figures.ended else None,
            present=len(figures.present.workers),
            workers=figures.workers,
            owners=figures.owners,
            goodput=figures.goodput(now),
            checkpoint=self._checkpoint,
            checkpoint_age_s=figures.checkpoint_age(now),
            failures=sum(figures.failures.values()),
        )

    def _steps_per_s(self, now: float) -> float | None:
        """Over the last minute in which steps were done, up to now: who stands still becomes slower."""
        if len(self._pace) < 2:
            return None
        at, done = self._pace[0]
        return (self._pace[-1][1] - done) / (now - at) if now > at else None


def cover(placement: Placement) -> int:
    """Returns how many workers are enough to hold every layer, each of which has an owner.

    Where every worker holds one range, no fewer are; else those that reach farthest are taken, and fewer may do.
    """
    farthest: dict[int, tuple[int, WorkerId]] = {}
    for worker, layers in placement.ranges:
        for layer in layers.indices:
            farthest[layer] = max(farthest.get(layer, (0, worker)), (layers.stop, worker))
    covered, taken = set[int](), 0
    for layer in range(placement.num_layers):
        if layer not in covered:
            covered.update(placement.held_layers(farthest[layer][1]))
            taken += 1
    return taken


def _recovered(recovery: Recovery) -> Recovered:
    return Recovered(
        number=recovery.number,
        step=recovery.step,
        lost=list(recovery.lost),
        strategy=recovery.strategy,
        redone=recovery.redone,
        parts=recovery.parts(),
        over=recovery.resumed is not None,
    )


def _kind(event: Event) -> str:
    """How a line is to look."""
    if isinstance(event, JobEnded):
        return "good" if event.outcome == "done" else "bad"
    if isinstance(event, FaultInjected) and event.kind == "join":
        return ""
    return "bad" if isinstance(event, _TROUBLE) else "good" if isinstance(event, _MENDED) else ""
