"""The agents of a simulated job: the real worker group, over processes that are simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_struct

from holdfast.control.membership import Closed
from holdfast.control.messages import Command, Message, NodeLeaving, Preempted, StartWorker
from holdfast.core.faults import FaultKind
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import Process
from holdfast.runtime.injection.node import NodeFaults
from holdfast.runtime.node.children import Child
from holdfast.runtime.node.worker_group import WorkerGroup
from holdfast.testing.scenario import Range
from holdfast.testing.virtual_links import agent_number
from holdfast.testing.virtual_worker import VirtualWorker
from holdfast.testing.world import World

__all__ = ["VirtualAgent", "VirtualProcesses"]


class VirtualProcesses:
    """See :class:`holdfast.runtime.node.worker_group.Processes`.

    Args:
        world: what they live in.
        agent: that starts them.
        after_end: called whenever one has ended.
    """

    def __init__(self, world: World, agent: Process, after_end: Callable[[], None]) -> None:
        self._by_child: dict[Child, VirtualWorker] = {}
        self._begins: dict[Process, bool] = {}
        self._world = world
        self._agent = agent
        self._after_end = after_end

    def start(self, main: Callable[..., None], /, *arguments: Any, name: str) -> Child:
        """Starts a worker; ``arguments``: what it is told."""
        world, scenario = self._world, self._world.scenario
        (spec,) = arguments
        worker, nonce, begins, faults = spec
        joins = worker in world.running
        deaths = dict([scenario.kill_joiner_at_effect] if scenario.kill_joiner_at_effect else ())
        dies_at = (deaths if joins else dict(scenario.kill_at_effect)).get(worker)
        process = replace(self._agent, nonce=nonce)
        self._begins[process] = begins and worker in scenario.plan.workers
        child, made = Child(pid=process.pid, name=name), VirtualWorker(worker, process, faults, dies_at, world)
        world.processes[process] = self._by_child[child] = world.running[worker] = made
        return child

    def attend(self, child: Child, on_end: Callable[[Child], None], /) -> None:
        """Lets it begin."""
        delays, process = self._world.scenario.delays, self._by_child[child]

        def ended(status: int) -> None:
            child.status = status
            child.ended.set()
            on_end(child)
            self._after_end()

        process.attend(ended)
        takes: Range = delays.control if self._begins[process.process] else delays.start
        self._world.after(takes, process.begin)

    def kill(self, child: Child, /) -> None:
        """Ends it, unless it has ended."""
        self._by_child[child].kill()

    def terminate(self, child: Child, /) -> None:
        """Tells it to go, unless it has ended."""
        self._by_child[child].leave()


class VirtualAgent:
    """The agent of one node: starts workers there, and is told what to do while it lives and has a connection.

    Args:
        world: what it lives in.
        number: of the node.
        workers: with which the job begins there.
        offers: how many more it could start.
    """

    def __init__(self, world: World, number: int, workers: Sequence[WorkerId], offers: int = 0) -> None:
        self.process = agent_number(number)
        self.alive = True
        self._world = world
        self._preempted = False
        self._waiting: list[Command] = []
        """What it is to be told once it has a connection again."""
        self._group = WorkerGroup(
            children=VirtualProcesses(world, self.process, self._part_if_left),
            node=self.process.node,
            node_of=lambda worker: self.process.node,
            spec_of=lambda worker, nonce, begins: (worker, nonce, begins, ()),
            draw=world.draw_nonce,
            send=self._say,
            log=world.log,
            grace_s=0.0,
            clock=lambda: world.time.now,
            later=world.time.after,
        )
        if world.scenario.faults:
            self._faults(number).put_around(self._group)
        for place in (*workers, *(None for _ in range(offers))):
            self._group.offer(place)

    def _faults(self, number: int) -> NodeFaults:
        """Those of its own workers; whoever joins is offered by the first one."""
        world = self._world
        offers = number == 0
        return NodeFaults(
            faults=tuple(fault for fault in world.scenario.faults if offers or fault.kind is not FaultKind.JOIN),
            nodes=world.scenario.nodes,
            tell=lambda spec, own: (*spec[:3], own),
            cut=self._cut,
            log=world.log,
            clock=lambda: world.time.now,
        )

    def start_spare(self, worker: WorkerId) -> None:
        """Starts a process that nobody asked for."""
        self._group.start(worker, first=True)

    def attach(self) -> None:
        """Connects, if there is a coordinator."""
        links = self._world.links
        if not self.alive or links.is_open(self.process):
            return
        if not self._world.knows_agent(self.process.node):
            self._waiting.clear()  # it was held to be gone
        links.open(self.process, replace_struct(self._group.hello(), process=self.process, preempted=self._preempted))
        if links.is_open(self.process):
            waiting, self._waiting = self._waiting, []
            for command in waiting:
                self.tell(command)

    def reattach(self) -> None:
        """Connects again, after a while."""
        self._world.after(self._world.scenario.delays.reattach, self.attach)

    def tell(self, command: Command) -> None:
        """The coordinator tells it something; while it is away, that waits."""
        if self._world.links.is_open(self.process):
            self._world.links.tell(self.process, lambda: self._obey(command))
        else:
            self._waiting.append(command)

    def forget(self) -> None:
        """The coordinator is gone, and what it wanted to tell with it."""
        self._waiting.clear()

    def kill(self) -> None:
        """It dies, and whatever it has started with it; nobody tells of that but connections that close."""
        self.alive = False
        for worker in sorted(self._group.running):
            self._world.running[worker].kill()
        self._world.links.hang_up(self.process, Closed(worker=None, process=self.process))

    def leave(self) -> None:
        """Its node is to go, and the job goes on."""
        if self.alive:
            self._group.leave()
            self._part_if_left()

    def _part_if_left(self) -> None:
        """It ends once its workers have."""
        if self.alive and self._group.has_left:
            self._say(NodeLeaving(process=self.process, left=True))
            self.alive = False
            self._world.links.hang_up(self.process, Closed(worker=None, process=self.process))

    def preempt(self) -> None:
        """The job is to end."""
        self._preempted = True
        self._say(Preempted())

    def _say(self, message: Message) -> None:
        if self.alive:
            self._world.links.say(self.process, message)

    def _obey(self, command: Command) -> None:
        if not self.alive:
            return
        if isinstance(command, StartWorker):
            self._group.expect(command.worker)
        self._group.obey(command)

    def _cut(self, node: int) -> None:
        for worker in self._world.scenario.nodes[node]:
            self._world.running[worker].stop()
