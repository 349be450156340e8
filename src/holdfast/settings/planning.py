"""From a job file to its plan: the same for training and for ``holdfast plan``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise, repeat

import msgspec

from holdfast.config.job import BertModel, Cluster, GptModel, Grid, Job
from holdfast.config.laying_out import held_in, stages_in, sums_of
from holdfast.config.load import check_cuts
from holdfast.config.profiles import load_profile
from holdfast.core.placement import LayerRange, home_placement, split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, Link, Profile, costs_from_profile, unit_costs
from holdfast.core.routes import home_routes
from holdfast.core.validate import validate
from holdfast.errors import ConfigError
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.partition import balanced_stages
from holdfast.planning.planner import Technique
from holdfast.planning.reshaping import Shapes
from holdfast.planning.templates.mapping import best_templates
from holdfast.planning.templates.stages import StageTable, table_of
from holdfast.planning.training import WORTHWHILE, Terms, planned_grid, planned_routes, regular_grid, within_limit
from holdfast.recovery.choice import size_of
from holdfast.recovery.rates import Rates, step_seconds
from holdfast.schedule.builders import home_plan
from holdfast.schedule.evaluate import evaluate
from holdfast.strategies.templates import pipelines_need

__all__ = [
    "JobPlans",
    "Settled",
    "costs_of_job",
    "grid_of",
    "healthy_plan",
    "in_flight_of",
    "keeping_of",
    "known_ties",
    "most_memory",
    "plans_of",
    "profile_of",
    "rates_of",
    "settled",
    "shapes_of",
    "stages_of",
    "sums_of",
    "terms_of",
    "tolerated",
    "with_technique",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A job that says by which technique it is trained.

    Attributes:
        job: the job; its technique is not ``auto``.
        plan: of its whole grid, proved right.
        why: what decided, for people; empty if the job says it itself, or there was nothing to choose from.
    """

    job: Job
    plan: Plan
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlans(Settled):
    """What is planned of a settled job before training.

    Attributes:
        terms: what the planner goes by; None if plans keep to 1F1B's rules.
        shapes: what pipelines of whoever is left are made by; None if none are made.
        keeping: costs per layer, by which an interrupted step is gone on with; None if it is always run again whole.
        rates: how fast the cluster is; None if nothing is known of times.
    """

    terms: Terms | None = None
    shapes: Shapes | None = None
    keeping: Costs | None = None
    rates: Rates | None = None


def profile_of(job: Job, num_layers: int | None) -> Profile | None:
    """Returns the profile that a job names; None if it names none. Where stages are sharded, times are theirs.

    Args:
        job: the job.
        num_layers: of its model; None if only the profile tells.

    Raises:
        ConfigError: it cannot be read, is that of another model, or has no times for the GPUs of the stages.
    """
    if job.train.profile is None:
        return None
    profile = load_profile(job.train.profile)
    if num_layers is not None and len(profile.layers) != num_layers:
        raise ConfigError(
            f"train.profile: {job.train.profile} has {len(profile.layers)} layers, but the model has {num_layers}: "
            "is it the profile of another model?"
        )
    return _sharded(profile, job)


def _sharded(profile: Profile, job: Job) -> Profile:
    """Returns the profile with the times that layers take on stages which are sharded over several GPUs."""
    numbers = sorted({gpus for row in job.shards for gpus in row})
    if numbers == [1]:
        return profile
    if len(numbers) > 1:
        raise ConfigError(
            f"train.profile: stages have {' or '.join(map(str, numbers))} GPUs, and the planner has one time for each "
            "layer with numerics fast; expected equally many for all stages, or no profile"
        )
    try:
        return replace(profile, layers=tuple(layer.on(numbers[0]) for layer in profile.layers))
    except ConfigError as error:
        raise ConfigError(f"train.profile: {error}, or no profile") from None


