"""The worker processes of one machine: started, watched and fenced."""

from __future__ import annotations

import os
import secrets
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
    NodeLeaving,
    Progress,
    Started,
    StartWorker,
    WorkerOffer,
)
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process
from holdfast.runtime.node.children import KILLED_S, Child
from holdfast.runtime.node.entries import WORKER, EntryPoint
from holdfast.telemetry.events import Log, Notice

__all__ = ["Member", "Processes", "WorkerGroup", "new_nonce"]


class Processes(Protocol):
    """What starts, watches and ends processes."""

    def start(self, main: Callable[..., None], /, *arguments: object, name: str) -> Child:
        """Starts one; it is to be attended to next."""

    def attend(self, child: Child, on_end: Callable[[Child], None], /) -> None:
        """From now on, takes note of its end; calls ``on_end`` then."""

    def kill(self, child: Child, /) -> None:
        """Ends it, unless it has ended."""

    def terminate(self, child: Child, /) -> None:
        """Tells it to go, unless it has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A worker's process, as its parent and as all others know it."""

    child: Child
    process: Process


def new_nonce() -> str:
    """Returns what tells a process, or an agent, from all others."""
    return secrets.token_hex(8)


def _after(delay_s: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(delay_s, act)
    timer.daemon = True
    timer.start()


@dataclass(slots=True, kw_only=True)
class WorkerGroup:
    """All worker processes that the agent starts.

    Attributes:
        children: starts them.
        node: that the agent runs on.
        node_of: that each worker runs on.
        spec_of: what a worker is told, given the nonce of its process, and whether it begins with the job, not after
            others.
        send: to the coordinator; must not wait, nor ask for a hello.
        log: the job's events.
        grace_s: how long a process that was held for lost may take to end by itself.
        slots: how many workers can be started when the job begins.
        entry: what runs in a worker's process.
        clock: seconds, monotonic; of the log.
        later: calls what it is given after so many seconds.
        draw: returns a nonce that nobody else has.
        on_command: called with each command once it is obeyed.
    """

    children: Processes
    node: NodeId
    node_of: Callable[[WorkerId], NodeId]
    spec_of: Callable[[WorkerId, str, bool], object]
    send: Callable[[Message], None]
    log: Log
    grace_s: float
    slots: int = 0
    entry: EntryPoint = WORKER
    clock: Callable[[], float] = time.monotonic
    later: Callable[[float, Callable[[], None]], None] = _after
    draw: Callable[[], str] = new_nonce
    on_command: Callable[[Command], None] = lambda command: None
    _current: dict[WorkerId, Member] = field(default_factory=dict)
    _running: dict[WorkerId, Member] = field(default_factory=dict)
    """Those of the current ones that have not ended and were not fenced."""
    _generation: int = 0
    """The newest that ran a step, as far as we heard."""
    _exits: tuple[Exited, ...] = ()
    _open_offers: tuple[WorkerId | None, ...] = field(init=False)
    _coming: dict[WorkerId, Member | None] = field(default_factory=dict)
    _leaves: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Nothing is started yet."""
        self._open_offers = (None,) * self.slots

    @property
    def agent(self) -> Process:
        """The process of the agent."""
        return Process(self.node, os.getpid(), self.node.nonce)

    def hello(self) -> Hello:
        """All that a coordinator must know which may know nothing of it."""
        with self._lock:
            return Hello(
                worker=None,
                process=self.agent,
                leaving=self._leaves,
                generation=self._generation,
                exits=self._exits,
                offers=self._open_offers,
                coming=tuple(sorted(self._coming)),
                started=tuple(Started(worker=who, process=each.process) for who, each in sorted(self._running.items())),
            )

    def obey(self, command: Command) -> None:
        """Does what the coordinator asks the agent for, as far as it is about workers."""
        match command:
            case Progress(generation=generation):
                self._generation = generation
            case Fence(worker=worker, process=process):
                self.fence(worker, process)
            case StartWorker(worker=worker, first=first):
                self.start(worker, first=first)
        self.on_command(command)

    def expect(self, worker: WorkerId) -> None:
        """Notes that a process of this worker was asked for, before it is started: an offer was taken up."""
        with self._lock:
            taken = worker if worker in self._open_offers else None
            left = list(self._open_offers)
            if taken in left:  # else nothing was offered: a strategy asks for a worker by itself
                left.remove(taken)
            self._open_offers = tuple(left)
            self._coming[worker] = None

    def start(self, worker: WorkerId, *, first: bool) -> None:
        """Starts a worker's process; ``first``: it begins with the job, and comes into none that runs.

        One that runs, and was not fenced, is not started twice: the older one would be watched and fenced by nobody.
        """
        if self._is_running(worker):
            text = "was asked for again while its process runs; no second one is started"
            self.log.write(self.clock(), Notice(worker=str(worker), text=text))
            return
        nonce = self.draw()
        spec = self.spec_of(worker, nonce, first)
        child = self.children.start(self.entry, spec, name=str(worker))
        member = self._current[worker] = Member(child, Process(self.node_of(worker), child.pid, nonce))
        with self._lock:
            self._running[worker] = member
            if worker in self._coming:
                self._coming[worker] = member
            self.send(Started(worker=worker, process=member.process))
        self.children.attend(child, lambda _: self._on_end(worker, member))
        if self._leaves:  # it was asked for before the coordinator had heard of that
            self.children.kill(child)

    def _is_running(self, worker: WorkerId) -> bool:
        """Whether it has a process that nobody gave up; if it was asked for again, this is the one that comes."""
        with self._lock:
            member = self._running.get(worker)
            if member is not None and worker in self._coming:
                self._coming[worker] = member
        return member is not None

    def _on_end(self, worker: WorkerId, member: Member) -> None:
        """Tells the coordinator that a process has ended."""
        exited = Exited(worker=worker, process=member.process, status=member.child.status or 0)
        with self._lock:  # what is lost on the way is told again in a hello
            self._exits += (exited,)
            for those in (self._running, self._coming):
                if those.get(worker) is member:
                    del those[worker]
            self.send(exited)

    def fence(self, worker: WorkerId, process: Process) -> None:
        """Ends a process that is no member any more, after the time in which it may do so itself."""
        current = self._current.get(worker)
        if current is None or current.process != process:
            return
        child = current.child
        with self._lock:
            self._running.pop(worker, None)  # another one may be started in its place now
        if not child.ended.is_set():
            self.later(self.grace_s, lambda: self.children.kill(child))

    @property
    def running(self) -> frozenset[WorkerId]:
        """Whose processes run, and were not given up."""
        with self._lock:
            return frozenset(self._running)

    @property
    def newest(self) -> tuple[Child, ...]:
        """The newest process of each worker, whether or not it has ended."""
        with self._lock:
            return tuple(member.child for member in self._current.values())

    def offer(self, worker: WorkerId | None) -> None:
        """Offers a worker to the coordinator: one that was lost, or, if None, a new one."""
        with self._lock:  # a hello made in between would tell of it, and the offer would follow
            if self._leaves:
                return
            self._open_offers += (worker,)
            self.send(WorkerOffer(worker=worker, node=self.node))

    def begin_anew(self) -> None:
        """Ends all processes, none of which is of use any more, and offers all slots as at the beginning."""
        for child in self.newest:
            self.children.kill(child)
        for child in self.newest:
            child.ended.wait(KILLED_S)
        with self._lock:
            self._running.clear()
            self._coming.clear()
            self._open_offers = ()
        for _ in range(self.slots):
            self.offer(None)

    def leave(self) -> None:
        """Tells all workers to go, as soon as the others can do without them; none is started any more."""
        with self._lock:
            running = () if self._leaves else tuple(self._running.values())
            self._leaves, self._open_offers = True, ()
            self.send(NodeLeaving(process=self.agent))
        for member in running:
            self.children.terminate(member.child)

    @property
    def leaves(self) -> bool:
        """Whether it was told to go."""
        return self._leaves

    @property
    def has_left(self) -> bool:
        """Whether it was told to go, and none of its processes runs any more."""
        with self._lock:
            return self._leaves and not self._running and not self._coming

    def kill(self, worker: WorkerId) -> None:
        """Ends a worker's newest process."""
        self.children.kill(self._current[worker].child)
