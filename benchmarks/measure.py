"""What the benchmarks share: intervals, stamped result rows, time limits, CPU time and tables.

Light on purpose: processes that a benchmark starts import its main module again, so nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

__all__ = [
    "RESULTS",
    "ROOT",
    "Countdown",
    "Interval",
    "Recorder",
    "cpu_seconds",
    "interval",
    "print_table",
    "progress",
    "ratio_interval",
    "time_limit",
    "verdict",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
_RESAMPLES = 4000


def progress(text: str) -> None:
    """Prints a line for the person who waits; stdout is kept for the table."""
    print(f"[{time.strftime('%H:%M:%S')} load {os.getloadavg()[0]:.2f}] {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Countdown:
    """Tells how many of a benchmark's runs are done, and how long the others will take.

    Attributes:
        total: how many there are.
        seconds: what each is likely to take, as long as nothing is known.
        done: how many are over.
        began: when the first one did.
    """

    total: int
    seconds: float
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def next(self, text: str) -> None:
        """One more is done."""
        self.done += 1
        progress(f"{self.done}/{self.total}, {self._left()} left: {text}")

    def announce(self) -> None:
        """Nothing is done yet."""
        progress(f"{self.total} runs, about {self._left()}")

    def _left(self) -> str:
        each = (time.monotonic() - self.began) / self.done if self.done else self.seconds
        seconds = round(each * (self.total - self.done))
        return f"{seconds // 60} min {seconds % 60:02d} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median with its bootstrap 95 % confidence interval; all None without a value."""

    median: float | None
    low: float | None
    high: float | None
    count: int

    def show(self, unit: float = 1.0, digits: int = 1) -> str:
        """The interval as text, each number multiplied by ``unit``."""
        if self.median is None or self.low is None or self.high is None:
            return "no value"
        if self.count < 2:
            return f"{self.median * unit:.{digits}f} (1 run)"
        return f"{self.median * unit:.{digits}f} [{self.low * unit:.{digits}f}, {self.high * unit:.{digits}f}]"

    def to_json(self) -> dict[str, float | int | None]:
        """The interval as plain values."""
        return {"median": self.median, "low": self.low, "high": self.high, "count": self.count}


def interval(values: Sequence[float]) -> Interval:
    """Returns the median and its percentile-bootstrap interval; the resampling is seeded."""
    return _bootstrap([(value,) for value in values], lambda rows: statistics.median(row[0] for row in rows))


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Returns the ratio of medians of (numerator, denominator); a pair, run side by side, is resampled as one."""

    def ratio(rows: Sequence[tuple[float, ...]]) -> float:
        return statistics.median(row[0] for row in rows) / statistics.median(row[1] for row in rows)

    return _bootstrap(pairs, ratio)


def _bootstrap(
    rows: Sequence[tuple[float, ...]], statistic: Callable[[Sequence[tuple[float, ...]]], float]
) -> Interval:
    if not rows:
        return Interval(median=None, low=None, high=None, count=0)
    source = random.Random(0)
    found = sorted(statistic(source.choices(rows, k=len(rows))) for _ in range(_RESAMPLES))
    low, high = found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES) - 1]
    return Interval(median=statistic(rows), low=low, high=high, count=len(rows))


def verdict(found: Interval, target: float) -> str:
    """What the interval, not the median alone, says about a target that is to be kept below."""
    if found.low is None or found.high is None or found.count < 2:
        return "undecided"
    if found.high <= target:
        return "met"
    return "MISSED" if found.low > target else "within noise"


@dataclass(slots=True)
class Recorder:
    """Collects a benchmark's rows and writes ``results/NAME.json``.

    Attributes:
        name: of the benchmark.
        settings: what it was run with.
        rows: what was measured, each row with the machine, its load before and after, the share of processor time that
            the host gave to others meanwhile, the commit and the date.
    """

    name: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    _load: tuple[float, float, float] = field(default_factory=os.getloadavg)
    _ticks: tuple[int, int] = field(default_factory=lambda: _ticks())

    def begin(self) -> None:
        """Notes the load before whatever the next rows measure."""
        self._load, self._ticks = os.getloadavg(), _ticks()

    def add(self, **values: Any) -> dict[str, Any]:
        """Adds and returns a stamped row."""
        stolen, passed = (after - before for before, after in zip(self._ticks, _ticks(), strict=True))
        load = {"load_before": self._load, "load_after": os.getloadavg(), "stolen": stolen / passed if passed else None}
        row = {**values, **load, **_stamp()}
        self.rows.append(row)
        return row

    def write(self, summary: Any) -> Path:
        """Writes settings, summary and rows, intervals as plain values; an earlier file is replaced as a whole."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        document = {"benchmark": self.name, "settings": self.settings, "summary": summary, "rows": self.rows}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(document, indent=1, default=_plain) + "\n")
        temporary.replace(path)
        progress(f"wrote {path.relative_to(ROOT)}")
        return path


def _plain(value: object) -> object:
    if isinstance(value, Interval):
        return value.to_json()
    raise TypeError(f"{value!r} cannot be written as JSON")


def _ticks() -> tuple[int, int]:
    """Ticks of all processors that the host of this virtual machine gave to others, and all that passed."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def _stamp() -> dict[str, Any]:
    return {
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count()},
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _commit() -> str:
    """The commit, with ``+`` if the sources differ from it."""
    try:
        commit = _git("rev-parse", "--short", "HEAD").strip()
        return commit + ("+" if _git("status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends what runs too long by SIGTERM to ourselves, which Holdfast's agent turns into an orderly end.

    Raises:
        TimeoutError: the limit was reached outside an agent.
    """

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGTERM, late)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Returns user and system time of these processes together, all their threads included (10 ms resolution each)."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table to stdout, columns as wide as their content."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()
