"""What the processes of a job are told when they are started, and what those that look something up answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.config.deciding import deciding
from holdfast.config.job import Job
from holdfast.config.load import check_cuts
from holdfast.core.evaluation import Best
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile
from holdfast.core.tensorspec import ItemSpec, TensorSpec
from holdfast.errors import ConfigError
from holdfast.planning.training import Terms
from holdfast.recovery.choice import Sizes
from holdfast.recovery.rules import JobRules
from holdfast.storage.checkpoints import Facts, Rejected
from holdfast.version import __version__

__all__ = [
    "CoordinatorSpec",
    "Fit",
    "Found",
    "LibrarySpec",
    "Probed",
    "ResumeFrom",
    "WorkerSpec",
    "changed_sources",
    "check_sources",
    "emulated_probe",
    "facts_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFrom:
    """A checkpoint to go on from.

    Attributes:
        url: where the checkpoints are.
        step: of the checkpoint; None for the newest sound one.
        auto: begin anew if there is none, and write what is left to be written if the last step is done.
        others: further places where checkpoints may be; the newest of all is meant.
        best: which state was the best until then, once it is known which checkpoint is meant.
    """

    url: str
    step: int | None
    auto: bool = False
    others: tuple[str, ...] = ()
    best: Best | None = None

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        return self.url if self.step is None else f"{self.url}@{self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint that a job can go on from, every byte of it verified, and the newer ones that were rejected.

    ``url``: where the checkpoints are. ``notes``: what differs from the job that made it, and was accepted or could not
    be compared; for people. ``best``: which state was the best until then.
    """

    url: str
    step: int
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...] = ()
    best: Best | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker's process is told.

    Attributes:
        worker: who it is.
        node: that it runs on.
        nonce: of its process.
        job: the job.
        rules: what it says once and for all.
        plan: the plan of the healthy grid; a spare is not in it.
        host: the address that it listens on.
        address: of the coordinator.
        token: its share of the job's, for its own name.
        events: path of the job's log.
        boundaries: what every layer hands on, from the first to the last; empty if emulated.
        item: what every item of the data is like; None if emulated.
        logs: the job's folder of logs; None if nothing is logged.
        deadline: when the loop of a script is to be stopped, in seconds since the epoch; infinite: by no time.
        logs_url: where all nodes can read the job's logs; None: each other's disks.
        nodes: the workers that share a node.
        model: digest of the model's first weights, and of the first state of a script's optimizers.
        script: what the script said of its optimizers, schedulers and data when it was tried, by key.
        sources: digests of the files of the user's own code, as they were when the job was tried.
        first_item: what the probe had of a script's first item; empty if nobody compares it.
        emulate: sleep as long as it says instead of computing; None to compute.
        device: what it computes on: ``cpu``, or ``cuda:N``.
        around: each is called with the worker's :class:`holdfast.runtime.driver.Driver` before that runs, and puts
            something around its ports; none but in a job that is built to be struck.
        checkpoints: url of where the job's checkpoints go.
        resume: the checkpoint to load the layers from, with its step; None to begin anew.
    """

    worker: WorkerId
    node: NodeId
    nonce: str
    job: Job
    rules: JobRules
    plan: Plan
    host: str
    address: str
    token: str
    events: str
    boundaries: tuple[TensorSpec, ...]
    emulate: Profile | None
    checkpoints: str
    resume: ResumeFrom | None
    item: ItemSpec | None = None
    logs: str | None = None
    deadline: float = math.inf
    logs_url: str | None = None
    nodes: tuple[tuple[WorkerId, ...], ...] = ()
    model: str = ""
    script: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    first_item: str = ""
    device: str = "cpu"
    around: tuple[Callable[[Any], None], ...] = ()


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns which files of the user's code are others than before; those that one side alone knows do not count.

    Args:
        before: their digests, by whatever names them.
        now: the same.
    """
    return [key for key, digest in before.items() if now.get(key, digest) != digest]


