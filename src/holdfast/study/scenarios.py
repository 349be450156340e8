"""What is to be compared: each strategy, at each step, by progress of the backward pass and number of survivors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.config.job import Job
from holdfast.errors import ConfigError

__all__ = ["EXACT", "STRATEGIES", "StudyScenario", "Study", "check", "name_of", "plan_study", "steps_per_epoch"]

STRATEGIES = ("adaptive", "lossy-forward", "rollback", "skip", "checkpoint-restart")
"""Those that can be compared, in the order in which they are told."""
EXACT = frozenset({"adaptive", "checkpoint-restart"})
"""Those that leave the bits of the run without failures."""
PROGRESS = (25, 50, 75)
_BY_PROGRESS = frozenset(STRATEGIES) - EXACT
_BY_SURVIVORS = ("adaptive", "lossy-forward")


def name_of(strategy: str, progress: int | None, survivors: int | None) -> str:
    """Returns what a scenario is called within its step.

    >>> name_of("lossy-forward", 50, 4), name_of("rollback", 50, None)
    ('lossy-forward 50 % 4', 'rollback 50 %')
    """
    told = ("" if progress is None else f"{progress} %", "" if survivors is None else str(survivors))
    return " ".join([strategy, *filter(None, told)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyScenario:
    """One failure, and what answers it.

    Attributes:
        seed: of the run.
        at: the step whose mini-batch fails.
        strategy: what answers it.
        progress: percent of the gradients that all workers have used before it; None where that makes no difference.
        survivors: workers that go on; None: none does.
    """

    seed: int
    at: int
    strategy: str
    progress: int | None = None
    survivors: int | None = None

    @property
    def name(self) -> str:
        """What it is called within its step."""
        return name_of(self.strategy, self.progress, self.survivors)

    @property
    def path(self) -> str:
        """The file of its outcome, within the study's folder."""
        return f"seed-{self.seed}/step-{self.at}/{self.name.replace(' %', '').replace(' ', '-')}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is to be compared; every list in the order in which it is told.

    Attributes:
        strategies: of `STRATEGIES`.
        progress: percent of the gradients.
        survivors: numbers of workers that go on with ``adaptive`` and ``lossy-forward``.
        at: steps.
        seeds: of runs.
    """

    strategies: tuple[str, ...]
    progress: tuple[int, ...]
    survivors: tuple[int, ...]
    at: tuple[int, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if unknown := [each for each in self.strategies if each not in STRATEGIES]:
            raise ConfigError(f"--strategies: there is no {unknown[0]!r}; expected some of {', '.join(STRATEGIES)}")
        if wrong := [each for each in self.progress if not 0 <= each <= 100]:
            raise ConfigError(f"--progress: expected 0 to 100 percent of the gradients, got {wrong[0]}")
        for name in ("strategies", "progress", "survivors", "at", "seeds"):
            told = getattr(self, name)
            if not told and name != "survivors":
                raise ConfigError(f"--{name}: expected at least one, got none")
            if len(set(told)) < len(told):
                raise ConfigError(f"--{name}: expected each once, got {','.join(map(str, told))}")

    def scenarios(self, seed: int, at: int) -> Iterator[StudyScenario]:
        """Yields what is compared at one step of one run."""
        for strategy in self.strategies:
            for progress in self.progress if strategy in _BY_PROGRESS else (None,):
                for survivors in self.survivors if strategy in _BY_SURVIVORS else (None,):
                    yield StudyScenario(seed=seed, at=at, strategy=strategy, progress=progress, survivors=survivors)

    @property
    def every(self) -> tuple[StudyScenario, ...]:
        """All that is compared."""
        return tuple(each for seed in self.seeds for at in self.at for each in self.scenarios(seed, at))


def plan_study(
    job: Job,
    *,
    strategies: tuple[str, ...] = STRATEGIES,
    progress: tuple[int, ...] = PROGRESS,
    survivors: tuple[int, ...] | None = None,
    at: tuple[int, ...] | None = None,
    seeds: tuple[int, ...] | None = None,
) -> Study:
    """Returns what is compared: what was asked for, and where nothing was, what suits the job.

    Args:
        job: its pipelines are the workers.
        strategies: all of them unless told.
        progress: percent.
        survivors: None: a quarter, a half and three quarters of the workers.
        at: None: early, and after a third and two thirds of the steps.
        seeds: None: the job's.

    Raises:
        ConfigError: something is impossible for the job; names the flag.
    """
    if job.train.epochs is not None:
        raise ConfigError("train.epochs: a study is of a number of steps; expected train.steps")
    workers, steps = len(job.grid.depths), job.train.steps
    quarters = tuple(dict.fromkeys(each for each in (workers // 4, workers // 2, 3 * workers // 4) if each))
    thirds = tuple(dict.fromkeys((steps // 25, steps // 3, 2 * steps // 3)))
    study = Study(
        strategies=strategies,
        progress=progress,
        survivors=quarters if survivors is None else survivors,
        at=thirds if at is None else at,
        seeds=(job.train.seed,) if seeds is None else seeds,
    )
    check(job, study)
    return study


def check(job: Job, study: Study) -> None:
    """Checks that a job can be studied so.

    Raises:
        ConfigError: it cannot; names the flag or key.
    """
    workers = len(job.grid.depths)
    if job.loops:
        raise ConfigError("model.kind: a study trains models of job files; expected another kind than script")
    if max(job.grid.depths) > 1 or job.num_workers != workers:
        raise ConfigError(
            f"grid.stages: {job.num_workers} workers in pipelines of {max(job.grid.depths)} stages; a study is of data "
            "parallelism: expected pipelines of one stage, each one worker"
        )
    if workers < 2:
        raise ConfigError("grid.pipelines: a study is of workers that fail beside others; expected at least 2, got 1")
    if len(set(job.grid.batch.counts)) > 1:
        counts = ", ".join(map(str, job.grid.batch.counts))
        raise ConfigError(
            f"grid.layout: workers of a study have the same number of micro-batches each; expected one, got {counts}"
        )
    if needing := [each for each in study.strategies if each in _BY_SURVIVORS]:
        _check_survivors(study.survivors, workers, needing[0])
    if beyond := [at for at in study.at if not 0 <= at < job.train.steps]:
        raise ConfigError(
            f"--at: step {beyond[0]} is beyond the end; with train.steps {job.train.steps} steps are 0 to "
            f"{job.train.steps - 1}"
        )


def _check_survivors(survivors: tuple[int, ...], workers: int, strategy: str) -> None:
    if not survivors:
        raise ConfigError(f"--survivors: {strategy} goes on with survivors; expected at least one number")
    if min(survivors) < 1:
        raise ConfigError(f"--survivors: {strategy} needs survivors; expected 1 or more, got {min(survivors)}")
    if max(survivors) > workers:
        raise ConfigError(
            f"--survivors: there are {workers} workers (grid.pipelines), of which {max(survivors)} cannot survive"
        )


def steps_per_epoch(job: Job, samples: int) -> int:
    """Returns how many whole mini-batches an epoch of so many samples has, at least 1."""
    return max(1, samples // job.samples_per_step)
