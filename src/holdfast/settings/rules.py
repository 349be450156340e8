"""What a job says once and for all, made of its keys and of what was planned."""

from __future__ import annotations

from holdfast.config.job import Job
from holdfast.core.evaluation import Evaluating
from holdfast.core.ids import WorkerId
from holdfast.planning.planner import Technique
from holdfast.planning.replays import Logging, grouped
from holdfast.recovery.audit import Sampling
from holdfast.recovery.rules import JobRules
from holdfast.settings.planning import JobPlans

__all__ = ["rules_of", "sampling_of"]


def rules_of(
    job: Job,
    planned: JobPlans,
    *,
    ties: tuple[tuple[int, ...], ...],
    nodes: tuple[tuple[WorkerId, ...], ...],
    job_id: str,
    directory: str,
    evaluated: int = 0,
) -> JobRules:
    """Returns what all processes of a job go by.

    Args:
        job: the job, in which nothing is left open.
        planned: what is planned before training.
        ties: the layers that share a weight, each a tuple of layer indices.
        nodes: which workers fail together.
        job_id: tells this job from all others.
        directory: where the trained layers are saved.
        evaluated: how many micro-batches it is evaluated by; 0: it is not.
    """
    resilience = job.resilience
    return JobRules(
        steps=job.train.steps,
        strategy=resilience.strategy,
        directory=directory,
        job=job_id,
        first_spares=job.spares,
        ties=ties,
        staggered=job.train.technique == Technique.STAGGERED.value,
        terms=planned.terms,
        keeping=planned.keeping,
        step_log_bytes=resilience.step_log_bytes or None,
        logging=_logging(job, nodes),
        checkpoint_every=job.checkpoint_every,
        sets_interval=job.sets_interval,
        follows_failures=job.follows_failures,
        synchronous=job.checkpoint.synchronous,
        snapshot_every=resilience.snapshot_every,
        sampling=sampling_of(job),
        evaluating=_evaluating(job, evaluated),
        wait_s=resilience.wait_for_replacement,
        failure_every_s=resilience.failure_every_s,
        tolerate=resilience.tolerate,
        fewest=0 if planned.shapes is None else planned.shapes.fewest,
        rates=planned.rates if job.strategy.chooses else None,
        shapes=planned.shapes,
        weighs=planned.shapes is not None,
    )


def _evaluating(job: Job, microbatches: int) -> Evaluating | None:
    told = job.evaluate
    if told is None or not microbatches:
        return None
    higher = told.better == "higher"
    return Evaluating(
        every=told.every, microbatches=microbatches, best=told.best or "", higher=higher, patience=told.patience
    )


def _logging(job: Job, nodes: tuple[tuple[WorkerId, ...], ...]) -> Logging | None:
    if job.logging.use != "on":
        return None
    return Logging(nodes=grouped(nodes, job.logging.groups), helpers=job.logging.helpers)


def sampling_of(job: Job) -> Sampling | None:
    """Returns what the job audits; None: nothing."""
    every = job.train.compare_every if job.loops else job.train.audit_every
    return Sampling(seed=job.train.seed, every=every, layers=not job.loops) if every else None
