"""Random faults that a job must survive: drawn from a seed, as data, before anything runs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.core.placement import group_into_nodes
from holdfast.errors import ConfigError

__all__ = ["LOSSES", "STEP_POINTS", "random_faults"]

LOSSES = (FaultKind.KILL, FaultKind.HANG, FaultKind.STALL, FaultKind.LEAVE, FaultKind.KILL_NODE)
STEP_POINTS = (
    Point.START,
    Point.FORWARD,
    Point.BACKWARD,
    Point.REDUCE,
    Point.VERDICT,
    Point.UPDATE,
    Point.COMMIT,
)


def random_faults(
    seed: int,
    *,
    pipelines: int,
    stages: int,
    count: int,
    every_steps: int,
    settle_steps: int,
    workers_per_node: int = 1,
) -> tuple[Fault, ...]:
    """Returns faults at random points of random steps, in the order of their steps; one seed always gives the same.

    Workers are killed, hang, stall, are told to leave and die in whole nodes; who is gone comes back later. Every stage
    keeps a worker at any time, where one that comes counts only after ``settle_steps``.

    Args:
        seed: of all that is drawn.
        pipelines: of the grid, at least 2.
        stages: of each pipeline.
        count: how many faults, those that bring a worker back included.
        every_steps: steps from one fault to the next, on average; more where nobody can be lost for a while.
        settle_steps: after how many steps a worker that comes surely works, and can be struck again. A job should have
            so many steps after the last fault, too.
        workers_per_node: how many consecutive workers die with their node.

    Raises:
        ConfigError: there is one pipeline only: nobody in it can be lost.

    Example:
        >>> [str(f) for f in random_faults(1, pipelines=2, stages=1, count=4, every_steps=10, settle_steps=20)]
        ['stall:1.0@6:update', 'join:1.0@19', 'kill-node:1@39:backward', 'join:1.0@47']
    """
    if pipelines < 2:
        raise ConfigError(f"pipelines={pipelines}: nobody can be lost where nobody else holds the same layers; use 2")
    workers = tuple(WorkerId(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages))
    source = random.Random(seed)
    drawing = _Drawing(
        random=source,
        nodes=group_into_nodes(workers, workers_per_node),
        settle_steps=settle_steps,
        working_from=dict.fromkeys(workers, 0),
    )
    step = 1
    faults: list[Fault] = []
    while len(faults) < count:
        step += source.randint(1, 2 * every_steps - 1)
        if (fault := drawing.draw(step)) is not None:
            faults.append(fault)
    return tuple(faults)


@dataclass(slots=True, kw_only=True)
class _Drawing:
    """Who is where while faults are drawn.

    Attributes:
        working_from: from which step on each worker works; None if it is lost, and nothing brings it back so far.
        used: how often each kind was drawn: the rarest comes next, as some can be drawn seldom.
    """

    random: random.Random
    nodes: tuple[tuple[WorkerId, ...], ...]
    settle_steps: int
    working_from: dict[WorkerId, int | None]
    used: Counter[FaultKind] = field(default_factory=Counter)

    def draw(self, step: int) -> Fault | None:
        """One more fault; None if nobody can be lost now, and nobody can come."""
        gone = [worker for worker, since in self.working_from.items() if since is None]
        losses = self._possible_losses(step)
        if gone and (not losses or self.random.random() < 0.5):
            worker = self.random.choice(gone)
            self.working_from[worker] = step + self.settle_steps
            return Fault(kind=FaultKind.JOIN, step=step, worker=worker)
        if not losses:
            return None
        kind = min(losses, key=lambda kind: (self.used[kind], self.random.random()))
        self.used[kind] += 1
        return self._lose(kind, self.random.choice(losses[kind]), step)

    def _possible_losses(self, step: int) -> dict[FaultKind, list[tuple[WorkerId, ...]]]:
        working = {worker for worker, since in self.working_from.items() if since is not None and since <= step}
        single: list[tuple[WorkerId, ...]] = [
            (worker,) for worker in sorted(working) if self._leaves_owners(working, (worker,))
        ]
        whole = [node for node in self.nodes if working.issuperset(node) and self._leaves_owners(working, node)]
        found = {kind: whole if kind is FaultKind.KILL_NODE else single for kind in LOSSES}
        return {kind: targets for kind, targets in found.items() if targets}

    def _leaves_owners(self, working: set[WorkerId], lost: tuple[WorkerId, ...]) -> bool:
        return {worker.stage for worker in working.difference(lost)} == {worker.stage for worker in self.working_from}

    def _lose(self, kind: FaultKind, lost: tuple[WorkerId, ...], step: int) -> Fault:
        self.working_from.update(dict.fromkeys(lost))
        point = self.random.choice(STEP_POINTS)
        if kind is FaultKind.KILL_NODE:
            return Fault(kind=kind, step=step, node=self.nodes.index(lost), point=point)
        return Fault(kind=kind, step=step, worker=lost[0], point=point)
