"""What a job does about the loss of a node: what its file leaves open is decided, with reasons and figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from holdfast.config.job import Job
from holdfast.config.load import logs_need
from holdfast.core.placement import group_into_nodes
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile
from holdfast.planning.remainder import logged_bytes
from holdfast.recovery.choice import Choice, Circumstances, Sizes, Way, choose, circumstances_of, size_of, sizes_of
from holdfast.telemetry.events import Chosen

__all__ = ["Decided", "decided"]

_BESIDE = "logs are kept all the same, logging.use: on, for layers of which later losses leave no owner"
_NO_CHECKPOINTS = "no checkpoints are made, checkpoint.every: 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What was decided for a job.

    Attributes:
        job: the same, in which ``logging.use`` is ``on`` or ``off``.
        choice: how lost layers come back, and why.
        found: the figures.
        step_log_bytes: how much of what it hands on in a step a worker keeps at most; 0 if none keeps any.
    """

    job: Job
    choice: Choice
    found: Circumstances
    step_log_bytes: int

    @property
    def chosen(self) -> Chosen:
        """All of it as an event."""
        choice, found = self.choice, self.found
        return Chosen(
            way=choice.way,
            advised=choice.advised,
            why=choice.why,
            reasons=choice.reasons,
            logging=self.job.logging.use == "on",
            alone=found.alone,
            spares=found.spares,
            crossing_bytes=round(found.crossing_bytes),
            state_bytes=round(found.state_bytes),
            copy_s=found.copy_s,
            bubble_s=found.bubble_s,
            step_log=not _why_again(self.job),
            step_log_bytes=self.step_log_bytes,
        )


def decided(job: Job, plan: Plan, known: Profile | Sizes, *, restorable: bool = False) -> Decided:
    """Returns how a job recovers from the loss of a node.

    ``logging.use`` becomes ``on`` where it is, or where it is ``auto`` and logs are the best way; ``off`` where the job
    may not log, whatever it says.

    Args:
        job: the job.
        plan: of its whole grid.
        known: what its layers cost, or how large they are, where no times are known.
        restorable: whether it goes on from a checkpoint, to which it can go back.
    """
    found = circumstances_of(
        plan,
        group_into_nodes(plan.workers, job.grid.workers_per_node),
        known,
        bandwidth=job.logging.bandwidth,
        spares=job.resilience.spares,
        staggered=job.train.technique == "staggered",
    )
    advised = choose(found).way
    logs = job.may_log and (job.logging.use == "on" or (job.logging.use == "auto" and advised is Way.LOG))
    told, who = _overridden(job, advised, logs=logs, checkpoints=restorable or job.checkpoint_every > 0)
    choice = choose(found, told, who)
    kept = _kept_bytes(job, plan, sizes_of(known) if isinstance(known, Profile) else known)
    beside = (_BESIDE,) if logs and not found.alone else ()
    return Decided(
        job=msgspec.structs.replace(job, logging=msgspec.structs.replace(job.logging, use="on" if logs else "off")),
        choice=replace(choice, reasons=(*choice.reasons, *beside, _on_steps(job, kept))),
        found=found,
        step_log_bytes=kept,
    )


def _overridden(job: Job, advised: Way, *, logs: bool, checkpoints: bool) -> tuple[Way | None, str]:
    """The way that is gone whatever the figures say, and why; None if they decide."""
    told, who = _told(job, advised, logs=logs)
    if (told or advised) is Way.CHECKPOINT and not checkpoints:
        return Way.STOP, _NO_CHECKPOINTS
    return told, who


def _told(job: Job, advised: Way, *, logs: bool) -> tuple[Way | None, str]:
    if job.strategy.restarts:
        return Way.CHECKPOINT, f"resilience.strategy: {job.resilience.strategy}"
    if advised is Way.CHECKPOINT and logs:
        return Way.LOG, "logging.use: on"
    if advised is Way.LOG and not logs:
        return Way.CHECKPOINT, "logging.use: off" if job.may_log else f"logs need {logs_need(job)}"
    return None, ""


def _on_steps(job: Job, kept: int) -> str:
    """What becomes of the step that the loss interrupts."""
    if why := _why_again(job):
        return f"the interrupted step is run again from its beginning: {why}"
    return (
        "where every layer keeps an owner, only what was lost of the interrupted step is run again: each worker keeps "
        f"what it hands on, {size_of(kept)} at most"
    )


def _why_again(job: Job) -> str:
    """Why an interrupted step is run again from its beginning; empty if it is gone on with."""
    if not job.strategy.keeps_steps:
        return f"resilience.strategy: {job.resilience.strategy}"
    if job.keeps_steps:
        return ""
    if not job.resilience.step_log:
        return "resilience.step_log: false"
    return "stages of several GPUs, with numerics fast"


def _kept_bytes(job: Job, plan: Plan, sizes: Sizes) -> int:
    if _why_again(job):
        return 0
    kept = logged_bytes(plan, sizes.boundary_bytes, staggered=job.train.technique == "staggered")
    most, limit = max(kept.values(), default=0), job.resilience.step_log_bytes
    return min(most, limit) if limit else most
