"""The worker processes of one machine: started, watched, fenced, and struck by the faults that need somebody else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.control.messages import (
    Command,
    Exited,
    Fence,
    Hello,
    Message,
    NodeLost,
    Progress,
    Started,
    StartWorker,
    Strike,
    WorkerOffer,
)
from holdfast.core.faults import Fault, FaultKind
from holdfast.core.ids import WorkerId
from holdfast.runtime.node.children import Child
from holdfast.runtime.node.entries import WORKER, Entry
from holdfast.telemetry.events import FaultInjected, Log, Notice

__all__ = ["Processes", "WorkerGroup"]


class Processes(Protocol):
    """What starts, watches and ends processes."""

    def start(self, main: Callable[..., None], /, *arguments: object, name: str) -> Child:
        """Starts one; it is to be attended to next."""

    def attend(self, child: Child, on_end: Callable[[Child], None], /) -> None:
        """From now on, takes note of its end; calls ``on_end`` then."""

    def kill(self, child: Child, /) -> None:
        """Ends it, unless it has ended."""


def _after(delay_s: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(delay_s, act)
    timer.daemon = True
    timer.start()


@dataclass(slots=True, kw_only=True)
class WorkerGroup:
    """All worker processes that the agent starts.

    Attributes:
        children: starts them.
        nodes: which workers fail together.
        faults: all that is scheduled.
        spec_of: what a worker is told, given its own faults, and whether it begins with the job, not after others.
        send: to the coordinator; must not wait, nor ask for a hello.
        cut: takes a node's network link down.
        log: the job's events.
        grace_s: how long a process that was held for lost may take to end by itself.
        entry: what runs in a worker's process.
        clock: seconds, monotonic; of the log.
        later: calls what it is given after so many seconds.
    """

    children: Processes
    nodes: tuple[tuple[WorkerId, ...], ...]
    faults: tuple[Fault, ...]
    spec_of: Callable[[WorkerId, tuple[Fault, ...], bool], object]
    send: Callable[[Message], None]
    cut: Callable[[int], None]
    log: Log
    grace_s: float
    entry: Entry = WORKER
    clock: Callable[[], float] = time.monotonic
    later: Callable[[float, Callable[[], None]], None] = _after
    _current: dict[WorkerId, Child] = field(default_factory=dict)
    _running: dict[WorkerId, Child] = field(default_factory=dict)
    """Those of the current ones that have not ended and were not fenced."""
    _offered: set[Fault] = field(default_factory=set)
    _reached: int = 0
    """The newest step known to have begun; some worker, and so its faults, may be one further."""
    _generation: int = 0
    """The newest that ran a step, as far as we heard."""
    _struck: set[Fault] = field(default_factory=set)
    _exits: tuple[Exited, ...] = ()
    _open_offers: tuple[WorkerId | None, ...] = ()
    _coming: dict[WorkerId, Child | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hello(self) -> Hello:
        """All that a coordinator must know which may know nothing of it."""
        with self._lock:
            return Hello(
                worker=None,
                pid=os.getpid(),
                generation=self._generation,
                exits=self._exits,
                offers=self._open_offers,
                coming=tuple(sorted(self._coming)),
                started=tuple(Started(worker=who, pid=child.pid) for who, child in sorted(self._running.items())),
            )

    def obey(self, command: Command) -> None:
        """Does what the coordinator asks the agent for, as far as it is about workers."""
        match command:
            case Progress(step=step, generation=generation):
                self.reach(step + 1, generation)
            case Fence(worker=worker, pid=pid):
                self.fence(worker, pid)
            case StartWorker(worker=worker, first=first):
                self.start(worker, first=first)
            case Strike(spec=spec):
                self.strike(spec)

    def expect(self, worker: WorkerId) -> None:
        """Notes that a process of this worker was asked for, before it is started: an offer was taken up."""
        with self._lock:
            taken = worker if worker in self._open_offers else None
            left = list(self._open_offers)
            if taken in left:  # else nothing was offered: a strategy asks for a worker by itself
                left.remove(taken)
            self._open_offers = tuple(left)
            self._coming[worker] = None

    def start(self, worker: WorkerId, *, first: bool = False) -> None:
        """Starts a worker's process; a later one of the same worker is struck by what is still to come only.

        ``first``: the job has not begun, so it is told what the first one was.

        One that runs, and was not fenced, is not started twice: the older one would be watched and fenced by nobody.
        """
        if self._is_running(worker):
            text = "was asked for again while its process runs; no second one is started"
            self.log.write(self.clock(), Notice(worker=str(worker), text=text))
            return
        faults = self._faults_of(worker)
        if worker in self._current and not first:  # its peers give it the state of the running job
            spec = self.spec_of(worker, tuple(fault for fault in faults if fault.step > self._reached + 1), False)
        else:
            spec = self.spec_of(worker, faults, True)
        child = self._current[worker] = self.children.start(self.entry, spec, name=str(worker))
        with self._lock:
            self._running[worker] = child
            if worker in self._coming:
                self._coming[worker] = child
            self.send(Started(worker=worker, pid=child.pid))
        self.children.attend(child, lambda child: self._on_end(worker, child))

    def _is_running(self, worker: WorkerId) -> bool:
        """Whether it has a process that nobody gave up; if it was asked for again, this is the one that comes."""
        with self._lock:
            child = self._running.get(worker)
            if child is not None and worker in self._coming:
                self._coming[worker] = child
        return child is not None

    def _faults_of(self, worker: WorkerId) -> tuple[Fault, ...]:
        """Its own faults; a node's strike when its first worker is there."""
        heads = {node[0]: number for number, node in enumerate(self.nodes)}
        return tuple(
            fault
            for fault in self.faults
            if fault.kind is not FaultKind.JOIN
            and (fault.worker == worker or (fault.node is not None and fault.node == heads.get(worker)))
        )

    def _on_end(self, worker: WorkerId, child: Child) -> None:
        """Tells the coordinator that a process has ended."""
        exited = Exited(worker=worker, pid=child.pid, status=child.status or 0)
        with self._lock:  # what is lost on the way is told again in a hello
            self._exits += (exited,)
            for those in (self._running, self._coming):
                if those.get(worker) is child:
                    del those[worker]
            self.send(exited)

    def fence(self, worker: WorkerId, pid: int) -> None:
        """Ends a process that is no member any more, after the time in which it may do so itself."""
        child = self._current.get(worker)
        if child is None or child.pid != pid:
            return
        with self._lock:
            self._running.pop(worker, None)  # another one may be started in its place now
        if not child.ended.is_set():
            self.later(self.grace_s, lambda: self.children.kill(child))

    @property
    def living(self) -> tuple[Child, ...]:
        """The processes that have not ended, as far as is known."""
        with self._lock:
            return tuple(self._running.values())

    def reach(self, step: int, generation: int) -> None:
        """Offers the workers that are scheduled to come at this step, or earlier; a hello tells of the generation."""
        self._reached, self._generation = step, generation
        for fault in self.faults:
            if fault.kind is FaultKind.JOIN and fault.step <= step and fault not in self._offered:
                self._offered.add(fault)
                self._note(fault, str(fault.worker or "new"))
                with self._lock:  # a hello made in between would tell of it, and the offer would follow
                    self._open_offers += (fault.worker,)
                    self.send(WorkerOffer(worker=fault.worker))

    def strike(self, spec: str) -> None:
        """Carries out a scheduled fault whose point a worker has reached, once, however often it is asked for."""
        fault = next((fault for fault in self.faults if str(fault) == spec), None)
        if fault is None or fault in self._struck:  # none that was not scheduled, whoever asks for it
            return
        self._struck.add(fault)
        if fault.kind is FaultKind.KILL_NODE and fault.node is not None:
            self._kill_node(fault, fault.node)
        elif fault.kind is FaultKind.PARTITION and fault.worker is not None:
            self._partition(fault, fault.worker)

    def _kill_node(self, fault: Fault, node: int) -> None:
        members = self.nodes[node]
        for worker in members:
            self._note(fault, str(worker))
        for worker in members:
            self.children.kill(self._current[worker])
        self.send(NodeLost(node=node, workers=members))

    def _partition(self, fault: Fault, worker: WorkerId) -> None:
        """Cuts the link of the worker's whole node."""
        number, members = next((i, node) for i, node in enumerate(self.nodes) if worker in node)
        for member in members:
            self._note(fault, str(member))
        self.cut(number)

    def _note(self, fault: Fault, worker: str) -> None:
        point = "" if fault.kind is FaultKind.JOIN else str(fault.point)
        event = FaultInjected(worker=worker, kind=fault.kind, step=fault.step, point=point, spec=str(fault))
        self.log.write(self.clock(), event)
