"""One story of a run, of the logs of all its machines: told by the clock of the machine where it was begun."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from msgspec.structs import replace

from holdfast.core.nodes import NodeId
from holdfast.errors import StorageError
from holdfast.telemetry.clocks import Clocks, this_clock
from holdfast.telemetry.events import (
    ClockCompared,
    Event,
    EventReader,
    JobEnded,
    JobStarted,
    LogLine,
    Notice,
    Retold,
    Timed,
)

__all__ = ["EVENTS", "StoryReader", "node_log", "read_story"]

EVENTS = "events.jsonl"
"""The log of the machine where a run was begun, and of whoever has the same clock."""


def node_log(run_dir: Path, node: NodeId, clock: str) -> Path:
    """Returns where the processes of another machine's agent write down what happens, by their machine's clock."""
    folder = run_dir / f"node-{re.sub(r'[^A-Za-z0-9._-]', '-', node.name)}"
    return folder / f"events-{clock}-{node.nonce}.jsonl"


def read_story(run_dir: str | Path) -> list[Timed]:
    """Returns (time, event) of a run, in the order of time; see :func:`holdfast.telemetry.events.read_events`.

    What happened on other machines has the times of the clock where the run was begun. What cannot be told of them is
    said last.

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
    waiting: list[LogLine] = field(default_factory=list)
    damage: str = ""

    def read(self) -> list[LogLine]:
        """Returns the lines that are new; a log that is damaged must not hide the others."""
        try:
            news, self.damage = self.reader.read_lines(), ""
        except StorageError as error:
            news, self.damage = [], str(error)
        return news

    @property
    def gap(self) -> str:
        """What of it cannot be told, for people; empty if all can."""
        if self.damage:
            return f"its log cannot be read: {self.damage}"
        number = len(self.waiting)
        return f"{number} events are not told, as nothing says what time it was there" if number else ""


class StoryReader:
    """Reads the logs of a run that grow, each time what has been appended to them.

    Of a decision whose events come to be seen only after those of a later one, nothing more is told: as when a machine
    led whose log is seen late. Who reads all at once is told all.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._first = EventReader(run_dir / EVENTS)
        self._begin()

    def _begin(self) -> None:
        """Nothing was read so far."""
        self._logs: dict[Path, _NodeLog] = {}
        self._clocks = Clocks()
        self._retold = Retold()
        self._started: tuple[float, JobStarted] | None = None
        self._told_until = 0.0
        self._ended = False

    def read(self) -> list[Timed]:
        """Returns the events that are new, in the order of time; of a run that was begun anew all.

        Raises:
            StorageError: see :func:`read_story`.
        """
        lines = self._first.read_lines()
        if self._started is not None and any(isinstance(line.data, JobStarted) for line in lines):
            self._begin()
        self._learn(lines)
        for log in self._found():
            self._learn(news := log.read())
            log.waiting += news
        found = [(line.time, line, "") for line in lines]
        for log in self._logs.values():
            found += [(at, line, log.node) for at, line in self._placed(log)]
        told = [
            (at, _named(line.data, node)) for at, line, node in sorted(found, key=itemgetter(0)) if self._is_news(line)
        ]
        self._told_until = max([self._told_until, *(at for at, _ in told)])
        return told

    def gaps(self) -> list[Timed]:
        """Returns what cannot be told so far of other machines, and why; as of the end of what was told."""
        logs = self._logs.values()
        return [(self._told_until, Notice(worker=f"agent on {log.node}", text=gap)) for log in logs if (gap := log.gap)]

    def damages(self) -> list[str]:
        """Returns why logs of other machines cannot be read further, if any cannot."""
        return [f"node {log.node}: {log.damage}" for log in self._logs.values() if log.damage]

    def now(self) -> float:
        """Returns what the clock of the story shows now, as well as this machine can tell."""
        here = time.monotonic()
        if self._started is None:
            return here
        at, began = self._started
        if not began.clock or began.clock == this_clock():
            return here
        if (way := self._clocks.way(this_clock(), began.clock)) is not None:
            return self._clocks.told(here, way)
        return at + time.time() - began.wall_time

    def _found(self) -> Iterator[_NodeLog]:
        for path in sorted(self._run_dir.glob("node-*/events-*-*.jsonl")):
            if path not in self._logs:
                node, clock = path.parent.name.removeprefix("node-"), path.name.split("-")[1]
                self._logs[path] = _NodeLog(node, clock, EventReader(path))
            yield self._logs[path]

    def _learn(self, lines: list[LogLine]) -> None:
        for line in lines:
            if isinstance(line.data, ClockCompared):
                self._clocks.learn(line.time, line.data)
            elif isinstance(line.data, JobStarted):
                self._started = (line.time, line.data)

    def _placed(self, log: _NodeLog) -> list[tuple[float, LogLine]]:
        """What waits of a log, with its times by the clock of the story; nothing if these cannot be told."""
        if self._started is None or (way := self._clocks.way(log.clock, self._started[1].clock)) is None:
            return []
        lines, log.waiting = log.waiting, []
        return [(self._clocks.told(line.time, way), line) for line in lines]

    def _is_news(self, line: LogLine) -> bool:
        """Whether a line was not told before; that the job has ended, each agent says."""
        known = self._retold.knows(line.data, line.decision)
        if isinstance(line.data, JobEnded):
            known, self._ended = self._ended, True
        return not known


def _named(event: Event, node: str) -> Event:
    """An event, in which it is said whose agent or coordinator says something."""
    if node and isinstance(event, Notice) and event.worker.isalpha():
        return replace(event, worker=f"{event.worker} on {node}")
    return event
