"""The processes that compute a study: one for each baseline, one for each scenario; each writes its record and ends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from holdfast.config.job import Job
from holdfast.errors import ConfigError, InternalError, StorageError
from holdfast.optim.digest import LayerState
from holdfast.runtime.engine.probing import probe
from holdfast.runtime.main.lookups import answering
from holdfast.study.outcomes import Baseline, Held, Outcome, Spent, load, points, save
from holdfast.study.places import baseline_file, outcome_file, state_folder
from holdfast.study.scenarios import EXACT, StudyScenario, steps_per_epoch
from holdfast.study.trainer import Split, Trainer, load_states, save_states

__all__ = ["run_baseline", "run_scenario"]

_REPEATS = 3
"""A mini-batch is timed so often, with and without a failure by turns."""
_ON_A_CURVE = 60


def run_baseline(job: Job, seed: int, at: tuple[int, ...], out: str, answer: Connection) -> None:
    """Trains without a failure, and keeps the states that scenarios begin with; sends ``ok``, or what is wrong.

    The job is tried out before, as any that is trained.
    """
    torch.set_num_threads(1)

    def work() -> str:
        seeded = _seeded(job, seed)
        probe(seeded)
        save(baseline_file(Path(out), seed), _baseline(seeded, at, Path(out)))
        return ""

    answering(answer, work)


def run_scenario(job: Job, scenario: StudyScenario, began: float, out: str, answer: Connection) -> None:
    """Has one failure answered from the state before it; sends ``ok``, or what is wrong.

    Args:
        job: the job.
        scenario: the failure.
        began: the monotonic clock when this process was asked for.
        out: the study's folder.
        answer: where to.
    """
    torch.set_num_threads(1)

    def work() -> str:
        seeded = _seeded(job, scenario.seed)
        restarted = scenario.strategy == "checkpoint-restart"
        try:
            outcome = (
                _restarted(seeded, scenario, began, Path(out)) if restarted else _struck(seeded, scenario, Path(out))
            )
        except StorageError as error:
            states = state_folder(Path(out), scenario.seed, scenario.at).parent
            raise ConfigError(f"{error}; delete {states} to have it made again") from error
        save(outcome_file(Path(out), scenario), outcome)
        return ""

    answering(answer, work)


def _seeded(job: Job, seed: int) -> Job:
    return msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, seed=seed))


def _baseline(job: Job, at: tuple[int, ...], out: Path) -> Baseline:
    split, steps, seed = Split(job), job.train.steps, job.train.seed
    trainer, epoch = Trainer(job, split), steps_per_epoch(job, len(split.training))
    kept = {*at, *(each - each % epoch for each in at)}
    looked = {*at, *range(0, steps, max(1, steps // _ON_A_CURVE)), *(each for a in at for each in points(a, steps))}
    held: dict[int, Held] = {}
    digests: dict[int, str] = {}
    written: list[Spent] = []
    times: list[float] = []
    for step in range(steps + 1):
        if step in kept:
            folder = state_folder(out, seed, step)
            written.append(_spent(lambda: save_states(folder, trainer.states())))  # noqa: B023 - it runs at once
        if step in looked or step == steps:
            held[step] = trainer.held_out(step)
        if step - 1 in at:
            digests[step - 1] = trainer.weights_sha256()
        if step < steps:
            times.append(_spent(lambda: trainer.run(step)).cpu_s)  # noqa: B023
    states = trainer.states()
    return Baseline(
        seed=seed,
        curve=tuple(held[step] for step in sorted(held)),
        before={each: held[each] for each in at},
        after={each: tuple(held[step] for step in points(each, steps)) for each in at},
        weights_sha256=digests,
        minibatch_s=statistics.fmean(times),
        checkpoint=Spent(
            wall_s=statistics.fmean(each.wall_s for each in written),
            cpu_s=statistics.fmean(each.cpu_s for each in written),
        ),
        steps_per_epoch=epoch,
        model_bytes=sum(state.parameter_bytes for state in states),
        state_bytes=sum(state.num_bytes for state in states),
        samples=(len(split.training), sum(len(y) for _, y in split.held_out)),
    )


def _struck(job: Job, scenario: StudyScenario, out: Path) -> Outcome:
    split, at = Split(job), scenario.at
    before = load_states(state_folder(out, scenario.seed, at))
    without, with_it = [], []
    for _ in range(_REPEATS):
        without.append(_timed(job, split, None, at, before)[1])
        trainer, seconds = _timed(job, split, scenario, at, before)
        with_it.append(seconds)
    digest = trainer.weights_sha256()
    exact = scenario.strategy in EXACT
    after = _unchanged(scenario, digest, out) if exact else _gone_on(trainer, at, job.train.steps)
    return _outcome(scenario, after, digest, statistics.median(with_it), statistics.median(without))


def _gone_on(trainer: Trainer, at: int, steps: int) -> tuple[Held, ...]:
    """To the end of the run."""
    after = []
    for step in range(at + 1, steps + 1):
        if step in points(at, steps):
            after.append(trainer.held_out(step))
        if step < steps:
            trainer.run(step)
    return tuple(after)


def _unchanged(scenario: StudyScenario, digest: str, out: Path) -> tuple[Held, ...]:
    """What comes of weights that are the baseline's: the same."""
    baseline = load(baseline_file(out, scenario.seed), Baseline)
    if baseline is None:
        raise InternalError(f"{scenario.path}: its baseline is missing")
    if digest != baseline.weights_sha256[scenario.at]:
        raise InternalError(f"step {scenario.at}: after {scenario.name} the weights are not those of the baseline")
    return baseline.after[scenario.at]


def _timed(
    job: Job, split: Split, scenario: StudyScenario | None, at: int, before: list[LayerState]
) -> tuple[Trainer, float]:
    """A trainer that has made step ``at``, and the processor seconds of that."""
    trainer = Trainer(job, split, scenario)
    trainer.take(before)
    return trainer, _spent(lambda: trainer.run(at)).cpu_s


def _restarted(job: Job, scenario: StudyScenario, began: float, out: Path) -> Outcome:
    """From the checkpoint that the epoch began with: the same bits, once all mini-batches since are made again."""
    trainer = Trainer(job, split := Split(job))
    init = Spent(wall_s=time.monotonic() - began, cpu_s=time.process_time())
    at = scenario.at
    start = at - at % steps_per_epoch(job, len(split.training))
    restart = _spent(lambda: trainer.take(load_states(state_folder(out, scenario.seed, start))))

    def replay() -> None:
        for step in range(start, at):
            trainer.run(step)

    again = _spent(replay)
    last = _spent(lambda: trainer.run(at))
    digest = trainer.weights_sha256()
    outcome = _outcome(scenario, _unchanged(scenario, digest, out), digest, last.cpu_s, last.cpu_s)
    return msgspec.structs.replace(outcome, init=init, restart=restart, replay=again, replayed=at - start)


def _outcome(
    scenario: StudyScenario, after: tuple[Held, ...], digest: str, minibatch_s: float, baseline_s: float
) -> Outcome:
    return Outcome(
        seed=scenario.seed,
        at=scenario.at,
        strategy=scenario.strategy,
        progress=scenario.progress,
        survivors=scenario.survivors,
        after=after,
        weights_sha256=digest,
        minibatch_s=minibatch_s,
        baseline_s=baseline_s,
    )


def _spent(work: Callable[[], None]) -> Spent:
    wall, cpu = time.monotonic(), time.process_time()
    work()
    return Spent(wall_s=time.monotonic() - wall, cpu_s=time.process_time() - cpu)
