"""``holdfast inspect --follow``: how far a running job is, and what happens to it, until it ends."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from holdfast.cli.arguments import hours
from holdfast.errors import ConfigError, HoldfastError, StorageError
from holdfast.parsing import parsing
from holdfast.runtime.launch.directory import led_elsewhere
from holdfast.runtime.rundir import owner
from holdfast.telemetry.events import Event, Installed, JobEnded, Timed
from holdfast.telemetry.shown import shown
from holdfast.telemetry.story import EVENTS, StoryReader
from holdfast.telemetry.underway import Underway, recent, underway

__all__ = ["Runner", "follow", "read_news", "tell_underway", "who_runs"]

_LOOK_S = 1.0
_EVERY_S = 10.0
_STOOD_STILL_S = 10.0


@dataclass(frozen=True, slots=True)
class Runner:
    """Who runs a job: a process of this machine, or (None) a coordinator on another one."""

    process: int | None

    def __str__(self) -> str:
        return "led from another machine" if self.process is None else f"process {self.process}"


def who_runs(run_dir: Path) -> Runner | None:
    """Returns who runs the job of a run directory; None: nobody does. It may take seconds to know.

    Raises:
        ConfigError: it cannot be found out.
    """
    if (process := owner(run_dir)) is not None:
        return Runner(process)
    try:
        return Runner(None) if led_elsewhere(run_dir) else None
    except HoldfastError as error:
        raise ConfigError(f"{run_dir}: whether its job goes on elsewhere is not known: {error}") from None


def read_news(reader: StoryReader, run_dir: Path) -> list[Timed]:
    """Returns the events of a run that its reader has not told yet, fit to be shown.

    Raises:
        ConfigError: its logs are none, or cannot be read.
    """
    try:
        timed = reader.read()
    except StorageError as error:
        raise ConfigError(str(error)) from None
    with parsing(lambda text: ConfigError(f"{run_dir / EVENTS}: is no log of events: {text}")):
        return [(at, shown(event)) for at, event in timed]


def tell_underway(who: Runner, job: Underway) -> str:
    """Returns a line on a running job.

    Args:
        who: runs it.
        job: how far it is.
    """
    text = f"running ({who}): {job.done} of {job.steps} steps done"
    if job.steps_per_s:
        text += f", {job.steps_per_s:.2f} steps/s over the last minute"
    if job.left_s is not None:
        text += f", {hours(round(job.left_s))} left"
    if job.idle_s is not None and job.idle_s >= _STOOD_STILL_S:
        text += f", the last one {hours(round(job.idle_s))} ago"
    return f"{text}, {job.alive} of {job.workers} workers"


def follow(run_dir: Path, tell: Callable[[Event, bool], str | None]) -> int:
    """Prints what happens to a job until it ends; returns 0 if it is done then, 1 if it ended otherwise, 130 at Ctrl-C.

    On a terminal one line is replaced every second; elsewhere lines are plain, and how far the job is stands in one
    every ten seconds.

    Args:
        run_dir: of the job.
        tell: what to say of an event, if anything; and whether it is one of the beginning.

    Raises:
        ConfigError: there is no run, or its log cannot be read.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the command's own says that every process is ended
    follower = _Follower(run_dir, tell)
    try:
        while (code := follower.look()) is None:
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        return 130
    finally:
        follower.end()
        signal.signal(signal.SIGINT, before)
    return code


class _Follower:
    """What was told of a job so far."""

    def __init__(self, run_dir: Path, tell: Callable[[Event, bool], str | None]) -> None:
        self._run_dir, self._tell = run_dir, tell
        self._terminal = sys.stdout.isatty()
        self._log, self._looked = run_dir / EVENTS, False
        self._reader = StoryReader(run_dir)
        self._events: list[Timed] = []
        self._origin: float | None = None
        self._formed = False
        self._runner: Runner | None = None
        self._gone = False
        """Whether nobody ran it at the last look."""
        self._shown, self._shown_at, self._open = -1, 0.0, False

    def look(self) -> int | None:
        """Tells what is new; returns the exit code once the job has ended."""
        who = self._who()  # before the log is read: whoever is gone now writes no more
        if not self._log.is_file():
            self._check_begins(who)
            return None
        news = read_news(self._reader, self._run_dir)
        for at, event in news:
            self._show_event(at, event)
        now = self._reader.now()
        self._events = recent(sorted([*self._events, *news], key=itemgetter(0)), now)
        if ended := [event for _, event in news if isinstance(event, JobEnded)]:
            self._tell_gaps()
            return 0 if ended[-1].outcome == "done" else 1
        gone, self._gone = self._gone, who is None
        if who is None:
            if not gone:  # whoever led it elsewhere says that it ends before agents write down that it has
                return None
            self._tell_gaps()
            self._stay("it has not ended, or was killed: no process runs it")
            return 1
        self._show(who, underway(self._events, now))
        return None

    def _who(self) -> Runner | None:
        """Who runs it; where that cannot be found out, as a store is away, whoever did."""
        try:
            self._runner = who_runs(self._run_dir)
        except ConfigError:
            if self._runner is None:
                raise
        return self._runner

    def _tell_gaps(self) -> None:
        for at, event in self._reader.gaps():
            self._show_event(at, event)

    def end(self) -> None:
        """Ends the line that is replaced."""
        if self._open:
            print(flush=True)
            self._open = False

    def _check_begins(self, who: Runner | None) -> None:
        """Without a log, a job may be about to begin one; a second look tells whether it has taken the directory."""
        if who is None and (self._looked or not self._run_dir.is_dir()):
            raise ConfigError(f"{self._run_dir}: is no run directory, it has no events.jsonl")
        self._looked = True

    def _show_event(self, at: float, event: Event) -> None:
        self._origin = at if self._origin is None else self._origin
        self._formed = self._formed or isinstance(event, Installed)
        if text := self._tell(event, not self._formed):
            self._stay(f"{at - self._origin:9.3f} s  {text}")

    def _show(self, who: Runner, job: Underway) -> None:
        now = time.monotonic()
        due = job.done != self._shown and now - self._shown_at >= _EVERY_S
        if not (self._terminal or due or self._shown < 0):
            return
        self._shown, self._shown_at = job.done, now
        if self._terminal:
            print(f"\r\x1b[K{tell_underway(who, job)}", end="", flush=True)
            self._open = True
        else:
            self._stay(tell_underway(who, job))

    def _stay(self, line: str) -> None:
        print(f"\r\x1b[K{line}" if self._open else line, flush=True)
        self._open = False
