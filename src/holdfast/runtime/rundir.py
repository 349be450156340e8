"""A run's directory: taken by one process at a time, and by one attempt after another.

What lies at its top is of the newest attempt. Before the next one begins, that is set aside, so every attempt has files
of its own and each folder of ``attempts`` can be inspected like a run directory:

    runs/gpt/attempts/0001/job.yaml, events.jsonl, control.db, ...
    runs/gpt/job.yaml, events.jsonl, control.db, summary.json, final/
    runs/gpt/checkpoints/, decisions/
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from holdfast.errors import ConfigError
from holdfast.runtime.hardening import PART

__all__ = ["RunDirLock", "attempt_folder", "attempts", "job_files", "owner"]

_LOCK = "lock"
_JOB = "job.yaml"
_BEGUN = (_LOCK, f".{_JOB}{PART}")
"""What lies in a directory that was taken, and in which nothing else was done before its process died."""
_LOGS = "logs"
_OF_AN_ATTEMPT = (
    "profile.json",
    "events.jsonl",
    "summary.json",
    "control.db*",
    "stacks-*.txt",
    "plans",
    "final",
    "job-id",
    "trackers",
    "trackers.log",
    "node-*",
    _JOB,  # the last: while it is there, not all was set aside
)


def attempts(run_dir: Path) -> tuple[Path, ...]:
    """Returns the folders of the earlier attempts in a run directory, the oldest first."""
    return tuple(sorted(folder for folder in (run_dir / "attempts").glob("[0-9]*") if folder.is_dir()))


def attempt_folder(run_dir: Path, number: int) -> Path:
    """Returns where an earlier attempt is; the first one has the number 1."""
    return run_dir / "attempts" / f"{number:04d}"


def job_files(run_dir: Path) -> tuple[Path, ...]:
    """Returns the job files of all attempts in a run directory, the newest first."""
    places = (*attempts(run_dir), run_dir)
    return tuple(path for place in reversed(places) if (path := place / _JOB).is_file())


def owner(run_dir: Path) -> int | None:
    """Returns the process of this machine that has a run directory; None if none has.

    The lock itself is left alone: whoever tried it could be in the way of a job that begins.
    """
    try:
        pid = None
        lock = (run_dir / _LOCK).stat()
        pid = int((run_dir / _LOCK).read_text()[:20])
        files = [os.stat(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()]
    except PermissionError:
        return pid  # of another user, and alive
    except (OSError, ValueError):
        return None
    return pid if any((file.st_dev, file.st_ino) == (lock.st_dev, lock.st_ino) for file in files) else None


class RunDirLock:
    """A run directory that is ours as long as this is not closed. The kernel gives it up if we die.

    Args:
        run_dir: the directory; it need not exist.
        flag: what names it on the command line, for messages.
    """

    def __init__(self, run_dir: Path, flag: str = "--run-dir") -> None:
        self._run_dir, self._flag = run_dir, flag
        self._file: int | None = None

    def __enter__(self) -> RunDirLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None

    def take(self) -> None:
        """Makes the directory, if need be, and takes it; nothing happens if we have it already.

        Raises:
            ConfigError: another process has it, or it cannot be made or written.
        """
        if self._file is not None:
            return
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(self._run_dir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"{self._flag} {self._run_dir}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 20).decode("ascii", "replace").strip()
            os.close(file)
            raise ConfigError(
                f"{self._flag} {self._run_dir}: another holdfast (process {owner or 'unknown'}) trains there; wait "
                "until it has ended, or choose another directory"
            ) from None
        except OSError as error:
            os.close(file)
            raise ConfigError(
                f"{self._flag} {self._run_dir}: its file system locks no files ({error.strerror}), so that nothing "
                "would keep another holdfast from training there; choose a directory on another one"
            ) from None
        self._file = file  # whatever comes now, it is given up when this is closed
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, b"%d\n" % os.getpid(), 0)
        except OSError as error:
            raise ConfigError(f"{self._flag} {self._run_dir}: cannot be written: {error.strerror}") from None

    def check_empty(self) -> None:
        """Raises ConfigError if there is anything in the directory."""
        if any(path.name not in _BEGUN for path in self._run_dir.iterdir()):
            raise ConfigError(
                f"--run-dir {self._run_dir}: is not empty; choose a new directory, or go on with what is there by "
                "--resume auto; nothing was overwritten"
            )

    def set_aside(self) -> None:
        """Moves what the newest attempt left into a folder of its own; its logs go, as no other attempt can read them.

        Raises:
            ConfigError: the directory holds something, and it is no run's.
            OSError: something cannot be moved.

        After failure: safe to repeat, also by another process; the attempt is then in one folder all the same.
        """
        if not (self._run_dir / _JOB).exists():
            if not attempts(self._run_dir):
                self._check_no_strangers()
            return
        shutil.rmtree(self._run_dir / _LOGS, ignore_errors=True)
        target = self._open_folder()
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self._files():
            path.rename(target / path.name)

    def _check_no_strangers(self) -> None:
        """An empty directory, or one with certificates or checkpoints only, is the beginning of a run."""
        if any(path.name not in (*_BEGUN, "certs", "checkpoints", "decisions") for path in self._run_dir.iterdir()):
            raise ConfigError(
                f"--run-dir {self._run_dir}: is not empty and holds no run; choose a new directory, nothing was "
                "overwritten"
            )

    def _open_folder(self) -> Path:
        """Where the newest attempt goes: into a new folder, or the last one if that was not finished."""
        before = attempts(self._run_dir)
        if before and not (before[-1] / _JOB).exists():
            return before[-1]
        return attempt_folder(self._run_dir, len(before) + 1)

    def _files(self) -> Iterator[Path]:
        for pattern in _OF_AN_ATTEMPT:
            yield from sorted(self._run_dir.glob(pattern))
