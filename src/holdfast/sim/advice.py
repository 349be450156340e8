"""What a job is best told, by simulation: its grid, what answers losses, how often it is saved.

Every grid that is tried trains to the same bits: of as many workers, with as many micro-batches of a step in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise

from holdfast.config.job import Job
from holdfast.core.placement import group_into_nodes
from holdfast.core.profile import Profile
from holdfast.errors import ConfigError, InfeasiblePlan
from holdfast.planning.groups.chain import Grouping
from holdfast.planning.groups.of_plan import chain_of
from holdfast.planning.groups.programme import best_groups
from holdfast.recovery.checkfreq import checkpoint_interval, youngs_interval
from holdfast.recovery.choice import Choice
from holdfast.recovery.rates import step_seconds
from holdfast.settings.planning import most_memory
from holdfast.settings.ways import decided
from holdfast.sim.compare import Compared, Simulated, compare, interval
from holdfast.sim.engine import Prepared, simulate
from holdfast.sim.prepare import prepared, settled_on
from holdfast.sim.speeds import Speeds
from holdfast.sim.world import World
from holdfast.strategies.registry import names, strategy_named
from holdfast.strategies.strategy import Strategy

__all__ = ["AS_IT_IS", "MANY_BYTES", "Advice", "Candidate", "Interval", "Missing", "Shape", "advise", "missing_of"]

AS_IT_IS = "as it is"
_GRIDS = 3
_AS_IF = 2
"""A job that falls back to a smaller grid takes workers to have room for twice what they hold; so does this."""
_MOSTLY = 0.99
MANY_BYTES = 1e18
"""More than all logs of a job ever take."""

Settings = tuple[tuple[str, object], ...]
"""Keys of a job file, and what they are to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A grid of as many workers, and what is known of it before anything fails.

    Attributes:
        pipelines: how many.
        stages: of each.
        microbatches: of each in a step.
        step_s: seconds of a step while nobody is missing.
        memory_bytes: that the fullest worker holds.
        stall_s: for which training stands still for a checkpoint.
        write_s: until it is written.
    """

    pipelines: int
    stages: int
    microbatches: int
    step_s: float
    memory_bytes: float
    stall_s: float
    write_s: float

    def __str__(self) -> str:
        """Return the two numbers that people tell."""
        return f"{self.pipelines} x {self.stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How often a job makes checkpoints, and why.

    Attributes:
        every: steps; 0: the strategy sets it while the job runs.
        between_s: seconds from one time that a checkpoint is needed to the next, as far as is known.
        checkfreq: steps by CheckFreq's rule, which bounds what checkpoints cost.
    """

    every: int
    between_s: float
    checkfreq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """How many machines are missing: as many, or fewer, in 99 % of the time; and at the worst."""

    mostly: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a job could be told.

    Attributes:
        shape: its grid.
        row: what answers losses.
        interval: how often it is saved.
        settings: in keys of the job file.
        logs: whether what crosses nodes is logged where the formulas say that it is worth it.
        grouping: of the nodes, so that logs fit their limit; None: nothing is logged, or nodes are no chain.
    """

    shape: Shape
    row: Strategy
    interval: Interval
    settings: Settings
    logs: bool = True
    grouping: Grouping | None = None

    @property
    def name(self) -> str:
        """In a table."""
        return f"{self.shape}, {self.row.name}{'' if self.logs else ' without logs'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was found.

    Attributes:
        own: the grid that the job has.
        as_it_is: what becomes of the job as it is.
        ranked: what it could be told, and what becomes of it, the most samples first; at least one.
        changes: what of the best one the job does not have.
        refused: what the job cannot have, by the names of candidates, and why.
        too_large: grids whose fullest worker would hold more than may be, and how much.
        memory_bytes: how much that is.
        assumes_memory: whether that was not said, but made of what the job's own grid holds.
        missing: how many machines are.
        choice: how lost layers come back.
    """

    own: Shape
    as_it_is: Compared
    ranked: tuple[tuple[Candidate, Compared], ...]
    changes: Settings
    refused: Mapping[str, str]
    too_large: tuple[Shape, ...]
    memory_bytes: float
    assumes_memory: bool
    missing: Missing
    choice: Choice

    @property
    def best(self) -> Candidate:
        """What the job should be told."""
        return self.ranked[0][0]

    @property
    def ties(self) -> tuple[Candidate, ...]:
        """What may as well be as good: its difference to the best one, in the same worlds, could be chance."""
        best = self.ranked[0][1].throughputs
        if len(best) == 1:
            return ()
        apart = (
            (candidate, interval([a - b for a, b in zip(best, found.throughputs, strict=True)]))
            for candidate, found in self.ranked[1:]
        )
        return tuple(candidate for candidate, (low, _) in apart if low <= 0)


