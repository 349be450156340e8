"""Two threads take turns: the loop of a user's script, and the driver that knows what is to be run.

The *loop* is outside of its steps, or inside of one: there it waits for items, or runs one. It is given every step in
order, whether or not it has items of it. The *driver* says which step may begin and which items are to be run, and when
a step is over. What came of an item is taken in the loop's thread, while the driver waits: so the threads change hands
once for many items, and what a backward pass has written is still in the processor's cache.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from holdfast.core.work import WorkPhase, working
from holdfast.errors import ConfigError, HoldfastError, InternalError

__all__ = ["GivesItems", "Item", "LoopAbandoned", "RunsItems", "Take", "Turns"]


class LoopAbandoned(BaseException):
    """The job ends without this loop: what comes behind it in the script is not for weights that are not trained.

    No ``except Exception`` of the script's catches it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One micro-batch of a step, by its global number, and what its loss is to be multiplied by.

    ``shown``: the step as the loop knows it, by which samples are chosen: one that is run once more has the same again.
    """

    step: int
    shown: int
    number: int
    loss_scale: float | None = None


Take: TypeAlias = Callable[[Item, Any], bool]
"""Takes what came of an item; returns whether more are to be run."""


class GivesItems(Protocol):
    """Whatever says to a step which items it is to run."""

    def next_item(self, step: int, /) -> Item | None:
        """Returns the next item of a step; None if there is none left."""

    def done(self, result: Any, /) -> None:
        """The item that was given is done."""


class RunsItems(Protocol):
    """Whatever computes items when it is asked to."""

    def run(self, items: Iterable[Item], take: Take, /) -> None:
        """Runs items one after another, and has what came of each taken, until no more are wanted."""


@dataclass(slots=True)
class Turns:
    """What the two threads know of each other; every field is guarded by one lock."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _begun: tuple[int, tuple[int, ...]] | None = None
    """The newest step that may begin, and the steps that were run once more, of which a number is shown again."""
    _given: int | None = None
    """The newest step that the loop was given."""
    _inside: int | None = None
    """The step in whose loop over items it is."""
    _asks: bool = False
    """Whether it waits for a step."""
    _idle: bool = False
    """Whether it waits for an item."""
    _over_before: int = 0
    """All steps before this one are over."""
    _items: deque[Item] = field(default_factory=deque)
    """What is to be run; the first one runs if it is ``_taken``."""
    _taken: bool = False
    _take: Take | None = None
    _not_taken: BaseException | None = None
    """Why what came of an item could not be taken."""
    _error: BaseException | None = None
    _over: bool = False
    _finished: bool = False
    _why: BaseException | None = None

    # --- the driver ---------------------------------------------------------------------------------------------------

    def between(
        self, step: int, limit_s: float | None = None, *, repeated: tuple[int, ...] = (), begins: bool = True
    ) -> bool:
        """All steps before ``step`` are over, and it may begin; or, unless it ``begins``, there is none any more.

        Args:
            step: as the job counts.
            limit_s: how long to wait at most, in seconds; None: as long as it takes.
            repeated: the steps that were run once more, each in the step behind it.
            begins: whether there is such a step.

        Returns:
            Whether the loop waits for an item of it, or is done with it; or waits for a step behind the last one.

        Raises:
            WorkFailed: the loop has raised.
        """
        with self._changed:
            self._over_before = max(self._over_before, step + (not begins))  # one that began and is void is over, too
            if begins and (self._begun is None or self._begun[0] < step):
                self._begun = (step, repeated)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_at(step, begins) or self._error is not None, limit_s)
            self._raise_if_failed()
            return self._is_at(step, begins)

    def _is_at(self, step: int, begins: bool) -> bool:
        if begins:  # or behind it, where we have ended it and others have not
            return (self._idle or self._asks) and self._given is not None and self._given >= step
        return self._asks and (self._given is None or self._given + 1 >= step)

    def run(self, items: Iterable[Item], take: Take) -> None:
        """Has the loop run items, one after another; returns once all are, or ``take`` wants no more.

        Args:
            items: in this order.
            take: called in the loop's thread with each item and what came of it, while this one waits.

        Raises:
            WorkFailed: the loop has raised.
            Exception: ``take`` has.
        """
        with self._changed:
            if self._items:
                raise InternalError(f"item {self._items[0].number} of step {self._items[0].step}: another one runs")
            self._items.extend(items)
            self._take, self._taken = take, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._items or self._error is not None)
            self._raise_if_failed(self._items[0].number if self._items else None)
            not_taken, self._not_taken = self._not_taken, None
        if not_taken is not None:
            raise not_taken

    def _raise_if_failed(self, microbatch: int | None = None) -> None:
        if self._error is not None:
            with working(WorkPhase.SCRIPT, microbatch=microbatch):
                raise self._error

    def end(self, why: BaseException | None = None, *, finished: bool = True) -> None:
        """There is nothing more to run; ``why``: what has ended it; ``finished``: whether all steps are over."""
        with self._changed:
            self._over, self._finished, self._why = True, finished, why
            self._changed.notify_all()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def next_step(self) -> tuple[int, int] | None:
        """Asks for the next step; returns its number, as the job counts and as it is shown, None if there is none.

        Raises:
            HoldfastError: what has ended the job before its time.
            LoopAbandoned: the job goes on, or has ended, without this loop.
        """
        with self._changed:
            self._asks, self._inside = True, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._may_begin() is not None or self._over)
            self._asks = False
            step = self._may_begin()
            if step is None:
                self._raise_unless_finished()
                return None
            assert self._begun is not None, "a step may begin"
            self._given = self._inside = step
            return step, step - sum(each < step for each in self._begun[1])

    def _may_begin(self) -> int | None:
        """The next step, if it may begin: the first one is whichever begins first, the others come in order."""
        if self._begun is None:
            return None
        step = self._begun[0] if self._given is None else self._given + 1
        return step if step <= self._begun[0] else None

    def next_item(self, step: int) -> Item | None:
        """Asks for the next item of a step; returns None once the step is over: all workers have what they need of it.

        Raises:
            ConfigError: an item runs.
            HoldfastError: what has ended the job before its time.
            LoopAbandoned: the job goes on, or has ended, without this loop.
        """
        with self._changed:
            if self._taken:
                raise ConfigError(
                    f"item {self._items[0].number} of the step runs: its loop cannot be begun again within it"
                )
            if not self._items or self._over_before > step:
                self._idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._items or self._over_before > step or self._over)
                self._idle = False
            if self._items and self._over_before <= step:
                self._taken = True
                return self._items[0]
            if self._over_before <= step:
                self._raise_unless_finished()
            return None

    def done(self, result: Any) -> None:
        """The item that was taken is done; all that comes of it is done with when this returns."""
        if not self._taken or self._take is None:
            raise InternalError("an item is done that nobody asked for")
        more, why = False, None
        try:
            more = self._take(self._items[0], result)  # without the lock: the driver waits, and nobody else asks
        except Exception as error:  # noqa: BLE001 - raised where the items were asked for
            why = error
        with self._changed:
            self._taken, self._not_taken = False, why
            self._items.popleft()
            if not more:
                self._items.clear()
            if not self._items:
                self._take = None
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

    def _raise_unless_finished(self) -> None:
        if self._why is not None:
            raise self._why if isinstance(self._why, HoldfastError) else InternalError(f"{self._why}") from self._why
        if not self._finished:
            raise LoopAbandoned("the job ends without this loop")
