"""The agent of this machine in a job: what it supervises, and how it reaches the coordinator."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

from holdfast.control.messages import Message, Progress
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.errors import CoordinatorUnavailable
from holdfast.runtime.hardening import forbid_core_dumps, raise_file_limit
from holdfast.runtime.launch.briefing import Briefing
from holdfast.runtime.launch.ports import Ports
from holdfast.runtime.node.agent import Line, NodeAgent
from holdfast.runtime.node.entries import SCRIPT, WORKER
from holdfast.runtime.node.inbox import EventQueue
from holdfast.runtime.node.local import LocalProcesses
from holdfast.runtime.node.news import Reporter
from holdfast.runtime.node.worker_group import WorkerGroup, new_nonce
from holdfast.telemetry.events import EventLog

__all__ = ["agent_of", "heard_of_leader", "prepare_process", "this_node"]

_NAMES = ("HOLDFAST_NODE", "SLURMD_NODENAME", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK")
"""The variables that may have a node's name, the first that is set: ours, Slurm's, Kubernetes', SkyPilot's."""


def prepare_process() -> None:
    """Makes this process ready to supervise those of a job."""
    raise_file_limit()
    forbid_core_dumps()
    # Gloo, of a sharded stage, says every lost rank on stderr as an error of its own; here it is an event.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # What a script forks never speaks to the coordinator: gRPC need not prepare for that, nor say that it cannot.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # What becomes of a connection is ours to tell, too: gRPC says each that a silent host has as information on stderr.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def this_node(name: str = "", environ: Mapping[str, str] = os.environ) -> NodeId:
    """Returns the node that a process of ours is the agent of: nobody else ever has this identity.

    Args:
        name: of it, for people; empty: as the environment says, else that of the machine.
        environ: the environment.

    Raises:
        ConfigError: that is no name.
    """
    known = next((environ[key] for key in _NAMES if environ.get(key)), "")
    return NodeId(name=name or known or socket.gethostname() or "localhost", nonce=new_nonce())


@contextlib.contextmanager
def heard_of_leader() -> Iterator[Path]:
    """Makes a file in memory that an agent touches, and its coordinators look at; it is gone with the agent."""
    descriptor = os.memfd_create("heard")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _touch(path: Path | None) -> None:
    """Best effort: the store has signs of life, too."""
    with contextlib.suppress(OSError):
        if path is not None:
            os.utime(path)


@dataclass(slots=True)
class _Places:
    """The slots of a machine, by number: each is one worker's for as long as that runs, and may be another's then."""

    _of: dict[WorkerId, int] = field(default_factory=dict)

    def of(self, worker: WorkerId, running: Iterable[WorkerId]) -> int:
        """Returns the slot of a worker that is started: the one that it had, if no other has that now."""
        taken = {self._of[each] for each in running if each != worker and each in self._of}
        if self._of.get(worker, -1) in (-1, *taken):
            self._of[worker] = next(number for number in count() if number not in taken)
        return self._of[worker]


def agent_of(
    briefing: Briefing,
    ports: Ports,
    local: LocalProcesses,
    log: EventLog,
    inbox: EventQueue,
    *,
    slots: int,
    coordinators: tuple[str, ...] = (),
    gone: Callable[[CoordinatorUnavailable], Exception] = lambda error: error,
    notice_s: float = 0.0,
    leaves: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    stand_by: Callable[[], str] = lambda: "",
) -> NodeAgent:
    """Returns the agent of this machine; it is not connected yet.

    Args:
        briefing: what the job's processes are told.
        ports: what they are started through.
        local: the processes of this machine.
        log: where events go.
        inbox: what the agent is to handle.
        slots: how many workers the job may begin with here.
        coordinators: the addresses of those that run here.
        gone: makes the error that ends the job here when there was no coordinator for too long.
        notice_s: how long a checkpoint may take that is made at a notice to end; 0: a notice ends the job here at once.
        leaves: whether a notice has this node's workers leave the job, which goes on.
        on_progress: called after every step.
        stand_by: starts a coordinator that stands by, and returns its address; "": it cannot.
    """
    control, node, places = briefing.job.control, ports.node, _Places()

    def node_of(worker: WorkerId) -> NodeId:
        return node if ports.node_of is None else ports.node_of(worker)

    def spec_of(worker: WorkerId, nonce: str, begins: bool) -> object:
        place = places.of(worker, agent.group.running) % max(1, slots)
        told = briefing if ports.coordinator.socket else replace(briefing, address=agent.addresses)
        return told.worker(worker, node_of(worker), nonce, begins=begins, place=place)

    def group(send: Callable[[Message], None]) -> WorkerGroup:
        made = WorkerGroup(
            children=ports.workers,
            node=node,
            node_of=node_of,
            spec_of=spec_of,
            entry=SCRIPT if briefing.job.loops else WORKER,
            send=send,
            log=log,
            grace_s=control.fence_grace_s,
            slots=slots,
        )
        ports.around(made)
        return made

    agent = NodeAgent(
        line=Line(
            address=ports.coordinator.socket or briefing.address,
            token=briefing.token,
            reattach_s=control.reattach_s,
            tls=control.tls,
            impatient=control.coordinators > 1,
        ),
        make_group=group,
        local=local,
        log=log,
        reporter=Reporter(of=briefing.job.num_workers),
        gone=gone,
        notice_s=notice_s,
        leaves=leaves,
        on_progress=on_progress,
        inbox=inbox,
        coordinators=coordinators,
        stand_by=stand_by,
        on_pulse=partial(_touch, briefing.heard),
        checkpoint=briefing.resumed_from or 0,
    )
    return agent
