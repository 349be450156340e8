"""The agent of this machine in a job: what it supervises, and how it reaches the coordinator."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from holdfast.control.messages import Message, Progress
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.errors import CoordinatorUnavailable
from holdfast.runtime.hardening import forbid_core_dumps, raise_file_limit
from holdfast.runtime.launch.briefing import Briefing
from holdfast.runtime.node.agent import Line, NodeAgent
from holdfast.runtime.node.entries import SCRIPT, WORKER
from holdfast.runtime.node.inbox import EventQueue
from holdfast.runtime.node.local import LocalProcesses
from holdfast.runtime.node.news import Reporter
from holdfast.runtime.node.worker_group import Processes, WorkerGroup, new_nonce
from holdfast.telemetry.events import EventLog

__all__ = ["Supervising", "prepare_process", "this_node"]

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


@dataclass(slots=True, kw_only=True)
class Supervising:
    """What the agent of a machine is made of.

    Attributes:
        briefing: what the job's processes are told.
        node: that it is the agent of.
        slots: how many workers the job may begin with here.
        node_of: the part of the machine that each worker is on.
        workers: starts processes of workers.
        around: puts something around the group of workers, before any is started.
        local: the processes of this machine.
        log: where events go.
        inbox: what the agent is to handle.
        gone: makes the error that ends the job here when there was no coordinator for too long.
        notice_s: how long a checkpoint may take that is made at a notice to end; 0: a notice ends the job here at once.
        on_progress: called after every step.
        socket: where the coordinator is reached; None: at its address.
        may_begin_anew: whether it may come again as the agent of another node.
    """

    briefing: Briefing
    node: NodeId
    slots: int
    node_of: Callable[[WorkerId], NodeId]
    workers: Processes
    around: Callable[[WorkerGroup], None]
    local: LocalProcesses
    log: EventLog
    inbox: EventQueue
    gone: Callable[[CoordinatorUnavailable], Exception]
    notice_s: float = 0.0
    on_progress: Callable[[Progress], None] = lambda progress: None
    socket: str | None = None
    may_begin_anew: bool = False

    def agent(self) -> NodeAgent:
        """Returns the agent; it is not connected yet."""
        briefing, control = self.briefing, self.briefing.job.control
        return NodeAgent(
            line=Line(
                address=self.socket or briefing.address,
                token=briefing.token,
                reattach_s=control.reattach_s,
                tls=control.tls,
            ),
            make_group=self._group,
            local=self.local,
            log=self.log,
            reporter=Reporter(of=briefing.job.num_workers),
            gone=self.gone,
            notice_s=self.notice_s,
            on_progress=self.on_progress,
            inbox=self.inbox,
            may_begin_anew=self.may_begin_anew,
            checkpoint=briefing.resumed_from or 0,
        )

    def _group(self, send: Callable[[Message], None]) -> WorkerGroup:
        briefing, places = self.briefing, _Places()

        def spec_of(worker: WorkerId, nonce: str, begins: bool) -> object:
            place = places.of(worker, group.running) % max(1, self.slots)
            return briefing.worker(worker, self.node_of(worker), nonce, begins=begins, place=place)

        group = WorkerGroup(
            children=self.workers,
            node=self.node,
            node_of=self.node_of,
            spec_of=spec_of,
            entry=SCRIPT if briefing.job.loops else WORKER,
            send=send,
            log=self.log,
            grace_s=briefing.job.control.fence_grace_s,
            slots=self.slots,
        )
        self.around(group)
        return group
