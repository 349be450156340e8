"""``holdfast track``: tells a run to trackers, such as TensorBoard, while it goes on or afterwards."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import msgspec
from msgspec.structs import replace

from holdfast.cli.watched import Watched
from holdfast.errors import ConfigError
from holdfast.parsing import parsing
from holdfast.runtime.hardening import write_private
from holdfast.telemetry.events import JobStarted, Timed
from holdfast.telemetry.story import EVENTS
from holdfast.telemetry.tracking import Happening, Stepped, Tracking
from holdfast.trackers.named import BUILT_IN, check_names, folder_of
from holdfast.trackers.port import Tracker, tell

__all__ = ["add_track_parser"]

_LOOK_S = 1.0
_TOLD = "told.json"


def add_track_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``track`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "track",
        help="tell a run to TensorBoard, tables or a tracker of your own",
        description="Tells trackers of a run, each step once and in order: loss, learning rate, norm of the gradient, "
        "samples per second, memory, evaluations, losses of workers and checkpoints. It reads the run directory, "
        "wherever that is seen, until the job has ended; nothing that trains waits for it, or fails with it. Ended in "
        "between, it goes on where it was when it is begun again. It returns 0 if the job is done then and all were "
        "told, else 1; 2 if no tracker can be told any more.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory, also of a job that is yet to begin")
    parser.add_argument(
        "--to",
        metavar="TRACKER",
        action="append",
        required=True,
        help="csv (steps.csv, evaluations.csv), tensorboard, wandb (offline), mlflow (files), or file.py:Class or "
        "module:Class of a holdfast.Tracker of your own; may be repeated",
    )
    parser.add_argument("--out", metavar="DIR", help="where each has a folder; default: RUN_DIR/trackers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tells trackers until the job has ended; returns what the description says, or 130, or 143 at SIGTERM."""
    run_dir = Path(args.run_dir)
    out = run_dir / "trackers" if args.out is None else Path(args.out)
    told = [_Told(name, make, out / folder_of(name)) for name, make in _find(args.to).items()]
    watched = _Watched(run_dir, told)
    with _Ending() as ending:
        try:
            if not (run_dir / EVENTS).is_file():
                print(f"{run_dir}: waits for its job to begin", flush=True)
            how = _follow(watched, ending)
        finally:
            for each in told:
                each.close()
    print(f"{watched.steps} steps; {how}")
    if ending.number is not None and not watched.outcome:
        return 128 + ending.number
    if all(each.failed for each in told):
        return 2
    return int(watched.outcome != "done" or any(each.failed for each in told))


