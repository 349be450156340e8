"""Whoever hears of a job is called in a thread of its own: however long that takes, the job goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TypeVar

__all__ = ["Hearing"]

_T = TypeVar("_T")


@dataclass(slots=True)
class Hearing:
    """Calls what somebody gave us with all that it is told, one after another and in this order; nobody waits for it.

    Leaving it waits until all is heard. What a call raises is raised where the next thing is told, or at the end, and
    then nothing more is heard.
    """

    _told: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _error: BaseException | None = None
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Nobody is called yet."""
        self._thread = threading.Thread(target=self._hear, name="hearing", daemon=True)

    def of(self, call: Callable[[_T], None]) -> Callable[[_T], None]:
        """Returns what tells ``call`` of something, and raises what an earlier call has raised."""

        def tell(something: _T) -> None:
            self._check()
            self._told.put(partial(call, something))

        return tell

    def __enter__(self) -> Hearing:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._told.put(None)
        self._thread.join()
        if error is None:
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _hear(self) -> None:
        while (call := self._told.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised where the job runs
                self._error = error
                return
