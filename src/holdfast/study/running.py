"""Runs a study: baselines and then scenarios, in processes of their own, two at a time; what is done stays done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from holdfast.config.job import Job
from holdfast.config.load import dump_job
from holdfast.errors import ConfigError, InternalError
from holdfast.runtime.node.children import Children
from holdfast.runtime.node.entries import EntryPoint
from holdfast.runtime.node.forks import FORKS
from holdfast.runtime.rundir import RunDirLock
from holdfast.study.outcomes import Baseline, Outcome, load
from holdfast.study.places import baseline_file, outcome_file, state_folder
from holdfast.study.scenarios import Study, StudyScenario

__all__ = ["Records", "claim", "run_study"]

BASELINE = EntryPoint("baseline", "holdfast.study.children:run_baseline")
SCENARIO = EntryPoint("scenario", "holdfast.study.children:run_scenario")
_SIDE_BY_SIDE = 2
_JOB = "job.yaml"
_BEGUN = {"lock", "job.part"}
"""What a study that was ended at once may have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """All that came of a study.

    Attributes:
        baselines: of each seed.
        outcomes: of each scenario, in the study's order.
    """

    baselines: tuple[Baseline, ...]
    outcomes: tuple[Outcome, ...]


@contextlib.contextmanager
def claim(out: Path, job: Job) -> Iterator[None]:
    """Makes a folder the study of a job, or goes on with it; as long as the context lasts, nobody else does.

    Raises:
        ConfigError: it is the study of another job, holds something else, is in use, or cannot be written.
    """
    there = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if there - _BEGUN and _JOB not in there:
        raise ConfigError(f"--out {out}: is not empty, and holds no study; choose another folder")
    with RunDirLock(out, "--out") as claimed:
        claimed.take()
        file = out / _JOB
        if not file.exists():
            file.with_suffix(".part").write_text(dump_job(job))
            file.with_suffix(".part").replace(file)
        elif file.read_text() != dump_job(job):
            raise ConfigError(f"--out {out}: holds the study of another job ({_JOB}); choose another folder")
        yield


def run_study(
    job: Job, study: Study, out: Path, on_done: Callable[[int, int], None] = lambda done, of: None
) -> Records:
    """Computes what is missing of a study, and returns all of it.

    Call it under ``if __name__ == "__main__":``, as everything that starts processes.

    Args:
        job: one that `check` accepts.
        study: what is compared.
        out: its folder, claimed.
        on_done: called with how many baselines and scenarios are done, and of how many; first with those that were.

    Raises:
        ConfigError: something in the job cannot be used.

    After failure: no process is left; what is done is kept, and the same call goes on.
    """
    missing = [seed for seed in study.seeds if not _has_baseline(out, seed, study.at)]
    waiting = [each for each in study.every if load(outcome_file(out, each), Outcome) is None]
    total = len(study.seeds) + len(study.every)
    on_done(total - len(missing) - len(waiting), total)
    with _Processes() as processes:
        while missing or waiting or processes.running:
            while len(processes.running) < _SIDE_BY_SIDE:
                task = _next(missing, waiting, processes.seeds)
                if task is None:
                    break
                processes.start(job, task, study, out)
            processes.await_one()
            on_done(total - len(missing) - len(waiting) - len(processes.running), total)
    baselines = [load(baseline_file(out, seed), Baseline) for seed in study.seeds]
    outcomes = [load(outcome_file(out, each), Outcome) for each in study.every]
    return Records(
        baselines=tuple(each for each in baselines if each is not None),
        outcomes=tuple(each for each in outcomes if each is not None),
    )


def _has_baseline(out: Path, seed: int, steps: tuple[int, ...]) -> bool:
    found = load(baseline_file(out, seed), Baseline)
    if found is None or not set(steps) <= set(found.before):
        return False
    needed = (step for at in steps for step in (at, at - at % found.steps_per_epoch))
    return all(state_folder(out, seed, step).is_dir() for step in needed)


def _all_steps(out: Path, seed: int, steps: tuple[int, ...]) -> tuple[int, ...]:
    """Those that are asked for, and those of the record that is there: it has them, too, when it is made again."""
    found = load(baseline_file(out, seed), Baseline)
    return tuple(sorted({*steps, *(found.before if found is not None else ())}))


def _next(missing: list[int], waiting: list[StudyScenario], running: set[int]) -> int | StudyScenario | None:
    """Takes out what can begin: a scenario whose baseline is there, else a baseline."""
    for each in waiting:
        if each.seed not in missing and each.seed not in running:
            waiting.remove(each)
            return each
    return missing.pop(0) if missing else None


class _Processes(contextlib.AbstractContextManager["_Processes"]):
    """Processes that are ended with the context, however it ends."""

    def __init__(self) -> None:
        self._children = Children()
        self.running: dict[Connection, int | StudyScenario] = {}

    @property
    def seeds(self) -> set[int]:
        """Of the baselines that are being computed."""
        return {task for task in self.running.values() if isinstance(task, int)}

    def start(self, job: Job, task: int | StudyScenario, study: Study, out: Path) -> None:
        """Starts a baseline, by its seed, or a scenario."""
        ours, theirs = FORKS.Pipe(duplex=False)
        if isinstance(task, StudyScenario):
            child = self._children.start(SCENARIO, job, task, time.monotonic(), str(out), theirs, name=SCENARIO.name)
        else:
            steps = _all_steps(out, task, study.at)
            child = self._children.start(BASELINE, job, task, steps, str(out), theirs, name=BASELINE.name)
        self._children.attend(child)
        theirs.close()
        self.running[ours] = task

    def await_one(self) -> None:
        """Waits until one has ended.

        Raises:
            ConfigError: something in the job cannot be used.
        """
        for answer in self._answered():
            task = self.running.pop(answer)
            try:
                kind, _, text = answer.recv_bytes().decode().partition(" ")
            except EOFError:
                kind, text = "bug", "it ended without an answer"
            answer.close()
            what = task.path if isinstance(task, StudyScenario) else f"baseline of seed {task}"
            if kind == "error":
                raise ConfigError(text if isinstance(task, int) else f"{what}: {text}")
            if kind != "ok":
                raise InternalError(f"{what}: {text}")

    def _answered(self) -> Iterator[Connection]:
        ready = wait(list(self.running))
        return (answer for answer in tuple(self.running) if answer in ready)

    def __exit__(self, *_: object) -> None:
        self._children.end()
