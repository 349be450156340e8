"""Two threads take turns: the loop of a user's script, and the driver that knows what is to be run.

The *loop* runs items, and asks for the next. The *driver* says which one, learns what came of it, and says when a step
is over. While the loop is away between two steps, the driver may wait for it, and need not.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.work import WorkPhase, working
from holdfast.errors import HoldfastError, InternalError

__all__ = ["Item", "Turns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One micro-batch of a step, by its global number, and what its loss is to be multiplied by.

    ``shown``: the step as the loop knows it, by which samples are chosen: one that is run once more has the same again.
    """

    step: int
    shown: int
    number: int
    loss_scale: float | None = None


@dataclass(slots=True)
class Turns:
    """What the two threads know of each other; every field is guarded by one lock."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _item: Item | None = None
    _result: Any = None
    _taken: bool = False
    _asks: bool = False
    _inside: int | None = None
    _committed: int = 0
    _error: BaseException | None = None
    _over: bool = False
    _why: BaseException | None = None

    # --- the driver ---------------------------------------------------------------------------------------------------

    def run(self, item: Item) -> Any:
        """Has the loop run an item; returns what came of it.

        Raises:
            WorkFailed: the loop has raised.
        """
        with self._changed:
            if self._item is not None:
                raise InternalError(f"item {item.number} of step {item.step}: another one runs")
            self._item, self._result, self._taken = item, None, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._item is None or self._error is not None)
            if self._error is not None:
                with working(WorkPhase.SCRIPT, microbatch=item.number):
                    raise self._error
            return self._result

    def between(self, step: int, limit_s: float) -> bool:
        """All steps before ``step`` are over; returns whether the loop asks for it, after ``limit_s`` s at most.

        Raises:
            WorkFailed: the loop has raised.
        """
        with self._changed:
            self._committed = max(self._committed, step)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._asks or self._inside == step or self._error is not None, limit_s)
            if self._error is not None:
                with working(WorkPhase.SCRIPT):
                    raise self._error
            return self._asks or self._inside == step  # if it is inside, the step is run again

    def end(self, why: BaseException | None = None) -> None:
        """There is nothing more to run; ``why``: what has ended it before its time."""
        with self._changed:
            self._over, self._why = True, why
            self._changed.notify_all()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def next_step(self) -> Item | None:
        """Asks for the next step; returns its first item here once it has begun, None if there is none.

        Raises:
            HoldfastError: what has ended the job before its time.
        """
        with self._changed:
            self._asks = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._item is not None or self._over)
            self._asks = False
            if self._item is not None:
                self._inside = self._item.step
                return self._item
            self._raise_if_broken()
            return None

    def next_item(self, step: int) -> Item | None:
        """Asks for the next item of a step; returns None once the step is over: all workers have what they need of it.

        Raises:
            HoldfastError: what has ended the job before its time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._item is not None or self._committed > step or self._over)
            if self._item is not None:
                self._taken = True
                return self._item
            self._inside = None
            if self._committed <= step:
                self._raise_if_broken()
            return None

    def done(self, result: Any) -> None:
        """The item that was taken is done."""
        with self._changed:
            if self._item is None or not self._taken:
                raise InternalError("an item is done that nobody asked for")
            self._item, self._result = None, result
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The loop has raised, and runs nothing any more."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to run."""
        with self._changed:
            return self._over

    def wait(self) -> None:
        """Waits until there is nothing more to run."""
        with self._changed:
            self._changed.wait_for(lambda: self._over)

    def _raise_if_broken(self) -> None:
        if self._why is not None:
            raise self._why if isinstance(self._why, HoldfastError) else InternalError(f"{self._why}") from self._why
