"""The agent of a simulated job: the real worker group and supervisor, over processes that are simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_struct

from holdfast.control.messages import Command, Hello, Preempted, StartWorker
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import Process
from holdfast.runtime.injection.node import NodeFaults
from holdfast.runtime.node.children import Child
from holdfast.runtime.node.supervision import RestartLimit, StartAgain, Supervisor
from holdfast.runtime.node.worker_group import WorkerGroup
from holdfast.testing.scenario import Range
from holdfast.testing.virtual_links import AGENT
from holdfast.testing.virtual_worker import VirtualWorker
from holdfast.testing.world import World

__all__ = ["VirtualAgent", "VirtualProcesses"]

_MOST_DEATHS, _WITHIN_S = 5, 10.0


class VirtualProcesses:
    """See :class:`holdfast.runtime.node.worker_group.Processes`.

    Attributes:
        all: all that were ever started.
    """

    def __init__(self, world: World) -> None:
        self.all: dict[Process, VirtualWorker] = {}
        self._by_child: dict[Child, VirtualWorker] = {}
        self._world = world

    def start(self, main: Callable[..., None], /, *arguments: Any, name: str) -> Child:
        """Starts a worker; ``arguments``: what it is told."""
        world, scenario = self._world, self._world.scenario
        (spec,) = arguments
        worker, nonce, faults = spec
        joins = worker in world.running
        deaths = dict([scenario.kill_joiner_at_effect] if scenario.kill_joiner_at_effect else ())
        dies_at = (deaths if joins else dict(scenario.kill_at_effect)).get(worker)
        process = replace(AGENT, nonce=nonce)
        child, made = Child(pid=process.pid, name=name), VirtualWorker(worker, process, faults, dies_at, world)
        self.all[process] = self._by_child[child] = world.running[worker] = made
        return child

    def attend(self, child: Child, on_end: Callable[[Child], None], /) -> None:
        """Lets it begin."""
        delays, process = self._world.scenario.delays, self._by_child[child]
        first = len(self.all) <= len(self._world.scenario.plan.workers)

        def ended(status: int) -> None:
            child.status = status
            child.ended.set()
            on_end(child)

        process.attend(ended)
        takes: Range = delays.control if first else delays.start
        self._world.after(takes, process.begin)

    def kill(self, child: Child, /) -> None:
        """Ends it, unless it has ended."""
        self._by_child[child].kill()


class VirtualAgent:
    """Starts workers, and coordinators that died.

    Args:
        world: what it lives in.
        start_coordinator: starts one again.
    """

    def __init__(self, world: World, start_coordinator: Callable[[], None]) -> None:
        scenario = world.scenario
        self.processes = VirtualProcesses(world)
        self._world = world
        self._preempted = False
        self._nodes = scenario.nodes
        self._group = WorkerGroup(
            children=self.processes,
            node=AGENT.node,
            node_of=lambda worker: AGENT.node,
            spec_of=lambda worker, nonce, begins: (worker, nonce, ()),
            draw=map("{:016x}".format, itertools.count(1)).__next__,
            send=lambda message: world.links.say(AGENT, message),
            log=world.log,
            grace_s=0.0,
            clock=lambda: world.time.now,
            later=world.time.after,
        )
        if scenario.faults:
            self._faults().put_around(self._group)
        self._supervisor: Supervisor[float] = Supervisor(
            start=lambda away_s: start_coordinator(),
            later=self._later,
            clock=lambda: world.time.now,
            awake=lambda: world.time.now,
            log=world.log,
            delay_s=0.0,
            patience_s=0.0,
            limit=RestartLimit(num_restarts=_MOST_DEATHS, within_s=_WITHIN_S),
        )

    def _faults(self) -> NodeFaults:
        world = self._world
        return NodeFaults(
            faults=world.scenario.faults,
            nodes=self._nodes,
            tell=lambda spec, own: (*spec[:2], own),
            cut=self._cut,
            log=world.log,
            clock=lambda: world.time.now,
        )

    def begin(self) -> None:
        """Starts all workers of the job."""
        for worker in self._world.scenario.plan.workers:
            self._group.start(worker)

    def start_spare(self, worker: WorkerId) -> None:
        """Starts a process that nobody asked for."""
        self._group.start(worker)

    def _later(self, delay_s: float, again: StartAgain[float]) -> None:
        """A coordinator takes its time to start."""
        self._world.time.after(delay_s + again.spec, lambda: self._supervisor.again(again))

    def coordinator_died(self, away_s: float) -> None:
        """It is started again; ``away_s``: how long that takes."""
        self._supervisor.on_ended(away_s, -9)

    def hello(self) -> Hello:
        """What a coordinator is told that may know nothing."""
        return replace_struct(self._group.hello(), process=AGENT, preempted=self._preempted)

    def preempt(self) -> None:
        """The job is to end."""
        self._preempted = True
        self._world.links.say(AGENT, Preempted())

    def obey(self, command: Command) -> None:
        """Takes a command."""
        if isinstance(command, StartWorker):
            self._group.expect(command.worker)
        self._group.obey(command)

    def _cut(self, node: int) -> None:
        for worker in self._nodes[node]:
            self._world.running[worker].stop()
