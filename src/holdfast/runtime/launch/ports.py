"""What a job's processes are started through, and what is put around that in a job that is built to be struck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from holdfast.core.faults import Fault, FaultKind
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.errors import InternalError
from holdfast.runtime.injection.networks import InNamespace, IsolatedWorkers
from holdfast.runtime.injection.node import NodeFaults, struck, struck_coordinator
from holdfast.runtime.isolation import Networks
from holdfast.runtime.launch.briefing import Briefing
from holdfast.runtime.node.entries import COORDINATOR, EntryPoint
from holdfast.runtime.node.worker_group import Processes, WorkerGroup
from holdfast.runtime.specs import CoordinatorSpec
from holdfast.telemetry.events import EventLog

__all__ = ["Ports", "joined_ports", "ports_of"]


def _nothing(group: WorkerGroup) -> None:
    pass


def _no_network(node: int) -> None:
    raise InternalError(f"node {node} is to be cut off, and nodes have no networks of their own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What a job's processes are started through.

    Attributes:
        coordinator: what a coordinator on this machine is told.
        entry: what runs in its process.
        node: the agent's.
        workers: starts workers.
        around: puts something around the group of workers, before any is started.
        cut: takes a node's network link down.
        node_of: the part of it that each worker is on; None: there are none.
    """

    coordinator: CoordinatorSpec
    entry: EntryPoint = COORDINATOR
    node: NodeId
    workers: Processes
    around: Callable[[WorkerGroup], None] = _nothing
    cut: Callable[[int], None] = _no_network
    node_of: Callable[[WorkerId], NodeId] | None = None


def ports_of(briefing: Briefing, node: NodeId, workers: Processes, log: EventLog, networks: Networks | None) -> Ports:
    """Returns the ports of a job where it is begun, with its faults and networks around them.

    Args:
        briefing: what its processes are told.
        node: the agent's.
        workers: starts processes on this machine.
        log: the job's events.
        networks: that its nodes are to be in; None: the host's.
    """
    ports = Ports(coordinator=briefing.coordinator(node), node=node, workers=workers)
    if networks is not None:
        ports = _isolated(ports, briefing, networks)
    if briefing.request.faults:
        ports = _struck(ports, briefing, log)
    return ports


def _isolated(ports: Ports, briefing: Briefing, networks: Networks) -> Ports:
    """The coordinator is in the hub, and the agent reaches it through a door in the run directory."""
    door = networks.open_door(briefing.request.run_dir)
    ids = tuple(replace(ports.node, name=f"node-{number}") for number in range(len(briefing.nodes)))
    workers = IsolatedWorkers(inner=ports.workers, networks=networks, nodes=briefing.nodes, ids=ids)
    return replace(
        ports,
        coordinator=replace(ports.coordinator, host=networks.hub.host, socket=door),
        entry=InNamespace.of(ports.entry, networks.hub),
        workers=workers,
        cut=networks.cut,
        node_of=workers.node_of,
    )


def _struck(ports: Ports, briefing: Briefing, log: EventLog) -> Ports:
    faults = briefing.request.faults
    return replace(
        ports,
        coordinator=struck_coordinator(faults, ports.coordinator),
        around=_strikes(briefing, faults, ports.cut, log),
    )


def joined_ports(briefing: Briefing, node: NodeId, workers: Processes, log: EventLog, brief: bytes) -> Ports:
    """Returns those of a further machine, with the faults around its workers that are to strike there.

    Who comes at a fault comes on the machine where the job was begun.

    Args:
        briefing: what its processes are told.
        node: the agent's.
        workers: starts processes on this machine.
        log: where events go.
        brief: what this machine was told of the job, unread: its coordinators tell others the same.
    """
    faults = tuple(fault for fault in briefing.request.faults if fault.kind is not FaultKind.JOIN)
    around = _strikes(briefing, faults, _no_network, log) if faults else _nothing
    return Ports(coordinator=briefing.coordinator(node, brief), node=node, workers=workers, around=around)


def _strikes(
    briefing: Briefing, faults: tuple[Fault, ...], cut: Callable[[int], None], log: EventLog
) -> Callable[[WorkerGroup], None]:
    tell = partial(struck, briefing.request.faults)
    return NodeFaults(faults=faults, nodes=briefing.nodes, tell=tell, cut=cut, log=log).put_around
