"""How far a job is that is still running, read from its events so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.telemetry.events import (
    Detected,
    Event,
    Installed,
    JobStarted,
    Parted,
    Resumed,
    StepOps,
    Timed,
    WorkerReady,
)
from holdfast.telemetry.report import report

__all__ = ["Present", "Underway", "recent", "underway"]

_WINDOW_S = 60.0
_KEPT_S = 2 * _WINDOW_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Underway:
    """A job that has not ended.

    Attributes:
        done: steps that are done, counted from the beginning of the run.
        steps: that the job has.
        steps_per_s: over the last minute, or as long as there are steps; None if none can be told.
        idle_s: seconds since the last step was done; None before the first.
        alive: workers that are there.
        workers: of the whole grid.
    """

    done: int
    steps: int
    steps_per_s: float | None
    idle_s: float | None
    alive: int
    workers: int

    @property
    def left_s(self) -> float | None:
        """Seconds that the other steps take at this rate; None if that cannot be told."""
        return (self.steps - self.done) / self.steps_per_s if self.steps_per_s else None

    def to_json(self) -> dict[str, object]:
        """Its form in ``holdfast inspect --format json``."""
        return {**dataclasses.asdict(self), "left_s": self.left_s}


@dataclass(slots=True)
class Present:
    """The workers that take part, or that are ready before the first generation."""

    workers: set[str] = field(default_factory=set)
    _formed: bool = False

    def hear(self, event: Event) -> None:
        """Takes an event into account; they are told in the order of time."""
        match event:
            case Installed(workers=workers):
                self.workers, self._formed = set(workers), True
            case WorkerReady(worker=worker) if not self._formed:
                self.workers.add(worker)
            case Detected(worker=worker) | Parted(worker=worker):
                self.workers.discard(worker)


def underway(timed: Sequence[Timed], now: float) -> Underway:
    """Returns how far a job is.

    Args:
        timed: its events in the order of time; of steps, those of the last minute and the one before are enough.
        now: in seconds of the log's clock.
    """
    events = [event for _, event in timed]
    started = [event for event in events if isinstance(event, JobStarted)]
    resumed = [event.step for event in events if isinstance(event, Resumed)]
    commits = report(timed).commits
    times = [time for _, time in commits]
    present = Present()
    for event in events:
        present.hear(event)
    return Underway(
        done=commits[-1][0] + 1 if commits else max(resumed, default=0),
        steps=started[-1].steps if started else 0,
        steps_per_s=_rate([time for time in times if time > now - _WINDOW_S], now),
        idle_s=now - max(times) if times else None,
        alive=len(present.workers),
        workers=started[-1].workers if started else 0,
    )


def recent(timed: Iterable[Timed], now: float) -> list[Timed]:
    """Returns what :func:`underway` needs of the events of a long run."""
    events = list(timed)
    last = max((time for time, event in events if isinstance(event, StepOps)), default=now)
    return [(at, event) for at, event in events if not isinstance(event, StepOps) or at >= min(last, now) - _KEPT_S]


def _rate(times: list[float], now: float) -> float | None:
    """Steps per second: from the first of these to now, so that a job that stands still becomes slower."""
    return (len(times) - 1) / (now - min(times)) if len(times) > 1 and now > min(times) else None
