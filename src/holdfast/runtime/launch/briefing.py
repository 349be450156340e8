"""What the processes of a job are told."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from holdfast.config.job import Job
from holdfast.control.chain.opening import is_database
from holdfast.control.membership import GridState, StoredDecision
from holdfast.control.token import share
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import group_into_nodes
from holdfast.core.slots import slots_of
from holdfast.recovery.rules import JobRules
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.specs import CoordinatorSpec, LibrarySpec, Probed, WorkerSpec
from holdfast.settings.planning import JobPlans, tolerated
from holdfast.settings.rules import rules_of
from holdfast.telemetry.clocks import this_clock
from holdfast.version import __version__

__all__ = ["Brief", "Briefing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Briefing:
    """All that is settled before the first process of a job starts, and what each of them is told of it.

    Attributes:
        request: the run, with the checkpoint that it goes on from.
        job: the job, in which nothing is left open.
        probed: what its model and data are.
        planned: its plan.
        token: of this attempt at the job, made of ``invitation``.
        invitation: the token that agents of other machines are given by people.
        job_id: tells this job's decisions and logs from those of all others.
        store: where the decisions are, as ``control/chain/opening.py`` takes it.
        deadline: when the loop of a script is to be stopped, in seconds since the epoch; infinite: by no time.
        host: the address that the workers of this machine listen on.
        events: where the processes of this machine write down what happens.
        heard: see :class:`holdfast.runtime.specs.CoordinatorSpec`.
        address: of the coordinator, once it listens.
    """

    request: RunRequest
    job: Job
    probed: Probed
    planned: JobPlans
    token: str = field(repr=False)
    invitation: str = field(default="", repr=False)
    job_id: str
    store: str
    deadline: float = math.inf
    host: str
    events: Path
    heard: Path | None = None
    address: str = ""

    @property
    def nodes(self) -> tuple[tuple[WorkerId, ...], ...]:
        """Which workers fail together."""
        return group_into_nodes((*self.planned.plan.workers, *self.job.spares), self.job.grid.workers_per_node)

    @property
    def resumed_from(self) -> int | None:
        """The step of the checkpoint that it goes on from; None: it begins."""
        return None if self.request.resume is None else self.request.resume.step

    @property
    def rules(self) -> JobRules:
        """What the job says once and for all."""
        return rules_of(
            self.job,
            self.planned,
            ties=self.probed.ties,
            nodes=self.nodes,
            job_id=self.job_id,
            directory=str(self.request.run_dir / "final"),
            evaluated=self.probed.evaluated,
        )

    @property
    def begins(self) -> StoredDecision:
        """What is decided before anything is."""
        return StoredDecision(revision=0, generation=0, job=self.job_id, grid=GridState(baseline=self.planned.plan))

    @property
    def logs(self) -> Path | None:
        """Where this job's logs are: nobody can read those of another one for its own. None if nothing is logged."""
        if self.rules.logging is None:
            return None
        folder = self.job.logging.directory
        return (self.request.run_dir / "logs" if folder is None else Path(folder)) / self.job_id

    @property
    def logs_url(self) -> str | None:
        """Where all nodes can read them; None: on each other's disks."""
        url = self.job.logging.url
        return None if url is None else f"{url.rstrip('/')}/{self.job_id}"

    def coordinator(self, node: NodeId, brief: bytes = b"") -> CoordinatorSpec:
        """Returns what a coordinator on this machine is told, which is this node.

        ``brief``: what this machine itself was told of the job, unread; empty: the job is begun here.
        """
        run_dir, planned = self.request.run_dir, self.planned
        return CoordinatorSpec(
            job=self.job,
            rules=self.rules,
            plan=planned.plan,
            library=None if planned.terms is None else str(run_dir / "plans"),
            token=self.token,
            store=self.store,
            events=str(self.events),
            host=self.host,
            port=self.job.control.port,
            checkpoints=self.request.checkpoints,
            facts=self.probed.facts,
            resume=self.request.resume,
            brief=brief if brief or self.request.slots is None else self._brief(),
            again=bool(brief),
            invitation=self.invitation,
            node=node,
            heard=None if self.heard is None else str(self.heard),
        )

    def _brief(self) -> bytes:
        """What agents of other machines are told: nothing that is secret, or this machine's own."""
        request = replace(self.request, run_dir=self.request.run_dir.absolute(), token="")
        store = "" if is_database(self.store) else self.store
        told = replace(self, request=request, token="", invitation="", store=store, host="", events=Path(), address="")
        brief = Brief(holdfast=__version__, folder=os.getcwd(), clock=this_clock(), briefing=told)
        return msgspec.msgpack.encode(brief, enc_hook=str)

    def worker(self, worker: WorkerId, node: NodeId, nonce: str, *, begins: bool, place: int) -> WorkerSpec:
        """Returns what a worker is told.

        Args:
            worker: who it is.
            node: that it runs on.
            nonce: of its process.
            begins: whether it begins with the job, and not after others, who give it the state of the running job.
            place: the number of its slot on this machine.
        """
        request, probed, plan, nodes = self.request, self.probed, self.planned.plan, self.nodes
        return WorkerSpec(
            worker=worker,
            node=node,
            nonce=nonce,
            job=self.job,
            rules=self.rules,
            plan=plan,
            host=self.host,
            address=self.address,
            token=share(self.token, str(worker)),
            events=str(self.events),
            boundaries=probed.boundaries,
            item=probed.item,
            emulate=request.emulate,
            checkpoints=request.checkpoints,
            resume=request.resume if begins else None,
            deadline=self.deadline,
            logs=None if self.logs is None else str(self.logs),
            logs_url=self.logs_url,
            nodes=nodes,
            model=probed.facts.first or probed.facts.model,
            script=probed.facts.script or {},
            sources=probed.facts.sources,
            first_item=probed.first_item,
            device=f"cuda:{place}" if self.job.train.device == "cuda" else self.job.train.device,
        )

    def library(self) -> LibrarySpec | None:
        """Returns what the process is told that makes plans ahead; None if there is nothing to make."""
        failures, terms, plan = tolerated(self.job), self.planned.terms, self.planned.plan
        if terms is None or not failures or slots_of(plan) is None:  # it is not regular
            return None
        return LibrarySpec(
            plan=plan,
            terms=terms,
            failures=failures,
            folder=str(self.request.run_dir / "plans"),
            events=str(self.events),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """What the agent of another machine is told of a job, before it takes part.

    Attributes:
        holdfast: the version that made it.
        folder: where the job was begun, and relative paths begin.
        clock: by which the job's log is told.
        briefing: what its processes are told; without the token, and whatever is each machine's own.
    """

    holdfast: str
    folder: str
    clock: str
    briefing: Briefing
