"""What is to be compared: each strategy, at each step, by progress of the backward pass and number of survivors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.config.job import Job
from holdfast.errors import ConfigError

__all__ = ["STRATEGIES", "Scenario", "Study", "check", "plan_study", "steps_per_epoch"]

STRATEGIES = ("lossy-forward", "rollback", "skip", "checkpoint-restart")
"""Those that can be compared, in the order in which they are told."""
PROGRESS = (25, 50, 75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
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
        """What it is called within its step: ``lossy-forward 50 % 4``."""
        parts = (self.progress is not None and f"{self.progress} %", self.survivors is not None and f"{self.survivors}")
        return " ".join([self.strategy, *(part for part in parts if part)])

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
        survivors: numbers of workers that go on with ``lossy-forward``.
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
            if len(set(told)) < len(told):
                raise ConfigError(f"--{name}: expected each once, got {','.join(map(str, told))}")

    def scenarios(self, seed: int, at: int) -> Iterator[Scenario]:
        """Yields what is compared at one step of one run."""
        for strategy in self.strategies:
            if strategy == "checkpoint-restart":
                yield Scenario(seed=seed, at=at, strategy=strategy)
                continue
            for progress in self.progress:
                for survivors in self.survivors if strategy == "lossy-forward" else (None,):
                    yield Scenario(seed=seed, at=at, strategy=strategy, progress=progress, survivors=survivors)

    @property
    def every(self) -> tuple[Scenario, ...]:
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
    lossy = "lossy-forward" in study.strategies
    if lossy and not study.survivors:
        raise ConfigError("--survivors: lossy-forward goes on with survivors; expected at least one number")
    if lossy and min(study.survivors) < 1:
        raise ConfigError(f"--survivors: lossy-forward needs survivors; expected 1 or more, got {min(study.survivors)}")
    if lossy and max(study.survivors) > workers:
        raise ConfigError(
            f"--survivors: there are {workers} workers (grid.pipelines), of which {max(study.survivors)} cannot survive"
        )
    if beyond := [at for at in study.at if not 0 <= at < job.train.steps]:
        raise ConfigError(
            f"--at: step {beyond[0]} is beyond the end; with train.steps {job.train.steps} steps are 0 to "
            f"{job.train.steps - 1}"
        )


def steps_per_epoch(job: Job, samples: int) -> int:
    """Returns how many whole mini-batches an epoch of so many samples has, at least 1."""
    return max(1, samples // job.samples_per_step)
