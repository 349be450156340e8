"""A run in figures that grow with it, however long it is: what monitoring asks for, told by its events."""

from __future__ import annotations

import bisect
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    Detected,
    Event,
    FaultInjected,
    Installed,
    JobEnded,
    JobStarted,
    Ran,
    Rebuilt,
    Resumed,
    StepOps,
    Synced,
    WorkerReady,
)
from holdfast.telemetry.report import FATAL_KINDS
from holdfast.telemetry.underway import Present

__all__ = ["Figures", "Histogram", "Recovery", "failure_kind"]

_STEP_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_RECOVERY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_PACE_STEPS = 1000
_RECOVERIES = 50
_BEHIND = 100
"""So many steps behind the last one that is done, nobody tells of a step any more."""

_KINDS = {
    "node": ("its node ", "node "),
    "process": ("process ended", "it did not start", "it left "),
    "connection": ("connection closed", "did not come back"),
    "silence": ("no sign of life", "stuck "),
    "exception": ("raised: ",),
    "wrong results": ("computes wrong results",),
}
_OTHER = "other"


def failure_kind(how: str) -> str:
    """Returns what kind of failure a :class:`Detected` tells of; ``other`` if it is none of those that it knows."""
    return next((kind for kind, beginnings in _KINDS.items() if how.startswith(beginnings)), _OTHER)


