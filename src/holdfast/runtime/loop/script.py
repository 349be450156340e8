"""Runs a user's script in this process, as ``python SCRIPT ARGS...`` would."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import current_process
from pathlib import Path
from types import TracebackType

from holdfast.config.job import ScriptModel
from holdfast.errors import ConfigError
from holdfast.runtime.loop.forking import look_after_forks

__all__ = ["print_trace", "quiet", "run_script", "told"]


_LIBRARIES = {"site-packages", "dist-packages"}


def run_script(script: ScriptModel, ours: Callable[[], Iterable[int]] = tuple) -> None:
    """Runs it to its end, in the main thread.

    Args:
        script: what is run.
        ours: finds the descriptors that no process which it forks is to have.

    Raises:
        ConfigError: it cannot be read.
        BaseException: whatever it raises, but for ``sys.exit(0)``.
    """
    path = Path(script.path)
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such script")
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may load data in processes of its own
    look_after_forks(ours)
    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(script.path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def told(script: ScriptModel, error: BaseException) -> str:
    """Returns what a script raised, for people: what, and where in it."""
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    own = [frame for frame in theirs if not _LIBRARIES.intersection(Path(frame.filename).parts)]
    place = next(reversed(own or theirs), None)
    where = f"{script.path}" if place is None else f"{place.filename}, line {place.lineno}"
    what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return f"{where}: {what}"


def print_trace(error: BaseException) -> None:
    """Prints the part of a traceback that is the script's own; of what it did wrong, up to its own last line."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and not _is_theirs(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    theirs = [_is_theirs(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(trace)]
    limit = len(theirs) - theirs[::-1].index(True) if isinstance(error, ConfigError) and True in theirs else None
    traceback.print_exception(type(error), error, trace or error.__traceback__, limit=limit)


def _is_theirs(filename: str) -> bool:
    return not filename.startswith("<frozen") and Path(__file__).parents[2] not in Path(filename).resolve().parents


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, nothing that is printed is seen."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
