"""A run directory that is looked at again and again, while others ask how the run is."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from holdfast.cli.following import read_news
from holdfast.errors import ConfigError
from holdfast.telemetry.events import Timed
from holdfast.telemetry.story import EVENTS, StoryReader

__all__ = ["Watched"]


class Watched(ABC):
    """A run, looked at again and again by one thread, and asked about by others.

    Args:
        run_dir: its directory, in which nothing may be yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._reader = StoryReader(run_dir)
        self._lock = threading.Lock()
        self.damage = ""
        """Why its logs cannot be read; empty if they can."""

    @abstractmethod
    def hear(self, news: list[Timed]) -> None:
        """Takes events into account that are new, in the order of time; nobody asks meanwhile."""

    def look(self) -> None:
        """Reads what has happened since."""
        with self._lock:
            try:
                self._read()
                self.damage = ""
            except (ConfigError, OSError) as error:
                self.damage = str(error)

    def _read(self) -> None:
        if not (self._run_dir / EVENTS).is_file():  # the job is yet to begin
            return
        self.hear(read_news(self._reader, self._run_dir))
        if damages := self._reader.damages():
            raise ConfigError("; ".join(damages))

    @contextlib.contextmanager
    def still(self) -> Iterator[float]:
        """What the clock of the run shows; nothing is heard meanwhile."""
        with self._lock:
            yield self._reader.now()