class _Ending:
    """SIGINT and SIGTERM: at the first one trackers are told what there is, and closed; the second one ends at once.

    Attributes:
        number: of the first one; None: there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._came = threading.Event()
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def __enter__(self) -> _Ending:
        for number, was in self._before.items():
            if was is not signal.SIG_IGN:
                signal.signal(number, self._end)
        return self

    def __exit__(self, *error: object) -> None:
        for number, was in self._before.items():
            signal.signal(number, was)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise SystemExit(128 + number)
        self.number = number
        self._came.set()

    def within(self, limit_s: float) -> bool:
        """Waits for so long, or until the first one comes; returns whether it has."""
        return self._came.wait(limit_s)


def _follow(watched: _Watched, ending: _Ending) -> str:
    """Tells what happens until nothing more does; returns how that is."""
    complained, gone = "", 0
    while not watched.failed:
        heard, ends = watched.heard, ending.within(0)
        watched.look()
        if watched.damage not in ("", complained):
            complained = watched.damage
            print(f"holdfast: {complained}", file=sys.stderr, flush=True)
        if watched.outcome and (
            ends or watched.heard == heard
        ):  # what is seen late, as of other machines, was waited for
            watched.end()
            return f"the job has ended: {watched.outcome}"
        gone = gone + 1 if watched.heard == heard and watched.is_gone() else 0
        if gone > 1:  # whoever ended it may have written that down while it was looked for
            watched.end()
            return "the job has not ended, or was killed: no process that can be found runs it"
        if ends:
            return "the job goes on, and is told from there when it is tracked again"
        ending.within(_LOOK_S)
    return "no tracker is left"


def _find(names: list[str]) -> dict[str, type[Tracker]]:
    """Returns the class of each tracker.

    Raises:
        ConfigError: there is none of this name, or two would have one folder.
    """
    check_names(names, "--to")
    return {name: BUILT_IN[name] if name in BUILT_IN else _own(name) for name in names}


def _own(name: str) -> type[Tracker]:
    from holdfast.runtime.engine.foreign import load_target

    made = load_target(name, "--to")
    if not (isinstance(made, type) and issubclass(made, Tracker)):
        raise ConfigError(f"--to {name}: is no class of trackers; expected one that is made of holdfast.Tracker")
    return made


class _Position(msgspec.Struct, frozen=True):
    """What of an attempt was told, and is kept.

    Attributes:
        began: which attempt, by when it began.
        backs: how often steps had been taken back.
        step: the newest since; -1: none.
        others: how many there were of each other kind.
    """

    began: float
    backs: int = 0
    step: int = -1
    others: dict[str, int] = {}


class _Told:
    """A tracker, and how far it was told.

    Attributes:
        failed: why nothing more can be told it; empty if it can.
    """

    def __init__(self, name: str, make: type[Tracker], folder: Path) -> None:
        self._name, self._make, self._folder = name, make, folder
        self._tracker: Tracker | None = None
        self._job: JobStarted | None = None
        self._known, self._at = _Position(0.0), _Position(0.0)
        self._begun, self._new = False, False
        self._lock: int | None = None
        self.failed = ""

    def tell(self, happening: Happening, backs: int) -> None:
        """Tells it, unless it was told before; ``backs``: how often steps were taken back in this attempt."""
        if self.failed:
            return
        with self._failing():
            if isinstance(happening, JobStarted):
                self._start(happening)
                return
            if self._tracker is None or self._job is None:  # the log does not begin with its beginning
                return
            at, new = self._behind(happening, backs)
            if new and not self._begun:  # what went before this was told, and kept
                tell(self._tracker, self._job)
                self._begun = True
            if new:
                tell(self._tracker, happening)
                self._new = True
            self._at = at  # not before: it may have been ended in the middle of that

    def _behind(self, happening: Happening, backs: int) -> tuple[_Position, bool]:
        """Where it is once it was told of this; and whether that is new to it."""
        at, known = self._at, self._known
        if isinstance(happening, Stepped):
            new = (backs, happening.step) > (known.backs, known.step)
            return replace(at, backs=backs, step=happening.step), new
        kind = type(happening).__name__
        number = at.others.get(kind, 0) + 1
        return replace(at, others={**at.others, kind: number}), number > known.others.get(kind, 0)

    def _start(self, job: JobStarted) -> None:
        """Another attempt begins; the folder of the one before has gone with it."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._claim()
        self._tracker = self._make(self._folder)
        known = None if self._tracker.anew else self._read()
        self._job, self._begun, self._at = job, False, _Position(job.wall_time)
        self._known = known if known is not None and known.began == job.wall_time else self._at

    def _claim(self) -> None:
        """Takes the folder, for as long as we live.

        Raises:
            ConfigError: another process tells a tracker there.
        """
        self._lock = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self._folder}: another `holdfast track` writes there; expected --out") from None

    def _read(self) -> _Position | None:
        path = self._folder / _TOLD
        if not path.is_file():
            return None
        with parsing(lambda text: ConfigError(f"{path}: {text}; remove it to tell all again"), OSError):
            return msgspec.json.decode(path.read_bytes(), type=_Position)

    def keep(self) -> None:
        """Sees to it that what was told is kept."""
        if self.failed or self._tracker is None or not self._new:
            return
        with self._failing():
            self._tracker.flush()
            if not self._tracker.anew and self._folder.is_dir():  # else an attempt has just been set aside, and is over
                write_private(self._folder / _TOLD, msgspec.json.encode(self._at))
            self._new = False

    def close(self) -> None:
        """Nothing more is told it."""
        if self._tracker is not None:
            self.keep()
            with self._failing():
                self._tracker.close()
        self._tracker = None
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever it raises is told, and is the end of it."""
        from holdfast.runtime.engine.foreign import one_line

        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.failed = f"tracker {self._name} failed: {error if isinstance(error, ConfigError) else one_line(error)}"
            print(f"holdfast: {self.failed}", file=sys.stderr, flush=True)


class _Watched(Watched):
    """A run that is told to trackers.

    Attributes:
        heard: how many events there were.
        steps: how many steps there were.
    """

    def __init__(self, run_dir: Path, told: list[_Told]) -> None:
        super().__init__(run_dir)
        self._tracking, self._told = Tracking(), told
        self.heard = self.steps = 0

    @property
    def failed(self) -> bool:
        """Whether no tracker is left."""
        return all(each.failed for each in self._told)

    def hear(self, news: list[Timed]) -> None:
        """See Watched.hear."""
        self.heard += len(news)
        self._tell(happening for at, event in news for happening in self._tracking.hear(at, event))

    def end(self) -> None:
        """Nothing more comes: tells what waited for more, and what cannot be told."""
        self._tell(self._tracking.end())
        for gap in self.gaps():
            print(f"holdfast: {gap}", file=sys.stderr, flush=True)

    def _tell(self, happenings: Iterable[Happening]) -> None:
        for happening in happenings:
            self.steps += isinstance(happening, Stepped)
            for each in self._told:
                each.tell(happening, self._tracking.backs)
        for each in self._told:
            each.keep()