def advise(
    job_with: Callable[[Settings], Job],
    profile: Profile,
    worlds: Sequence[World],
    speeds: Speeds,
    *,
    memory_bytes: float = 0.0,
    log_bytes: float = MANY_BYTES,
    processes: int = 1,
    said: Callable[[int, int], None] = lambda done, of: None,
) -> Advice:
    """Return what a job is best told.

    Args:
        job_with: the job, with some keys set otherwise.
        profile: of its layers.
        worlds: what happens to its machines, one for each run.
        speeds: of the cluster.
        memory_bytes: that a worker has; 0: as the job says, else twice what the fullest one of its own grid holds.
        log_bytes: that all logs together may take.
        processes: how many simulate side by side.
        said: called with the number of simulations that are over, and that of all.

    Raises:
        ConfigError: nothing that could be told can be simulated.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    job = job_with(())
    own, *others = _shapes(job_with, profile, speeds)
    known = memory_bytes or job.resilience.worker_memory
    limit = known or _AS_IF * own.memory_bytes
    fitting = sorted(
        [own, *(shape for shape in others if shape.memory_bytes <= limit)],
        key=lambda shape: (shape.step_s, shape.stages),
    )
    missing = missing_of(worlds)
    trials = _Trials(
        job_with=job_with,
        profile=profile,
        compared=partial(compare, worlds=worlds, samples=job.samples_per_step, processes=processes, said=said),
        speeds=speeds,
        log_bytes=log_bytes,
    )
    as_it_is = trials.become({AS_IT_IS: prepared(job, profile)})[AS_IT_IS]
    ranked = _ranked(trials, partial(_candidate, job, missing, known), dict.fromkeys([*fitting[:_GRIDS], own]), worlds)
    best = settled_on(job_with(ranked[0][0].settings), profile)
    return Advice(
        own=own,
        as_it_is=as_it_is,
        ranked=ranked,
        changes=tuple((key, value) for key, value in ranked[0][0].settings if _get(job, key) != value),
        refused=trials.refused,
        too_large=tuple(shape for shape in others if shape not in fitting),
        memory_bytes=limit,
        assumes_memory=not known,
        missing=missing,
        choice=decided(best.job, best.plan, profile).choice,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trials:
    """What becomes of a job by what it could be told; what it cannot have, and why; and what of it logs."""

    job_with: Callable[[Settings], Job]
    profile: Profile
    compared: Callable[[Mapping[str, Simulated]], Mapping[str, Compared]]
    speeds: Speeds
    log_bytes: float
    refused: dict[str, str] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)

    def become(self, jobs: Mapping[str, Prepared]) -> Mapping[str, Compared]:
        """What becomes of these jobs."""
        return self.compared({name: partial(simulate, job, speeds=self.speeds) for name, job in jobs.items()})

    def of(self, candidates: Iterable[Candidate]) -> dict[str, tuple[Candidate, Compared]]:
        """What becomes of the job by each of these that it can have, by name."""
        able = {}
        for each in candidates:
            try:
                candidate, one = self._able(each)
            except (ConfigError, InfeasiblePlan) as error:
                self.refused[each.name] = str(error)
            else:
                able[candidate.name] = candidate, one
        self.logged.update(name for name, (_, one) in able.items() if one.rules.logging is not None)
        compared = self.become({name: one for name, (_, one) in able.items()})
        return {name: (each, compared[name]) for name, (each, _) in able.items()}

    def _able(self, candidate: Candidate) -> tuple[Candidate, Prepared]:
        """A job as it would begin; where it logs, in groups of nodes whose logs fit the limit, without if none do."""
        one = prepared(self.job_with(candidate.settings), self.profile)
        if one.rules.logging is None:
            return candidate, one
        nodes = group_into_nodes(one.plan.workers, one.workers_per_machine)
        interval, limit = max(1, candidate.interval.every), self.log_bytes
        chain = chain_of(one.plan, nodes, self.profile, interval=interval, limit_bytes=limit)
        if chain is None:
            return candidate, one
        grouping = best_groups(chain)
        joined = [list(group) for group in grouping.groups if len(group) > 1]
        if not joined:
            return replace(candidate, grouping=grouping), one
        if grouping.storage_bytes:
            settings = (*candidate.settings, ("logging.groups", joined))
            candidate = replace(candidate, settings=settings, grouping=grouping)
        else:
            settings = tuple((key, "off" if key == "logging.use" else value) for key, value in candidate.settings)
            candidate = replace(candidate, settings=settings, logs=False)
        return candidate, prepared(self.job_with(candidate.settings), self.profile)


def _ranked(
    trials: _Trials,
    candidate: Callable[[Shape, Strategy, float, bool], Candidate],
    shapes: Iterable[Shape],
    worlds: Sequence[World],
) -> tuple[tuple[Candidate, Compared], ...]:
    """Each grid by each exact strategy, the most samples first.

    What logs is tried without, and what often needs a checkpoint with more of them: of one pipeline, each loss does.
    """
    rows = [strategy_named(name) for name in names(lambda row: row.exact)]
    lasts_s, failures = sum(world.lasts_s for world in worlds), sum(world.failures for world in worlds)
    found = trials.of(
        candidate(shape, row, lasts_s / max(1, failures if row.restarts or shape.pipelines == 1 else 1), True)
        for shape in shapes
        for row in rows
    )
    found |= trials.of(
        candidate(each.shape, each.row, each.interval.between_s, False)
        for name, (each, _) in found.items()
        if name in trials.logged
    )
    if not found:
        raise ConfigError(next(iter(trials.refused.values())))
    more_often = (
        candidate(each.shape, each.row, lasts_s / loads, each.logs)
        for each, compared in found.values()
        if not each.row.restarts and (loads := sum(outcome.loads for outcome in compared.outcomes)) > 1
    )
    for name, again in trials.of(more_often).items():
        found[name] = max(found.get(name, again), again, key=lambda pair: pair[1].throughput)
    return tuple(sorted(found.values(), key=lambda pair: -pair[1].throughput))


def _get(job: Job, key: str) -> object:
    return reduce(getattr, key.split("."), job)


def missing_of(worlds: Sequence[World]) -> Missing:
    """Return how many machines are missing of those that there are in the beginning."""
    lasts = dict[int, float]()
    for world in worlds:
        rows = [*world.available(), (world.lasts_s, 0)]
        for (at, count), (end, _) in pairwise(rows):
            short = max(0, world.machines - count)
            lasts[short] = lasts.get(short, 0.0) + max(0.0, min(end, world.lasts_s) - at)
    whole, so_far = math.fsum(lasts.values()), 0.0
    mostly = max(lasts)
    for short in sorted(lasts):
        so_far += lasts[short]
        if so_far >= _MOSTLY * whole:
            mostly = short
            break
    return Missing(mostly=mostly, most=max(short for short, seconds in lasts.items() if seconds > 0))


def _shapes(job_with: Callable[[Settings], Job], profile: Profile, speeds: Speeds) -> list[Shape]:
    """The job's own grid, then others that it could have."""
    job = job_with(())
    found = [_shaped(job, profile, speeds)]
    for settings in _grids(job):
        with suppress(ConfigError, InfeasiblePlan):
            found.append(_shaped(job_with(settings), profile, speeds))
    return found