@dataclass(slots=True)
class Histogram:
    """How many values are up to each of these bounds, and above them all.

    Attributes:
        bounds: ascending.
        counts: of the values up to each bound that are above the one before, and above the last one.
        total: of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        """There are none yet."""
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True, kw_only=True)
class Recovery:
    """What follows a loss, and those that come before it is over.

    Attributes:
        number: of those before it in this attempt.
        step: that was not done yet; from when all had agreed, the one with which they went on.
        lost: who, and how that was found out.
        struck: when a fault struck the first of them; None if none was injected.
        detected: when the first was found to be lost.
        agreed: when the state of all was known, and of which generation; None before.
        strategy: that answered.
        redone: (layer, micro-batch) pairs that were run again.
        rebuilt: when all were connected anew, and of which generation; None before.
        resumed: when the next step was done; None before.
    """

    number: int
    step: int
    detected: float
    lost: list[tuple[str, str]] = field(default_factory=list)
    struck: float | None = None
    agreed: tuple[float, int] | None = None
    strategy: str = ""
    redone: int = 0
    rebuilt: tuple[float, int] | None = None
    resumed: float | None = None

    def parts(self) -> dict[str, float]:
        """Returns the seconds of each part that is over: ``find``, ``agree``, ``rebuild`` and ``resume``."""
        agreed = rebuilt = None
        if self.agreed is not None:
            agreed, generation = self.agreed
            rebuilt = agreed if self.resumed is not None else None
            if self.rebuilt is not None and self.rebuilt[1] == generation:
                rebuilt = max(agreed, self.rebuilt[0])
        times = [("", self.struck), ("find", self.detected), ("agree", agreed)]
        times += [("rebuild", rebuilt), ("resume", self.resumed)]
        known = [(name, at) for name, at in times if at is not None]
        return {name: max(0.0, at - before) for (_, before), (name, at) in pairwise(known)}


@dataclass(slots=True, kw_only=True)
class Figures:
    """What is known of a run so far, as its events tell it: each once, in the order of time, from the beginning.

    Attributes:
        job: its name; empty before it has begun.
        steps: that it has.
        done: steps that are done, counted from the beginning of the run; fewer when the job goes back to a checkpoint.
        committed: how often a step was done in this attempt, again included.
        workers: of the whole grid.
        present: those that are there.
        owners: how many workers hold the state of the layer that the fewest hold; None before any do.
        failures: workers that were lost, by the kind of failure.
        step_s: seconds from one step to the next one.
        recovery_s: seconds of each part of a recovery: ``agree`` (from the loss until the state of all is known),
            ``rebuild`` (until all are connected anew) and ``resume`` (until the next step is done).
        recovery: the one under way; None if none is.
        recoveries: those that are over, the last ones.
        last: when the last step was done, or this attempt began.
        began: when this attempt did.
        ended: how it has ended; empty before.
        ended_at: when; None before.
    """

    job: str = ""
    steps: int = 0
    done: int = 0
    committed: int = 0
    workers: int = 0
    present: Present = field(default_factory=Present)
    owners: int | None = None
    failures: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys((*_KINDS, _OTHER), 0)))
    step_s: Histogram = field(default_factory=lambda: Histogram(_STEP_S))
    recovery_s: dict[str, Histogram] = field(
        default_factory=lambda: {part: Histogram(_RECOVERY_S) for part in ("agree", "rebuild", "resume")}
    )
    recovery: Recovery | None = None
    recoveries: deque[Recovery] = field(default_factory=lambda: deque(maxlen=_RECOVERIES))
    last: float = 0.0
    began: float = 0.0
    ended: str = ""
    ended_at: float | None = None
    _first: int = 0
    _saved: float = 0.0
    _members: dict[int, int] = field(default_factory=dict)
    _swapped: dict[tuple[int, int], tuple[set[str], float]] = field(default_factory=dict)
    _agreed: int = 0
    _numbered: int = 0
    _struck: dict[str, tuple[float, int]] = field(default_factory=dict)
    _pace: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))

    def hear(self, at: float, event: Event) -> None:
        """Takes an event into account; ``at``: when it was, in seconds of the clock by which all are told."""
        if isinstance(event, Detected):
            self._lose(at, event)
        self.present.hear(event)
        match event:
            case JobStarted():
                self.job, self.steps, self.workers = event.name, event.steps, event.workers
                self.began = self._saved = self.last = at
            case Resumed(step=step):
                self.done = self._first = step
            case FaultInjected(worker=worker, kind=kind) if kind in FATAL_KINDS:
                self._struck[worker] = at, event.step
            case WorkerReady(worker=worker):
                self._struck.pop(worker, None)
            case Installed(generation=generation, workers=workers, owners=owners):
                self._members[generation] = len(workers)
                self.owners = owners
                if self.recovery is not None:
                    self.recovery.strategy = event.strategy
            case Synced(owners=owners):
                self.owners = owners
            case StepOps(step=step, worker=worker):
                if worker in self._struck and step > self._struck[worker][1]:  # it went on
                    del self._struck[worker]
                self._swap(step, event, at)
            case Ran() if event.generation >= self._agreed:
                for step in range(event.first, event.stop):
                    self._commit(step, event.committed(step, at))
            case Agreed():
                self._agreed = max(self._agreed, event.generation)
                self._go_on(event.step + event.concluded, at)
                if (found := self.recovery) is not None:
                    found.agreed, found.step = (at, event.generation), event.step
                    found.redone = event.recomputed_microbatches
            case Rebuilt(generation=generation) if self.recovery is not None:
                self.recovery.rebuilt = at, generation
            case Checkpointed():
                self._saved = at
            case JobEnded(outcome=outcome):
                self.ended, self.ended_at = outcome, at

    def _lose(self, at: float, lost: Detected) -> None:
        """A worker is lost; those who take part recover from that, if it did."""
        self.failures[failure_kind(lost.how)] += 1
        struck, _ = self._struck.pop(lost.worker, (None, 0))
        if lost.worker in self.present.workers and not lost.spare:
            if self.recovery is None:
                self.recovery = Recovery(number=self._numbered, step=self.done, detected=at, struck=struck)
                self._numbered += 1
            self.recovery.lost.append((lost.worker, lost.how))

    def _swap(self, step: int, event: StepOps, at: float) -> None:
        """A worker has swapped in the results of a step, which is done once all of its generation have."""
        if event.generation < self._agreed:  # it is seen late: what of it stands was said when all agreed
            return
        who, latest = self._swapped.setdefault((step, event.generation), (set(), at))
        who.add(event.worker)
        latest = max(latest, at)
        self._swapped[step, event.generation] = who, latest
        if len(who) == self._members.get(event.generation):
            self._commit(step, latest)
        if len(self._swapped) > 2 * _BEHIND:
            self._swapped = {key: each for key, each in self._swapped.items() if key[0] > step - _BEHIND}

    def _go_on(self, step: int, at: float) -> None:
        """All go on with a step: those before it are done; those from it on are not, and their results are gone."""
        if step > self.done:
            self._commit(step - 1, at)
        self.done = step

    def _commit(self, step: int, at: float) -> None:
        """A step is done, and so are those before it."""
        if step < self.done:
            return
        number = step + 1 - self.done
        each_s = max(0.0, at - self.last) / number
        if self.committed:  # else it is the first one, which waits for much
            for _ in range(number):
                self.step_s.add(each_s)
            if self.recovery is None and len(self.present.workers) == self.workers:
                self._pace.append(each_s)
        self.committed += number
        self.done, self.last = step + 1, max(at, self.last)
        self._resume(at)

    def _resume(self, at: float) -> None:
        """A step is done: if everybody had agreed on how to go on behind a loss, that is over."""
        found = self.recovery
        if found is None or found.agreed is None:
            return
        found.resumed = at
        parts = found.parts()
        for part, histogram in self.recovery_s.items():
            histogram.add(parts[part])
        self.recoveries.append(found)
        self.recovery = None

    @property
    def missing(self) -> int:
        """How many of the grid's workers are not there."""
        return max(0, self.workers - len(self.present.workers))

    def goodput(self, now: float) -> float | None:
        """Returns the share of the time since the beginning that its steps would have taken if nothing had failed.

        That is at the median pace of the last steps with all workers; None while there is none.
        """
        elapsed = (now if self.ended_at is None else self.ended_at) - self.began
        if not self._pace or elapsed <= 0:
            return None
        return min(1.0, (self.done - self._first) * statistics.median(self._pace) / elapsed)

    def checkpoint_age(self, now: float) -> float:
        """Returns the seconds since the newest checkpoint was complete, or since the beginning."""
        return max(0.0, now - self._saved)

    def idle(self, now: float) -> float:
        """Returns the seconds since the last step was done, or since the beginning."""
        return max(0.0, now - self.last)
