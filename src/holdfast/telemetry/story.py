"""One story of a run, of the logs of all its machines: told by the clock of the machine where it was begun."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from holdfast.errors import StorageError
from holdfast.telemetry.clocks import Clocks, this_clock
from holdfast.telemetry.events import (
    ClockCompared,
    Event,
    EventReader,
    JobEnded,
    JobStarted,
    Line,
    Notice,
    Retold,
    Timed,
)

__all__ = ["EVENTS", "StoryReader", "node_log", "read_story"]

EVENTS = "events.jsonl"
"""The log of the machine where a run was begun, and of whoever has the same clock."""


def node_log(run_dir: Path, node: str, clock: str) -> Path:
    """Returns where the processes of another machine write down what happens: one file for each clock."""
    return run_dir / f"node-{re.sub(r'[^A-Za-z0-9._-]', '-', node)}" / f"events-{clock}.jsonl"


def read_story(run_dir: str | Path) -> list[Timed]:
    """Returns (time, event) of a run, in the order of time; see :func:`holdfast.telemetry.events.read_events`.

    What happened on other machines has the times of the clock where the run was begun.

    Raises:
        StorageError: the log of where it was begun cannot be read, or is none.
    """
    reader = StoryReader(Path(run_dir))
    return [*reader.read(), *reader.gaps()]


@dataclass(slots=True)
class _NodeLog:
    """The log of another machine.

    Attributes:
        node: its name.
        clock: by which its lines are told.
        reader: of the file.
        waiting: lines that cannot be placed yet, as nothing is known of that clock.
        damage: why no more can be read of it; empty if it can.
    """

    node: str
    clock: str
    reader: EventReader
    waiting: list[Line] = field(default_factory=list)
    damage: str = ""

    def read(self) -> list[Line]:
        """Returns the lines that are new; those of other machines are told, whatever this one has written."""
        try:
            news = self.reader.read_lines()
        except StorageError as error:
            self.damage = str(error)
            return []
        self.damage = ""
        self.waiting += news
        return news

    @property
    def gap(self) -> str:
        """What of it cannot be told, for people; empty if all can."""
        if self.damage:
            return f"its log cannot be read: {self.damage}"
        return (
            f"{len(self.waiting)} events are not told, as nothing says what time it was there" if self.waiting else ""
        )


class StoryReader:
    """Reads the logs of a run that grow, each time what has been appended to them."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._first = EventReader(run_dir / EVENTS)
        self._logs: dict[Path, _NodeLog] = {}
        self._clocks = Clocks()
        self._retold = Retold()
        self._started: Timed | None = None
        self._ended = False

    def read(self) -> list[Timed]:
        """Returns the events that are new, in the order of time.

        Raises:
            StorageError: see :func:`read_story`.
        """
        lines = self._first.read_lines()
        self._learn(lines)
        for log in self._found():
            self._learn(log.read())
        for log in self._logs.values():
            lines += self._placed(log)
        return [(at, event) for at, event in self._retold.news(sorted(lines, key=_when)) if self._tells(event)]

    def gaps(self) -> list[Timed]:
        """Returns what cannot be told so far of other machines, and why."""
        at = 0.0 if self._started is None else self._started[0]
        logs = self._logs.values()
        return [(at, Notice(worker=f"agent on {log.node}", text=gap)) for log in logs if (gap := log.gap)]

    def now(self) -> float:
        """Returns what the clock of the story shows now, as well as this machine can tell."""
        here = time.monotonic()
        if self._started is None:
            return here
        at, began = self._started
        assert isinstance(began, JobStarted), "as it was kept"
        if not began.clock or began.clock == this_clock():
            return here
        if (way := self._clocks.way(this_clock(), began.clock)) is not None:
            return self._clocks.told(here, way)
        return at + time.time() - began.wall_time

    def _found(self) -> Iterator[_NodeLog]:
        for path in sorted(self._run_dir.glob("node-*/events-*.jsonl")):
            if path not in self._logs:
                node, clock = path.parent.name.removeprefix("node-"), path.stem.removeprefix("events-")
                self._logs[path] = _NodeLog(node, clock, EventReader(path))
            yield self._logs[path]

    def _learn(self, lines: list[Line]) -> None:
        for line in lines:
            if isinstance(line.data, ClockCompared):
                self._clocks.learn(line.time, line.data)
            elif isinstance(line.data, JobStarted):
                self._started = (line.time, line.data)

    def _placed(self, log: _NodeLog) -> list[Line]:
        """What waits of a log, by the clock of the story, if that can be told."""
        began = None if self._started is None else self._started[1]
        if not isinstance(began, JobStarted) or (way := self._clocks.way(log.clock, began.clock)) is None:
            return []
        lines, log.waiting = log.waiting, []
        return [
            replace(each, time=self._clocks.told(each.time, way), data=_named(each.data, log.node)) for each in lines
        ]

    def _tells(self, event: Event) -> bool:
        """Whether an event is one of the story: each agent says that the job has ended."""
        again = isinstance(event, JobEnded) and self._ended
        self._ended = self._ended or isinstance(event, JobEnded)
        return not again


def _when(line: Line) -> float:
    return line.time


def _named(event: Event, node: str) -> Event:
    """An event, in which it is said whose agent or coordinator says something."""
    if isinstance(event, Notice) and event.worker.isalpha():
        return replace(event, worker=f"{event.worker} on {node}")
    return event
