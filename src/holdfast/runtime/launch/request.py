"""What was asked for: one run of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.config.job import Job
from holdfast.core.faults import Fault, FaultKind
from holdfast.core.profile import Profile
from holdfast.runtime.resume import checkpoints_url
from holdfast.runtime.specs import ResumeFrom
from holdfast.telemetry.story import EVENTS

__all__ = ["DECISIONS", "RunRequest"]

DECISIONS = "decisions"
"""The folder in the run directory that keeps decisions, where coordinators on several machines are to see them."""
_ELSEWHERE = 3
"""Coordinators, if nothing is said: two of them may be lost, one after the other, and there is one at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One run of a job.

    Attributes:
        job: the job.
        run_dir: a directory of the job's own; must not hold an earlier run, unless this is another attempt at it.
        faults: what is to happen, to whom, when.
        emulate: sleep as long as it says instead of computing, on its number of layers; the job's model and data are
            not even built. None to compute.
        isolate: run every node in a network namespace of its own, so that its link can be cut. Linux, root.
        resume: the checkpoint to go on from; None to begin anew.
        accept: keys that may differ from the job that made the checkpoint.
        again: whether an earlier attempt may have been in the run directory.
        slots: how many of its workers may begin on this machine; None: all.
        leaves: whether a notice to end ends no job, but has the workers of this machine leave it.
        token: of the job, if it is to have this one; empty: one is drawn.
    """

    job: Job
    run_dir: Path
    faults: tuple[Fault, ...] = ()
    emulate: Profile | None = None
    isolate: bool = False
    resume: ResumeFrom | None = None
    accept: tuple[str, ...] = ()
    again: bool = False
    slots: int | None = None
    leaves: bool = False
    token: str = field(default="", repr=False)

    @property
    def begin_here(self) -> int:
        """How many workers may begin on this machine."""
        return self.job.most_workers if self.slots is None else self.slots

    @property
    def begin_elsewhere(self) -> int:
        """How many have to begin on others; spares need not."""
        return max(0, self.job.num_workers - self.begin_here)

    @property
    def num_nodes(self) -> int:
        """Those of the grid, which spares fill up, and as many as the other spares need."""
        return -(-self.job.most_workers // self.job.grid.workers_per_node)

    @property
    def isolated(self) -> bool:
        """Whether nodes are to be in networks of their own."""
        return self.isolate or any(fault.kind is FaultKind.PARTITION for fault in self.faults)

    @property
    def store(self) -> str:
        """Where decisions are kept: ``sqlite``, or what all coordinators see."""
        known = self.job.control.store
        if known != "auto":
            return known
        return "sqlite" if self.slots is None else str(self.run_dir.absolute() / DECISIONS)

    @property
    def coordinators(self) -> int:
        """How many there are to be; where agents of other machines can come, all but one of them are there."""
        known = self.job.control.coordinators
        return known or (1 if self.slots is None or self.store == "sqlite" else _ELSEWHERE)

    @property
    def checkpoints(self) -> str:
        """Url of where the job's checkpoints go."""
        return checkpoints_url(self.job, self.run_dir)

    @property
    def events(self) -> Path:
        """The job's log."""
        return self.run_dir / EVENTS
