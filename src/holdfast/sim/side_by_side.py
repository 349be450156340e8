"""Work that is done in forked processes, side by side: each remembers what it made before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from holdfast.errors import ConfigError
from holdfast.parent import end_with

__all__ = ["side_by_side"]

Asked = TypeVar("Asked")
Made = TypeVar("Made")


@contextmanager
def side_by_side(
    make: Callable[[Asked], Made], processes: int
) -> Iterator[Callable[[Iterable[Asked]], Iterator[Made]]]:
    """Yields what makes results in the order of what is asked for: here, or in forked processes.

    Args:
        make: makes one; what it is told and returns can be pickled.
        processes: how many work; with one, nobody is forked.

    Raises:
        ConfigError: one of several processes was ended by somebody else.
    """
    if processes <= 1:
        yield partial(map, make)
        return
    with ProcessPoolExecutor(processes, get_context("fork"), _take_on, (make, os.getpid())) as pool:
        try:
            yield partial(pool.map, _of_taken)
        except BrokenProcessPool:
            raise ConfigError(
                f"one of {processes} processes that simulated side by side was ended, perhaps for its memory; expected "
                "fewer at once"
            ) from None


_taken: list[Callable[[Any], Any]] = []


def _take_on(make: Callable[[Any], Any], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever forked this process answers it, and ends this one with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(parent)
    _taken.append(make)


def _of_taken(asked: Any) -> Any:
    return _taken[-1](asked)
