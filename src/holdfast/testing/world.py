"""What the processes of a simulated job have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process
from holdfast.recovery.rules import JobRules
from holdfast.runtime.transport.port import SumKey
from holdfast.testing.mail import Mail
from holdfast.testing.scenario import HeldSum, Range, Scenario, VirtualPin
from holdfast.testing.virtual_links import ControlLinks
from holdfast.testing.virtual_log import VirtualLog
from holdfast.testing.virtual_time import VirtualTime

if TYPE_CHECKING:
    from holdfast.testing.virtual_logs import VirtualStream
    from holdfast.testing.virtual_worker import VirtualWorker

__all__ = ["World", "WouldBlock", "copied"]


_FIRST_NONCE = 1 << 32


class WouldBlock(Exception):
    """A port of a simulated process, where a real one waits: to be called again once something has changed."""


@dataclass(slots=True, kw_only=True)
class World:
    """What the processes of a simulated job have in common.

    Attributes:
        scenario: the job.
        rules: what it says once and for all.
        time: that passes.
        links: to the coordinator.
        log: what happened.
        knows_agent: whether the coordinator knows of the agent of a node, and does not hold it to be gone.
        running: the newest process of each worker.
        mail: what is on its way between workers.
        processes: all that were ever started.
        logged: what each process has logged; what it has replayed, apart.
        served: in a generation, to a worker, by another: each layer's state, and whether it is exact.
        stored: what was pinned of a layer for a step.
        pinned: all that was, in order.
        saved: the digest of each layer that was saved at the end.
        copies_broken: how often each worker was to get state and got none.
        summed: who has the sum of each reduction that is held back from others.
    """

    scenario: Scenario
    rules: JobRules
    time: VirtualTime
    links: ControlLinks
    log: VirtualLog
    knows_agent: Callable[[NodeId], bool]
    running: dict[WorkerId, VirtualWorker] = field(default_factory=dict)
    mail: Mail[Any] = field(default_factory=Mail)
    processes: dict[Process, VirtualWorker] = field(default_factory=dict)
    logged: dict[Process, list[VirtualStream]] = field(default_factory=dict)
    served: dict[tuple[int, WorkerId], dict[WorkerId, dict[int, tuple[bytes, bool]]]] = field(default_factory=dict)
    stored: dict[tuple[int, int], bytes] = field(default_factory=dict)
    pinned: list[VirtualPin] = field(default_factory=list)
    saved: dict[int, str | None] = field(default_factory=dict)
    copies_broken: Counter[WorkerId] = field(default_factory=Counter)
    summed: dict[HeldSum, set[WorkerId]] = field(default_factory=dict)

    def after(self, limits: Range, act: Callable[[], None], channel: object = None) -> None:
        """Lets something happen after a delay between these limits."""
        self.time.after(self.time.draw(limits), act, channel)

    def draw_nonce(self) -> str:
        """Returns what tells a process from all others; those of agents are lower."""
        return f"{_FIRST_NONCE + len(self.processes):016x}"

    def breaks_copy(self, worker: WorkerId) -> bool:
        """Whether a worker that was to get state gets none."""
        if self.copies_broken[worker] >= dict(self.scenario.broken_copies).get(worker, 0):
            return False
        self.copies_broken[worker] += 1
        self.log.fire_once(f"break-copy:{worker}")
        return True

    def loses_log(self, worker: WorkerId, step: int) -> bool:
        """Whether nothing of a step is in a worker's log."""
        if (worker, step) not in self.scenario.log_gaps:
            return False
        self.log.fire_once(f"lose-log:{worker}@{step}")
        return True

    def holding(self, key: SumKey) -> HeldSum | None:
        """What holds the sum of a reduction back from some owners; nothing does once anybody was lost."""
        named = (key.step, key.reduction.layers)
        found = (each for each in self.scenario.held_sums if (each.step, each.layers) == named)
        return next(found, None) if key.generation == 1 else None

    def has_sum(self, key: SumKey, worker: WorkerId) -> None:
        """Somebody has the sum of a reduction: once all have it from whom it is not held back, one of them dies."""
        held = self.holding(key)
        if held is None or str(held) in self.log.fired:
            return
        having = self.summed.setdefault(held, set())
        having.add(worker)
        if having == {*key.reduction.workers} - {*held.held}:
            self.log.fire(str(held))
            self.running[held.killed].kill()

    def living(self, worker: WorkerId) -> bool:
        """Whether a worker's process is there and does something."""
        return self.running[worker].goes

    def wake(self, workers: Iterable[WorkerId]) -> None:
        """Lets these look whether what they wait for is there."""
        for worker in sorted(workers):
            self.running[worker].look()


def copied(value: Any) -> Any:
    """Returns a copy of an array, or of a tensor where an engine computes with these."""
    return value.copy() if isinstance(value, np.ndarray) else value.clone()
