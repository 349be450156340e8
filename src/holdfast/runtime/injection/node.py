"""Scheduled faults of a node, put around its worker group: what each process is struck by, and what the agent does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from holdfast.control.messages import Command, NodeLost, Progress, Strike
from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.runtime.injection.planned import WorkerFaults
from holdfast.runtime.node.entries import STRIKE_COORDINATOR, STRIKE_WORKER
from holdfast.runtime.node.worker_group import WorkerGroup
from holdfast.runtime.specs import CoordinatorSpec, WorkerSpec
from holdfast.telemetry.events import FaultInjected, Log

__all__ = ["NodeFaults", "struck", "struck_coordinator"]


def struck_coordinator(faults: tuple[Fault, ...], spec: CoordinatorSpec) -> CoordinatorSpec:
    """Returns what a coordinator is told that is struck by those of its own; the same if there are none."""
    own = tuple(fault for fault in faults if fault.kind is FaultKind.KILL_COORDINATOR)
    return replace(spec, around=(*spec.around, partial(STRIKE_COORDINATOR, own))) if own else spec


def struck(faults: tuple[Fault, ...], spec: WorkerSpec, own: tuple[Fault, ...]) -> WorkerSpec:
    """Returns what a worker is told that is struck, or that writes down for others what they wait for; else the same.

    Args:
        faults: all that are scheduled.
        spec: what it would be told.
        own: what is to happen to it.
    """
    in_sums = [fault for fault in faults if fault.point is Point.GRADIENTS]
    victims = {fault.worker for fault in in_sums}
    steps = {fault.step for fault in in_sums if fault.worker == spec.worker}
    told = WorkerFaults(
        faults=own,
        steps=frozenset(fault.step for fault in faults if fault.in_a_step),
        witnesses=tuple(worker for worker in spec.plan.workers if worker not in victims) if victims else (),
        fellows=tuple(fault.worker for fault in in_sums if fault.step in steps and fault.worker is not None),
    )
    if not own and not told.steps:
        return spec
    return replace(spec, around=(*spec.around, partial(STRIKE_WORKER, told)))


@dataclass(slots=True, kw_only=True)
class NodeFaults:
    """Tells each process of its own faults, and carries out those that need somebody else.

    Attributes:
        faults: all that is scheduled.
        nodes: which workers fail together.
        tell: returns what a worker is told, given what it would be told, and its own faults.
        cut: takes a node's network link down.
        log: the job's events.
        clock: seconds, monotonic; of the log.
    """

    faults: tuple[Fault, ...]
    nodes: tuple[tuple[WorkerId, ...], ...]
    tell: Callable[[Any, tuple[Fault, ...]], object]
    cut: Callable[[int], None]
    log: Log
    clock: Callable[[], float] = time.monotonic
    _offered: set[Fault] = field(default_factory=set)
    _reached: int = 0
    """The newest step known to have begun; some worker, and so its faults, may be one further."""
    _struck: set[Fault] = field(default_factory=set)
    _timed: bool = False

    def put_around(self, group: WorkerGroup) -> None:
        """From now on strikes the workers of a group."""
        group.spec_of = partial(self._spec_of, group.spec_of)
        group.on_command = partial(self._obey, group)

    def _spec_of(
        self, spec_of: Callable[[WorkerId, str, bool], object], worker: WorkerId, nonce: str, begins: bool
    ) -> object:
        """What a process is told; a later one of the same worker is struck by what is still to come only."""
        own = self._faults_of(worker)
        if not begins:
            own = tuple(fault for fault in own if fault.step > self._reached + 1)
        return self.tell(spec_of(worker, nonce, begins), own)

    def _faults_of(self, worker: WorkerId) -> tuple[Fault, ...]:
        """Its own faults; a node's strike when its first worker is there."""
        heads = {node[0]: number for number, node in enumerate(self.nodes)}
        return tuple(
            fault
            for fault in self.faults
            if fault.kind is not FaultKind.JOIN
            and fault.after_s is None
            and (fault.worker == worker or (fault.node is not None and fault.node == heads.get(worker)))
        )

    def _obey(self, group: WorkerGroup, command: Command) -> None:
        match command:
            case Progress(step=step):
                self._reach(group, step + 1)
                self._set_timers(group)
            case Strike(spec=spec):
                self._strike(group, spec)

    def _reach(self, group: WorkerGroup, step: int) -> None:
        """Offers the workers that are scheduled to come at this step, or earlier."""
        self._reached = step
        for fault in self.faults:
            due = fault.kind is FaultKind.JOIN and fault.after_s is None and fault.step <= step
            if due and fault not in self._offered:
                self._offered.add(fault)
                self._offer(group, fault)

    def _offer(self, group: WorkerGroup, fault: Fault) -> None:
        self._note(fault, str(fault.worker or "new"))
        group.offer(fault.worker)

    def _set_timers(self, group: WorkerGroup) -> None:
        """From the first step's end on, what strikes at a time is under way."""
        if not self._timed:
            self._timed = True
            for fault in self.faults:
                if fault.after_s is not None:
                    group.later(fault.after_s, partial(self._strike_on_time, group, fault))

    def _strike_on_time(self, group: WorkerGroup, fault: Fault) -> None:
        """Strikes whoever runs by then; nobody, if all of them have ended."""
        if fault.node is not None:
            self._kill_node(group, fault, fault.node)
        elif fault.kind is FaultKind.JOIN:
            if group.running:
                self._offer(group, fault)
        elif fault.worker is not None and fault.worker in group.running:
            self._note(fault, str(fault.worker))
            group.kill(fault.worker)

    def _strike(self, group: WorkerGroup, spec: str) -> None:
        """Carries out a scheduled fault whose point a worker has reached, once, however often it is asked for."""
        fault = next((fault for fault in self.faults if str(fault) == spec), None)
        if fault is None or fault in self._struck:  # none that was not scheduled, whoever asks for it
            return
        self._struck.add(fault)
        if fault.kind is FaultKind.KILL_NODE and fault.node is not None:
            self._kill_node(group, fault, fault.node)
        elif fault.kind is FaultKind.PARTITION and fault.worker is not None:
            self._partition(fault, fault.worker)

    def _kill_node(self, group: WorkerGroup, fault: Fault, node: int) -> None:
        members = tuple(worker for worker in self.nodes[node] if worker in group.running)
        for worker in members:
            self._note(fault, str(worker))
        for worker in members:
            group.kill(worker)
        if members:
            group.send(NodeLost(node=node, workers=members))

    def _partition(self, fault: Fault, worker: WorkerId) -> None:
        """Cuts the link of the worker's whole node."""
        number, members = next((i, node) for i, node in enumerate(self.nodes) if worker in node)
        for member in members:
            self._note(fault, str(member))
        self.cut(number)

    def _note(self, fault: Fault, worker: str) -> None:
        step, point = fault.step, "" if fault.kind is FaultKind.JOIN else str(fault.point)
        if fault.after_s is not None:
            step, point = self._reached, f"+{fault.after_s:g}s"
        event = FaultInjected(worker=worker, kind=fault.kind, step=step, point=point, spec=str(fault))
        self.log.write(self.clock(), event)
