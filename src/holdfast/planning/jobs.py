"""From a job file to its plan: the same for training and for ``holdfast plan``."""

from __future__ import annotations

from holdfast.config.job import Job
from holdfast.config.profiles import load_profile
from holdfast.core.builders import regular_plan
from holdfast.core.placement import LayerRange, split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile, costs_from_profile, unit_costs
from holdfast.core.validate import validate
from holdfast.errors import ConfigError
from holdfast.planning.partition import balanced_stages
from holdfast.planning.planner import Technique
from holdfast.planning.training import Terms, planned_grid

__all__ = ["healthy_plan", "profile_of", "stages_of", "terms_of", "tolerated"]


def profile_of(job: Job, num_layers: int) -> Profile | None:
    """Returns the profile that a job names; None if it names none.

    Raises:
        ConfigError: it cannot be read, or is that of another model.
    """
    if job.train.profile is None:
        return None
    profile = load_profile(job.train.profile)
    if len(profile.layers) != num_layers:
        raise ConfigError(
            f"train.profile: {job.train.profile} has {len(profile.layers)} layers, but the model has {num_layers}: "
            "is it the profile of another model?"
        )
    return profile


def terms_of(
    job: Job, num_layers: int, profile: Profile | None = None, ties: tuple[tuple[int, ...], ...] = ()
) -> Terms | None:
    """Returns what the planner goes by for a job; None if its technique needs no planner.

    Args:
        job: the job.
        num_layers: of its model.
        profile: what its layers cost; None: all the same.
        ties: tuples of layers that share weights.
    """
    if job.train.technique not in (Technique.DECOUPLED, Technique.STAGGERED):
        return None
    return Terms(
        technique=Technique(job.train.technique),
        costs=unit_costs(num_layers) if profile is None else costs_from_profile(profile),
        in_flight=job.train.in_flight or 2 * job.grid.stages,
        ties=ties,
        copy_s=() if profile is None else _copy_s(profile),
    )


def _copy_s(profile: Profile) -> tuple[float, ...]:
    return tuple(profile.link.seconds_of(layer.state_bytes) for layer in profile.layers)


def stages_of(job: Job, num_layers: int, profile: Profile | None = None) -> tuple[LayerRange, ...]:
    """Returns the layers of stage 0, 1, ...: equally many, or if a profile tells what they cost, equally fast.

    Raises:
        ConfigError: more stages than layers.
    """
    stages = split_evenly(num_layers, job.grid.stages)
    return stages if profile is None else balanced_stages(costs_from_profile(profile), job.grid.stages)


def tolerated(job: Job) -> int:
    """Returns for how many failures plans are made ahead: those to tolerate, else of a quarter of the workers.

    0 if the grid survives none.
    """
    grid = job.grid
    wanted = job.resilience.tolerate or max(1, grid.pipelines * grid.stages // 4)
    return min(wanted, (grid.pipelines - 1) * grid.stages)


def healthy_plan(
    job: Job, num_layers: int, profile: Profile | None = None, ties: tuple[tuple[int, ...], ...] = ()
) -> Plan:
    """Returns the plan of a job's whole grid, proved right.

    Args:
        job: the job.
        num_layers: of its model.
        profile: what its layers cost; None: all the same. Used by the techniques of the planner.
        ties: tuples of layers that share weights.

    Raises:
        ConfigError: more stages than layers.

    Cost: for the planner's techniques up to a second for tens of workers, else milliseconds.
    """
    terms, grid = terms_of(job, num_layers, profile, ties), job.grid
    if terms is not None:
        return planned_grid(grid.pipelines, stages_of(job, num_layers, profile), grid.microbatches, terms)
    plan = regular_plan(grid.pipelines, stages_of(job, num_layers), grid.microbatches, job.train.technique)
    validate(plan, ties=ties)
    return plan