def known_ties(job: Job | None, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Returns the layers that share weights, where the job file tells: GPT's and BERT's last one has the first's."""
    tied = job is not None and isinstance(job.model, GptModel | BertModel) and num_layers > 1
    return ((0, num_layers - 1),) if tied else ()


def terms_of(
    job: Job, num_layers: int, profile: Profile | None = None, ties: tuple[tuple[int, ...], ...] = ()
) -> Terms | None:
    """Returns what the planner goes by for a job; None if its technique needs no planner.

    Args:
        job: the job, whose technique is settled.
        num_layers: of its model.
        profile: what its layers cost; None: all the same.
        ties: tuples of layers that share weights.
    """
    if job.train.technique not in (Technique.DECOUPLED, Technique.STAGGERED):
        return None
    return Terms(
        technique=Technique(job.train.technique),
        costs=_costs(num_layers, profile),
        in_flight=in_flight_of(job),
        ties=ties,
        copy_s=() if profile is None else _copy_s(profile),
        crossing_s=0.0 if profile is None else job.cluster.connect_s,
    )


def keeping_of(job: Job, num_layers: int, profile: Profile | None = None) -> Costs | None:
    """Returns the costs by which an interrupted step is gone on with; None if workers keep nothing of one.

    Args:
        job: the job.
        num_layers: of its model.
        profile: what its layers cost; None: all the same.
    """
    return _costs(num_layers, profile) if job.keeps_steps else None


def shapes_of(job: Job, num_layers: int, profile: Profile | None, terms: Terms | None) -> Shapes | None:
    """Returns what pipelines of whoever is left are made by; None if the job's strategy makes none.

    Args:
        job: the job.
        num_layers: of its model.
        profile: what its layers cost; None: all the same.
        terms: what the planner goes by; None if orders keep to 1F1B's rules.

    Raises:
        ConfigError: a worker's memory does not suffice for any pipeline, or the grid has too few workers for one
            pipeline more than failures are to be tolerated.
    """
    strategy = job.strategy
    if not strategy.makes_pipelines or (strategy.chooses and (profile is None or job.loops or pipelines_need(job))):
        return None
    table = _stage_table(job, num_layers, profile)
    told = job.resilience.smallest_pipeline or _by_memory(job, table)
    minimum = told or min(job.grid.depths)
    tolerate, workers = job.resilience.tolerate, job.num_workers
    if workers < (tolerate + 1) * minimum:
        raise ConfigError(
            f"resilience.tolerate: {tolerate} failure(s) take {tolerate + 1} pipelines of {minimum} workers, but the "
            f"grid has {workers} workers: expected more of them, fewer failures or smaller pipelines"
        )
    return Shapes(
        costs=_costs(num_layers, profile),
        minimum=minimum,
        smallest=-(-minimum // 2)
        if strategy.chooses and not told
        else 0,  # who falls back takes that for possible, too
        fewest=0 if strategy.chooses or job.resilience.degraded == "allow" else (tolerate + 1) * minimum,
        tolerate=tolerate,
        state=(1,) * num_layers if profile is None else tuple(layer.state_bytes for layer in profile.layers),
        copy_s=() if profile is None else _copy_s(profile),
        crossing_s=0.0 if profile is None else job.cluster.connect_s,
        table=table,
        terms=None if terms is None else _counting_state(job, profile, terms),
    )


def _stage_table(job: Job, num_layers: int, profile: Profile | None) -> StageTable:
    """What stages of one worker take; of layers that are all alike no memory is known."""
    if profile is None:
        return table_of(unit_costs(num_layers))
    return stages_in(job, profile)


def _counting_state(job: Job, profile: Profile | None, terms: Terms) -> Terms:
    """The same terms, by which a worker's state takes what it takes in this job."""
    if profile is None:
        return terms
    return replace(terms, costs=costs_of_job(job, profile))


def _by_memory(job: Job, table: StageTable) -> int:
    """n0, the fewest workers of a pipeline whose memory suffices; 0 if there is no limit."""
    if table.memory_bytes is None:
        return 0
    most = min(job.num_workers, table.num_layers, job.global_microbatches)
    for size in range(1, most + 1):
        if best_templates(table, (size,), job.global_microbatches):
            return size
    raise ConfigError(
        f"resilience.worker_memory: {table.memory_bytes} bytes of each worker are too few for any pipeline of up to "
        f"{most} workers: expected more"
    )


def _costs(num_layers: int, profile: Profile | None) -> Costs:
    return unit_costs(num_layers) if profile is None else costs_from_profile(profile)


def costs_of_job(job: Job, profile: Profile) -> Costs:
    """Returns costs in seconds and bytes, with the memory that a worker's state takes in this job."""
    copies, sums = held_in(job)
    return costs_from_profile(profile, copies=copies, sums=sums)


def in_flight_of(job: Job) -> int:
    """Returns how many micro-batches a worker may hold by the planner's schedules."""
    return job.train.in_flight or 2 * max(map(_most_ahead, job.lanes))


def _most_ahead(lanes: Sequence[int]) -> int:
    """Returns how many micro-batches one lane of the first stages must hold for all lanes after it to work."""
    return max(-(-sum(lanes[stage:]) // width) for stage, width in enumerate(lanes))


def grid_of(job: Job, pipelines: Sequence[tuple[LayerRange, ...]], terms: Terms) -> CostedGrid | None:
    """Returns the planner's grid of a job's pipelines; None if they are not alike, or stages have several lanes."""
    counts = job.grid.batch.counts
    if len(set(pipelines)) > 1 or len(set(counts)) > 1 or job.most_lanes > 1:
        return None
    return regular_grid(len(pipelines), pipelines[0], counts[0], terms)


def _copy_s(profile: Profile) -> tuple[float, ...]:
    return tuple(profile.link.seconds_of(layer.state_bytes) for layer in profile.layers)


def stages_of(job: Job, num_layers: int, profile: Profile | None = None) -> tuple[tuple[LayerRange, ...], ...]:
    """Returns the layers of every worker of every pipeline, stage by stage: those of a stage once for each lane.

    As the job's layout says; else all are alike: equally many, or if a profile tells what they cost, equally fast.

    Raises:
        ConfigError: the grid does not fit the layers.
    """
    grid = job.grid
    check_cuts(grid, num_layers)
    return tuple(
        tuple(chain.from_iterable(map(repeat, stages, lanes)))
        for stages, lanes in zip(_cuts(grid, num_layers, profile), job.lanes, strict=True)
    )


def _cuts(grid: Grid, num_layers: int, profile: Profile | None) -> tuple[tuple[LayerRange, ...], ...]:
    if grid.layout:
        return tuple(_consecutive(pipeline.stages) for pipeline in grid.layout)
    depth = grid.depths[0]
    if profile is None:
        return (split_evenly(num_layers, depth),) * len(grid.depths)
    return (balanced_stages(costs_from_profile(profile), depth),) * len(grid.depths)


def _consecutive(sizes: Sequence[int]) -> tuple[LayerRange, ...]:
    return tuple(LayerRange(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def tolerated(job: Job) -> int:
    """Returns for how many failures of a regular grid plans are made ahead: those to tolerate, else a quarter of all.

    0 if the grid survives none.
    """
    grid = job.grid
    wanted = job.resilience.tolerate or max(1, job.num_workers // 4)
    return min(wanted, job.num_workers - max(grid.depths))


def settled(
    job: Job,
    num_layers: int,
    profile: Profile | None = None,
    ties: tuple[tuple[int, ...], ...] = (),
    *,
    processors: int | None = None,
) -> Settled:
    """Returns a job with the technique that is the fastest by its profile, where it leaves that open.

    1F1B is kept where no profile tells times, where nobody waits for a stage, and where somebody who waits leaves its
    processor to others. No worker is to have more memory than ``resilience.worker_memory`` says, else than one has by
    1F1B; with a limit to gradients' norm, or a loss scale, no update is made ahead of its verdict.

    Args:
        job: the job.
        num_layers: of its model.
        profile: what its layers cost; None: nobody knows.
        ties: tuples of layers that share weights.
        processors: that all workers share; None: each has its own.

    Raises:
        ConfigError: the grid does not fit the layers.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.

    Cost: as :func:`healthy_plan` for each technique, and some plans that are made at once.
    """
    if job.train.technique != "auto":
        return Settled(job=job, plan=_plan_by_technique(job, num_layers, profile, ties))
    plain = with_technique(job, "1f1b")
    plan = _plan_by_technique(plain, num_layers, profile, ties)
    if profile is None or max(job.grid.depths) == 1 or job.train.numerics == "fast":
        return Settled(job=plain, plan=plan)
    if processors is not None and processors < job.num_workers:
        why = f"{job.num_workers} workers share {processors} processor(s), and who waits leaves its own to others"
        return Settled(job=plain, plan=plan, why=why)
    make = partial(_course, num_layers=num_layers, profile=profile, ties=ties)
    own = make(plain)
    limit = job.resilience.worker_memory or own.memory_bytes
    told_later = job.train.clip_norm is not None or job.train.loss_scale is not None
    techniques = ("decoupled",) if told_later else ("decoupled", "staggered")
    courses = (own, *(_roomiest(job, each, make, limit) for each in techniques))
    best = _fastest([each for each in courses if each is not None and each.memory_bytes <= limit] or [own])
    more = [make(with_technique(job, each, in_flight_of(job)), at_once=True) for each in techniques]
    return Settled(job=best.job, plan=best.plan, why=_why_technique(best, own, _fastest([best, *more])))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """A technique that a job could be trained by, and what a step and the fullest worker take."""

    job: Job
    plan: Plan
    step_s: float
    memory_bytes: float


def _course(
    job: Job, num_layers: int, profile: Profile, ties: tuple[tuple[int, ...], ...], *, at_once: bool = False
) -> _Course:
    """What a technique comes to; ``at_once``: about, by fewer schedules."""
    plan = _plan_by_technique(job, num_layers, profile, ties, at_once=at_once)
    ahead = job.train.technique == Technique.STAGGERED.value
    step_s = step_seconds(plan, rates_of(profile, job.cluster, sums=sums_of(job)), updates_ahead=ahead)
    return _Course(job=job, plan=plan, step_s=step_s, memory_bytes=most_memory(job, plan, profile))


def _roomiest(job: Job, technique: str, make: Callable[..., _Course], limit: float) -> _Course | None:
    """A technique with as many micro-batches at once as there is memory for; None: not for one."""
    told = job.train.in_flight
    numbers = range(1, in_flight_of(job) + 1) if told is None else range(told, told + 1)

    def fitting(in_flight: int, *, at_once: bool) -> _Course | None:
        course = make(with_technique(job, technique, in_flight), at_once=at_once)
        return course if course.memory_bytes <= limit else None

    about = bisect_left(numbers, True, key=lambda each: fitting(each, at_once=True) is None)
    return next(filter(None, (fitting(each, at_once=False) for each in reversed(numbers[:about]))), None)


def with_technique(job: Job, technique: str, in_flight: int | None = None) -> Job:
    """Returns a job that is trained by another technique, and with so many micro-batches at once; None: as it says."""
    in_flight = in_flight or job.train.in_flight
    train = msgspec.structs.replace(job.train, technique=technique, in_flight=in_flight)
    return msgspec.structs.replace(job, train=train)


def most_memory(job: Job, plan: Plan, profile: Profile) -> float:
    """Returns what the fullest worker takes by a plan, bytes; with gradients that it keeps until a step is settled."""
    kept = [0] * len(profile.layers)
    if job.train.technique == Technique.STAGGERED.value:
        kept = [layer.parameter_bytes for layer in profile.layers]
    held = evaluate(plan, costs_of_job(job, profile)).peak_memory
    return max(most + sum(kept[layer] for layer in plan.placement.layers_of(worker)) for worker, most in held)


def _fastest(courses: Sequence[_Course]) -> _Course:
    """The first of those that no other one is faster than by what is worth it."""
    return next(one for one in courses if all(other.step_s >= (1 - WORTHWHILE) * one.step_s for other in courses))


def _why_technique(best: _Course, own: _Course, fastest: _Course) -> str:
    told = f"{best.step_s:.3g} s a step by the profile"
    if best is not own:
        told += f", {own.step_s:.3g} s by {own.job.train.technique}"
    if fastest is best:
        return told
    train, takes, has = fastest.job.train, size_of(fastest.memory_bytes), size_of(best.memory_bytes)
    return (
        f"{told}; {train.technique} with {train.in_flight} micro-batches at once would take {fastest.step_s:.3g} s, "
        f"and {takes} of a worker, for {has}: resilience.worker_memory says how much there is"
    )


def healthy_plan(
    job: Job, num_layers: int, profile: Profile | None = None, ties: tuple[tuple[int, ...], ...] = ()
) -> Plan:
    """Returns the plan of a job's whole grid, proved right.

    Args:
        job: the job.
        num_layers: of its model.
        profile: what its layers cost; None: all the same.
        ties: tuples of layers that share weights.

    Raises:
        ConfigError: the grid does not fit the layers.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.

    Cost: for the planner's techniques up to a second for tens of workers, else milliseconds.
    """
    return settled(job, num_layers, profile, ties).plan


def _plan_by_technique(
    job: Job, num_layers: int, profile: Profile | None, ties: tuple[tuple[int, ...], ...], *, at_once: bool = False
) -> Plan:
    terms, batch = terms_of(job, num_layers, profile, ties), job.grid.batch
    pipelines = stages_of(job, num_layers, profile)
    placement = home_placement(pipelines)
    if terms is None:
        plan = home_plan(placement, batch, job.train.technique)
    elif (grid := grid_of(job, pipelines, terms)) is not None:
        plan = _planned_grid(grid, terms, at_once)
    else:
        plan = planned_routes(placement, home_routes(placement, batch), terms, at_once=at_once).plan
    if job.strategy.healthy is not None:
        plan = job.strategy.healthy(plan)
    validate(plan, ties=ties, costs=None if terms is None else within_limit(terms))
    return plan


@lru_cache(maxsize=64)
def _planned_grid(grid: CostedGrid, terms: Terms, at_once: bool) -> Plan:
    """Kept, since who compares jobs asks for the plan of one grid again and again."""
    return planned_grid(grid, (), terms, at_once=at_once).plan


def plans_of(
    job: Job,
    num_layers: int,
    profile: Profile | None = None,
    ties: tuple[tuple[int, ...], ...] = (),
    *,
    processors: int | None = None,
) -> JobPlans:
    """Returns all that is planned of a job before it trains.

    Args:
        job, num_layers, profile, ties, processors: as for :func:`settled`.

    Raises:
        ConfigError: the grid does not fit the layers, or the failures that are to be tolerated.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    found = settled(job, num_layers, profile, ties, processors=processors)
    job = found.job
    terms = terms_of(job, num_layers, profile, ties)
    return JobPlans(
        job=job,
        plan=found.plan,
        why=found.why,
        terms=terms,
        shapes=shapes_of(job, num_layers, profile, terms),
        keeping=keeping_of(job, num_layers, profile),
        rates=None if profile is None else rates_of(profile, job.cluster, sums=sums_of(job)),
    )


def rates_of(profile: Profile, cluster: Cluster, *, sums: int = 0) -> Rates:
    """Returns how fast a cluster is on which layers take what a profile says.

    Args:
        profile: of the layers, and of the link between two workers.
        cluster: what it does not tell.
        sums: parts of contributions to sums of gradients; 0: these take no time.
    """

    def link(bytes_per_s: float) -> Link:
        return Link(latency_s=0.0, bytes_per_s=bytes_per_s)

    return Rates(
        profile=profile,
        message_s=cluster.message_s,
        control_s=cluster.control_s,
        connect_s=cluster.connect_s,
        start_s=cluster.start_s,
        copy=link(cluster.copy),
        load=link(cluster.load),
        save=link(cluster.save),
        sums=sums,
    )