def check_sources(told: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Checks that the user's code is what it was when the job was tried.

    Raises:
        ConfigError: a file has changed since.
    """
    if changed := changed_sources(told, ours):
        raise ConfigError(
            f"{', '.join(changed)}: the code in its file has changed since the job was tried; expected the same in "
            "every process"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSpec:
    """All that the coordinator's process is told.

    Attributes:
        job: the job.
        rules: what it says once and for all.
        plan: of the healthy grid.
        library: the folder of the plans that are made while training runs; None if none are.
        token: of the job.
        store: where the decisions are, as ``control/chain/opening.py`` takes it; those of before are taken up.
        events: path of the job's log.
        checkpoints: url of where the job's checkpoints go.
        facts: what they say of the job.
        resume: the checkpoint that the job goes on from; None if it begins anew.
        host: the address to listen on.
        port: to listen on; 0 for any.
        socket: where to listen, too; None nowhere else.
        brief: what agents of other machines are told of the job, unread.
        invitation: the token by which they may ask for it.
        again: whether there was a coordinator of this job before.
        node: the node that it is on.
        heard: a file that is touched whenever that node's agent hears of who leads; None: by its store alone one knows.
        around: each is called with the coordinator's :class:`holdfast.control.decider.Decider` before that decides,
            and puts something around its ports; none but in a job that is built to be struck.
    """

    job: Job
    rules: JobRules
    plan: Plan
    token: str
    store: str
    events: str
    checkpoints: str
    facts: Facts
    host: str
    port: int
    library: str | None = None
    resume: ResumeFrom | None = None
    socket: str | None = None
    brief: bytes = b""
    invitation: str = ""
    again: bool = False
    node: NodeId | None = None
    heard: str | None = None
    around: tuple[Callable[[Any], None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySpec:
    """All that the process which makes plans ahead is told.

    Attributes:
        plan: the plan of the healthy grid.
        terms: what the planner goes by.
        failures: the largest number of failures to plan for, at least 1.
        folder: where the plans go.
        events: path of the job's log.
    """

    plan: Plan
    terms: Terms
    failures: int
    folder: str
    events: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the probe of a job found.

    Attributes:
        boundaries: what every layer hands on, from the first to the last.
        facts: what it is.
        ties: tuples of layers that share weights.
        sizes: bytes of what every layer hands on and holds; None if it is emulated.
        item: what every item of the data is like; None if it is emulated.
        warnings: what a person should know, a line each.
        job: as its script says, or with the device that it computes on; None if its file says all.
        first_item: digest of what comes of a script's first item; empty unless a script runs.
        gpus: the names of the GPUs that are visible, by number; empty if the job does without.
        arithmetic: what a machine must have in common with this one to compute the same bits; empty if it is emulated.
        evaluated: how many micro-batches it is evaluated by; 0: by none.
    """

    boundaries: tuple[TensorSpec, ...]
    facts: Facts
    ties: tuple[tuple[int, ...], ...] = ()
    sizes: Sizes | None = None
    item: ItemSpec | None = None
    warnings: tuple[str, ...] = ()
    job: Job | None = None
    first_item: str = ""
    gpus: tuple[str, ...] = ()
    arithmetic: str = ""
    evaluated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a further machine has of what a job needs.

    Attributes:
        arithmetic: what it computes by; as of :class:`Probed`.
        gpus: how many are visible; 0 if the job does without.
    """

    arithmetic: str
    gpus: int


def emulated_probe(job: Job, profile: Profile) -> Probed:
    """Returns what the probe of a job would find if its model were the layers of a profile: it is not even built.

    Raises:
        ConfigError: the grid does not fit the layers, stages are sharded over several GPUs, or the job does not say how
            many steps it has.
    """
    if not job.train.steps:
        raise ConfigError(
            "train.epochs: how many steps these are, only the data tell, and where times are emulated none are opened; "
            "expected train.steps"
        )
    if job.most_shards > 1:
        raise ConfigError(
            "grid: stages of several GPUs cannot be emulated with numerics fast, as a profile has times for one GPU; "
            "expected exact, or one GPU for each stage"
        )
    check_cuts(job.grid, len(profile.layers), what="profile")
    job = job.on("cpu")  # nothing is computed
    facts = facts_of(job, layers=len(profile.layers), model="emulated", data="emulated")
    evaluated = 0 if job.evaluate is None else job.evaluate.microbatches
    return Probed(boundaries=(), facts=facts, job=job, evaluated=evaluated)


def facts_of(
    job: Job,
    *,
    layers: int,
    model: str,
    data: str,
    contents: str = "",
    sources: Mapping[str, str] | None = None,
    script: Mapping[str, Any] | None = None,
    first: str = "",
) -> Facts:
    """Returns what a checkpoint of this job says, and what one must say for this job to go on from it.

    Args:
        job: the job.
        layers: of its model.
        model: digest of that.
        data: digest of its data.
        contents: digest of the files that samples are read from.
        sources: digest of the file of every function that the job names, or of every file of its script.
        script: what its script says of itself, by key.
        first: digest of the state that its script begins with.
    """
    return Facts(
        job=job.name,
        holdfast=__version__,
        seed=job.train.seed,
        layers=layers,
        microbatches=job.global_microbatches,
        microbatch_size=job.grid.microbatch_size,
        optimizer=job.optimizer.kind,
        model=model,
        data=data,
        contents=contents,
        values=deciding(job),
        sources=dict(sources or {}),
        script=None if script is None else dict(script),
        first=first,
    )
