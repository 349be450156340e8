"""Processes that were started and have yet to attach: each may fail to, or take too long, once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from holdfast.control.messages import Started
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process

__all__ = ["Offer", "Starting", "Vacancies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """What is known of processes that have not attached.

    Attributes:
        limit_s: how long one may take.
        since: the process of each worker that was started, and when, in seconds of the coordinator's clock.
        again: workers of which a second process was started, because the first did not come.
        spent: processes that did not come, or died before the first generation; nobody waits for them any more.
    """

    limit_s: float = math.inf
    since: Mapping[WorkerId, tuple[Process, float]] = field(default_factory=dict)
    again: frozenset[WorkerId] = frozenset()
    spent: frozenset[Process] = frozenset()

    def process_of(self, worker: WorkerId) -> Process | None:
        """The process that is waited for; None if none is known of."""
        return self.since[worker][0] if worker in self.since else None

    def begun(self, started: Started, now: float) -> Starting:
        """Returns it once a process was started, or was heard again to have been."""
        worker, process = started.worker, started.process
        if process in self.spent or self.process_of(worker) == process:
            return self
        return replace(self, since={**self.since, worker: (process, now)})

    def attached(self, worker: WorkerId) -> Starting:
        """Returns it once a worker has attached."""
        return replace(self, since={each: at for each, at in self.since.items() if each != worker})

    def failed(self, worker: WorkerId, process: Process | None, *, counts: bool = True) -> Starting:
        """Returns it once a process is given up, if it is known which, and another one is started.

        ``counts``: it is the one that may fail.
        """
        spent = self.spent if process is None else self.spent | {process}
        return replace(self.attached(worker), again=self.again | {worker} if counts else self.again, spent=spent)

    def over(self, worker: WorkerId) -> Starting:
        """Returns it once a worker came, or is given up: the next time two may be tried again."""
        return replace(self.attached(worker), again=self.again - {worker})

    def overdue(self, now: float) -> dict[WorkerId, str]:
        """Returns the workers that should be here, and what to say of them."""
        how = f"it did not start within {self.limit_s:g} s (control.start_s)"
        return {worker: how for worker, (_, at) in sorted(self.since.items()) if now - at > self.limit_s}


class Offer(NamedTuple):
    """A worker that a node's agent could start: in this place, or in any (None)."""

    place: WorkerId | None
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacancies:
    """How vacant places may be filled. None of it is stored: agents say it again.

    Attributes:
        offers: those that have not been taken up, since their places were not vacant so far.
        abandoned: vacant places whose joiner died without state; nobody is started there again unasked.
        starting: processes that were started and have yet to attach.
    """

    offers: tuple[Offer, ...] = ()
    abandoned: frozenset[WorkerId] = frozenset()
    starting: Starting = field(default_factory=Starting)
