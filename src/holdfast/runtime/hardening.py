"""What every process of a job owes to strangers on the same machine: room, silence, and private files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import stat
import sys
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.storage.blobs import synchronise

__all__ = [
    "PART",
    "create_private",
    "forbid_core_dumps",
    "harden",
    "make_private",
    "outlast_readers",
    "raise_file_limit",
    "write_private",
]

PART = ".part"
"""What the name of a file ends with that is being written."""

_READER_GONE = (errno.EPIPE, errno.EIO)
"""What a pipe says whose other end is closed, and a terminal that is."""

_NO_DUMP = 1
"""As a limit of core files: no file fits, and a program that the kernel pipes dumps to is not even started (0 means
that to files alone). Unlike an undumpable process, one with this limit can still read its own /proc/self."""


def harden() -> None:
    """Makes a process of a job ready for strangers; what it writes from now on is private to the user."""
    raise_file_limit()
    forbid_core_dumps()
    os.umask(0o077)


class _Lasting(io.FileIO):
    """Writes into nothing from the moment on at which nobody can read any more what it is written to."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return memoryview(data).nbytes


def outlast_readers() -> None:
    """From now on printing fails for nobody because the reader of what this process prints has gone away.

    Streams that somebody has put in the place of Python's own stay.
    """
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        sys.stdout = _lasting(sys.__stdout__)
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _lasting(sys.__stderr__)


def _lasting(stream: Any) -> io.TextIOWrapper:
    stream.flush()
    raw: Any = _Lasting(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def raise_file_limit() -> None:
    """Lets this process open as many files as the system lets it: connections of strangers take some."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def forbid_core_dumps() -> None:
    """Sees to it that a crash leaves no memory, and so no token, on disk or in a crash reporter."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limit = _NO_DUMP if hard == resource.RLIM_INFINITY else min(_NO_DUMP, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, hard))


def make_private(folder: Path) -> None:
    """Makes a folder that only its user can enter; one that is there becomes so.

    Raises:
        ConfigError: it belongs to somebody else, who could change what is written there.
        OSError: it is no folder, or cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{folder}: belongs to user {found.st_uid}, not to us; choose another folder")
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def create_private(path: str, flags: int) -> int:
    """Opens a file as ``open`` asks its ``opener`` to; if it is made, only its user can read it."""
    return os.open(path, flags, 0o600)


def settle(made: Path) -> None:
    """Makes a file private, or a folder with all that is in it, and has it on the disk."""
    if made.is_dir():
        for path in sorted(made.iterdir()):
            settle(path)
        made.chmod(0o700)
        synchronise(made)
        return
    made.chmod(0o600)
    with made.open("rb") as file:
        os.fsync(file.fileno())


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its user can read, whole or not at all; what was there before is replaced.

    Raises:
        OSError: it cannot be written.

    After failure: what a process that died meanwhile left beside it is replaced by the next one.
    """
    part = path.with_name(f".{path.name}{PART}")
    try:
        part.unlink(missing_ok=True)
        with open(part, "xb", opener=create_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
