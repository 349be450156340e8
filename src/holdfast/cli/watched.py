"""A run directory that is looked at again and again, while others ask how the run is."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from holdfast.cli.following import read_news, who_runs
from holdfast.errors import ConfigError
from holdfast.plain import one_line
from holdfast.runtime.launch.directory import seen_by_others
from holdfast.telemetry.clocks import this_clock
from holdfast.telemetry.events import JobEnded, JobStarted, Notice, Timed
from holdfast.telemetry.story import EVENTS, StoryReader

__all__ = ["Watched"]

_SILENT_S = 10.0
_AT_ONCE = 5000


class Watched(ABC):
    """A run, looked at again and again by one thread, and asked about by others.

    Args:
        run_dir: its directory, in which nothing may be yet.

    Attributes:
        damage: why its logs cannot be read; empty if they can.
        read: whether the first look is over.
        begun: whether it has begun.
        outcome: how its newest attempt has ended; empty if it has not.
        here: whether it was begun on this machine, as far as its clock tells.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._reader = StoryReader(run_dir)
        self._lock = threading.Lock()
        self.damage, self.read = "", False
        self.begun, self.outcome = False, ""
        self._heard, self._asked = time.monotonic(), 0.0
        self._gone, self.here = False, True
        self._ahead = 0.0

    @abstractmethod
    def hear(self, news: list[Timed]) -> None:
        """Takes events into account that are new, at least one, in the order of time; nobody asks meanwhile."""

    def look(self) -> None:
        """Reads what has happened since; whoever asks meanwhile waits no longer than a part of that takes."""
        try:
            self._read()
            self.damage = ""
        except (ConfigError, OSError) as error:
            self.damage = one_line(str(error))
        self.read = True

    def _read(self) -> None:
        if not (self._run_dir / EVENTS).is_file():  # the job is yet to begin
            return
        if news := read_news(self._reader, self._run_dir):
            self._heard = time.monotonic()
        with self._lock:
            self._ahead = self._reader.now() - time.monotonic()
        for first in range(0, len(news), _AT_ONCE):
            with self._lock:
                self._hear(news[first : first + _AT_ONCE])
        if damages := self._reader.damages():
            raise ConfigError("; ".join(damages))

    def _hear(self, news: list[Timed]) -> None:
        for _, event in news:
            if isinstance(event, JobStarted):
                self.begun, self.outcome = True, ""
                self.here = event.clock in ("", this_clock())
            elif isinstance(event, JobEnded):
                self.outcome = event.outcome
        self.hear(news)

    def is_gone(self) -> bool:
        """Whether nobody runs the job any more, though it has not ended; of one that is silent it is found out.

        It may take seconds; where it cannot be found out, as of a job that was begun on another machine and tells no
        others of itself, what was known last holds.
        """
        now = time.monotonic()
        if now - self._heard < _SILENT_S or not self.begun or self.outcome:
            self._gone = False
        elif now - self._asked >= _SILENT_S:
            self._asked = now
            with contextlib.suppress(ConfigError):
                if self.here or seen_by_others(self._run_dir) is not None:
                    self._gone = who_runs(self._run_dir) is None
        return self._gone

    def gaps(self) -> list[str]:
        """Returns what cannot be told of other machines, and why."""
        return [f"{event.worker}: {event.text}" for _, event in self._reader.gaps() if isinstance(event, Notice)]

    @contextlib.contextmanager
    def still(self) -> Iterator[float]:
        """What the clock of the run shows; nothing is heard meanwhile."""
        with self._lock:
            yield time.monotonic() + self._ahead