def _grids(job: Job) -> Iterator[Settings]:
    """Other grids of as many workers, which run as many micro-batches; none of a grid whose pipelines are unlike."""
    grid = job.grid
    if grid.layout:
        return
    places, total = len(grid.depths) * grid.depths[0], job.global_microbatches
    for pipelines in range(1, min(places, total) + 1):
        if places % pipelines == 0 and total % pipelines == 0 and pipelines != len(grid.depths):
            yield _grid(pipelines, places // pipelines, total // pipelines)


def _grid(pipelines: int, stages: int, microbatches: int) -> Settings:
    return (("grid.pipelines", pipelines), ("grid.stages", stages), ("grid.microbatches", microbatches))


def _shaped(job: Job, profile: Profile, speeds: Speeds) -> Shape:
    found = settled_on(job, profile)
    job, plan = found.job, found.plan
    staggered, (stall_s, writing_s) = job.train.technique == "staggered", speeds.checkpoint(plan)
    return Shape(
        pipelines=len(job.grid.depths),
        stages=max(job.grid.depths),
        microbatches=max(job.grid.batch.counts),
        step_s=step_seconds(plan, speeds.rates, updates_ahead=staggered),
        memory_bytes=most_memory(job, plan, profile),
        stall_s=stall_s + (writing_s if job.checkpoint.synchronous else 0.0),
        write_s=stall_s + writing_s,
    )


def _candidate(
    job: Job, missing: Missing, memory_bytes: float, shape: Shape, row: Strategy, between_s: float, logs: bool
) -> Candidate:
    found = _interval(shape, row, between_s)
    grid = () if job.grid.layout else _grid(shape.pipelines, shape.stages, shape.microbatches)
    room = job.grid.workers_per_node  # workers are lost with their machine, and so many more are to be, without an end
    left, at_once = shape.pipelines * shape.stages - missing.most * room, missing.mostly * room
    memory: Settings = (("resilience.worker_memory", memory_bytes),) if row.makes_pipelines and memory_bytes else ()
    more: Settings = (
        *memory,
        ("resilience.strategy", row.name),
        ("resilience.tolerate", max(0, min(at_once, left // shape.stages - 1))),
        ("checkpoint.every", found.every),
        ("logging.use", "auto" if logs else "off"),
    )
    return Candidate(shape=shape, row=row, interval=found, settings=(*grid, *more), logs=logs)


def _interval(shape: Shape, row: Strategy, between_s: float) -> Interval:
    checkfreq = checkpoint_interval(shape.stall_s, shape.write_s, shape.step_s)
    every = 0 if row.sets_interval else youngs_interval(shape.stall_s, shape.write_s, shape.step_s, between_s)
    return Interval(every=every, between_s=between_s, checkfreq=checkfreq)
