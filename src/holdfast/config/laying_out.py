"""Pipelines for a number of workers, where a job says only that: the fastest by its profile, of any number each."""

from __future__ import annotations

import msgspec

from holdfast.config.job import Grid, Job, PipelineLayout
from holdfast.config.profiles import load_profile
from holdfast.core.profile import Profile
from holdfast.core.sum_order import most_held
from holdfast.errors import ConfigError, InfeasiblePlan
from holdfast.planning.templates.instances import best_instance
from holdfast.planning.templates.mapping import best_templates
from holdfast.planning.templates.stages import StageTable, stage_table

__all__ = ["held_in", "laid_out", "stages_in", "sums_of"]


def sums_of(job: Job) -> int:
    """Returns how many parts a worker contributes to sums of gradients, each of the size of the parameters."""
    return _most_held(job)[1]


def held_in(job: Job) -> tuple[int, int]:
    """Returns how often a worker holds parameters and optimizer state, and how many sizes of these its sums take."""
    return 2 if job.resilience.commit == "shadow" else 1, _most_held(job)[0]


def _most_held(job: Job) -> tuple[int, int]:
    """Where the pipelines are still to be found, as of the one that would have most."""
    if job.grid.workers is not msgspec.UNSET:
        return most_held((job.grid.global_microbatches or 1,), chunks=job.train.sum_chunks)
    return most_held(job.grid.batch.counts, tuple(map(max, job.lanes)), job.train.sum_chunks)


def stages_in(job: Job, profile: Profile) -> StageTable:
    """Returns what stages of one worker take in a job."""
    copies, sums = held_in(job)
    return stage_table(profile, 1, memory_bytes=job.resilience.worker_memory or None, copies=copies, sums=sums)


def laid_out(job: Job) -> Job:
    """Returns a job with the pipelines that so many workers are to be; the same where it says which these are.

    No stage takes more memory than a worker has, and no pipeline has fewer workers than are said to be the fewest.

    Raises:
        ConfigError: it has no profile; nothing tells how short pipelines may be; or so many workers cannot be any.
    """
    grid, wanted = job.grid, job.grid.workers
    if wanted is msgspec.UNSET:
        return job
    if job.train.profile is None:
        raise ConfigError(
            "grid.workers: which pipelines are the fastest a profile of the layers tells; expected train.profile with "
            "it, or pipelines, stages and microbatches"
        )
    resilience, total = job.resilience, grid.global_microbatches or 0
    if not (resilience.worker_memory or resilience.smallest_pipeline):
        raise ConfigError(
            "grid.workers: how short pipelines may be is a matter of memory; expected resilience.worker_memory with "
            "it, or resilience.smallest_pipeline"
        )
    table = stages_in(job, load_profile(job.train.profile))
    sizes = range(resilience.smallest_pipeline or 1, min(wanted, table.num_layers, total) + 1)
    templates = best_templates(table, sizes, total)
    try:
        found = best_instance(
            {size: each.pace for size, each in templates.items()}, wanted, resilience.tolerate + 1, total
        )
    except InfeasiblePlan as error:
        raise ConfigError(f"grid.workers: {error}") from None
    if found.dormant:
        raise ConfigError(
            f"grid.workers: of {wanted} workers {found.dormant} would be in no pipeline; expected "
            f"{wanted - found.dormant}"
        )
    layout = tuple(
        PipelineLayout(
            stages=tuple(layers.stop - layers.start for layers in templates[size].layers_by_node), microbatches=share
        )
        for size, share in zip(found.sizes, found.microbatches, strict=True)
    )
    told = Grid(layout=layout, microbatch_size=grid.microbatch_size, workers_per_node=grid.workers_per_node)
    return msgspec.structs.replace(job, grid=told)
