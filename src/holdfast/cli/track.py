"""``holdfast track``: tells a run to trackers, such as TensorBoard, while it goes on or afterwards."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import msgspec

from holdfast.cli.watched import Watched
from holdfast.errors import ConfigError
from holdfast.parsing import parsing
from holdfast.runtime.hardening import write_private
from holdfast.telemetry.events import JobStarted, Timed
from holdfast.telemetry.tracking import Happening, Stepped, Tracking
from holdfast.trackers.csv import CsvTracker
from holdfast.trackers.mlflow import MlflowTracker
from holdfast.trackers.port import Tracker, tell
from holdfast.trackers.tensorboard import TensorBoardTracker
from holdfast.trackers.wandb import WandbTracker

__all__ = ["add_track_parser"]

_LOOK_S = 1.0
_BUILT_IN: dict[str, type[Tracker]] = {
    "csv": CsvTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
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
    """Tells trackers until the job has ended; returns what the description says, or 130."""
    run_dir = Path(args.run_dir)
    out = run_dir / "trackers" if args.out is None else Path(args.out)
    told = [_Told(name, make, out / _label(name)) for name, make in _find(args.to).items()]
    watched = _Watched(run_dir, told)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _follow(watched, told)
    finally:
        for each in told:
            each.close()


def _follow(watched: _Watched, told: list[_Told]) -> int:
    complained = ""
    while True:
        watched.look()
        if watched.damage not in ("", complained):
            complained = watched.damage
            print(f"holdfast: {complained}", file=sys.stderr, flush=True)
        if all(each.failed for each in told):
            return 2
        if watched.outcome:
            print(f"{watched.steps} steps told; the job has ended: {watched.outcome}")
            return int(watched.outcome != "done" or any(each.failed for each in told))
        if watched.is_gone():
            print(f"{watched.steps} steps told; the job has not ended, or was killed: no process runs it")
            return 1
        time.sleep(_LOOK_S)


def _find(names: list[str]) -> dict[str, type[Tracker]]:
    """Returns the class of each tracker.

    Raises:
        ConfigError: there is none of this name, or two would have one folder.
    """
    found: dict[str, type[Tracker]] = {}
    for name in names:
        if _label(name) in map(_label, found):
            raise ConfigError(f"--to {name}: there is a tracker of this name already; expected each once")
        made = found[name] = _BUILT_IN[name] if name in _BUILT_IN else _own(name)
        if made.needs and find_spec(made.needs) is None:
            raise ConfigError(f"--to {name}: {made.needs} is not installed; expected pip install 'holdfast[{name}]'")
    return found


def _own(name: str) -> type[Tracker]:
    from holdfast.runtime.engine.foreign import load_target

    if ":" not in name:
        known = ", ".join(_BUILT_IN)
        raise ConfigError(f"--to {name}: is no tracker; expected {known}, or file.py:Class of your own")
    made = load_target(name, "--to")
    if not (isinstance(made, type) and issubclass(made, Tracker)):
        raise ConfigError(f"--to {name}: is no class of trackers; expected one that is made of holdfast.Tracker")
    return made


def _label(name: str) -> str:
    """The name of its folder."""
    return name.rpartition(":")[2]


class _Position(msgspec.Struct, frozen=True):
    """Of which attempt (by when it began) how many things were told, and are kept."""

    began: float
    told: int


class _Told:
    """A tracker, and how far it was told."""

    def __init__(self, name: str, make: type[Tracker], folder: Path) -> None:
        self._name, self._make, self._folder = name, make, folder
        self._tracker: Tracker | None = None
        self._number, self._skip = 0, 0
        self._job: JobStarted | None = None
        self._begun, self._new = False, False
        self.failed = ""
        """Why nothing more can be told it; empty if it can."""

    def tell(self, happening: Happening) -> None:
        """Tells it, unless it was told before."""
        if self.failed:
            return
        try:
            if isinstance(happening, JobStarted):
                self._start(happening)
            self._number += 1
            if self._tracker is not None and self._job is not None and self._number > self._skip:
                if not self._begun and happening is not self._job:  # what went before it was told, and kept
                    tell(self._tracker, self._job)
                tell(self._tracker, happening)
                self._begun = self._new = True
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _start(self, job: JobStarted) -> None:
        """Another attempt: its folder may have gone with the one before."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._tracker is None:
            self._tracker = self._make(self._folder)
        known = None if self._tracker.anew else self._position()
        self._job, self._number, self._begun = job, 0, False
        self._skip = known.told if known is not None and known.began == job.wall_time else 0

    def _position(self) -> _Position | None:
        path = self._folder / _TOLD
        if not path.is_file():
            return None
        with parsing(lambda text: ConfigError(f"{path}: {text}; remove it to tell all again"), OSError):
            return msgspec.json.decode(path.read_bytes(), type=_Position)

    def keep(self) -> None:
        """Sees to it that what was told is kept."""
        if self.failed or self._tracker is None or self._job is None or not self._new:
            return
        try:
            self._tracker.flush()
            if not self._tracker.anew:
                position = _Position(self._job.wall_time, self._number)
                write_private(self._folder / _TOLD, msgspec.json.encode(position))
            self._new = False
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def close(self) -> None:
        """Nothing more is told it."""
        if self._tracker is None:
            return
        try:
            self._tracker.close()
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        from holdfast.runtime.engine.foreign import one_line

        if not self.failed:
            self.failed = f"tracker {self._name} failed: {error if isinstance(error, ConfigError) else one_line(error)}"
            print(f"holdfast: {self.failed}", file=sys.stderr, flush=True)


class _Watched(Watched):
    """A run that is told to trackers."""

    def __init__(self, run_dir: Path, told: list[_Told]) -> None:
        super().__init__(run_dir)
        self._tracking, self._told = Tracking(), told
        self.steps = 0

    def hear(self, news: list[Timed]) -> None:
        """See Watched.hear."""
        for at, event in news:
            for happening in self._tracking.hear(at, event):
                self.steps += isinstance(happening, Stepped)
                for each in self._told:
                    each.tell(happening)
        for each in self._told:
            each.keep()
