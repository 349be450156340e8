"""``holdfast simulate``: what becomes of a whole job under failures, by each strategy, without running it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from holdfast.cli.simulate_page import to_page
from holdfast.cli.simulate_shown import ShownRuns, to_json, to_table
from holdfast.cli.simulating import (
    TRACE_HELP,
    add_simulating,
    cluster_of,
    job_of,
    key_of,
    processes_of,
    progress,
    worlds_of,
)
from holdfast.config.job import Job
from holdfast.config.load import num_layers
from holdfast.errors import ConfigError
from holdfast.runtime.rundir import attempt_folder
from holdfast.settings.planning import sums_of
from holdfast.sim.compare import Compared, Simulated, compare
from holdfast.sim.diary import attempts
from holdfast.sim.engine import Prepared, simulate
from holdfast.sim.failures import parse_failures
from holdfast.sim.prepare import prepared, profile_needed, speeds_of
from holdfast.sim.speeds import Speeds
from holdfast.sim.systems.facts import facts_of
from holdfast.sim.systems.rows import OOBLECK, SYSTEMS
from holdfast.sim.systems.system import System, simulate_system
from holdfast.telemetry.events import EventLog, Timed

__all__ = ["add_simulate_parser", "run"]

_FORMATS: Mapping[str, Callable[[ShownRuns], str]] = MappingProxyType(
    {"html": to_page, "json": to_json, "table": to_table}
)
_HOURS, _RUNS = 24.0, 5


def add_simulate_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``simulate`` command; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser(
        "simulate", help="a whole job under failures, by each strategy, without running it", description=__doc__
    )
    parser.add_argument("job", metavar="JOB.yaml", help="the job; it needs a profile of its layers")
    parser.add_argument("--trace", required=True, metavar="FAILURES", help=TRACE_HELP)
    parser.add_argument(
        "--strategies",
        metavar="a,b,...",
        help="what answers losses; default: that of the job; or a "
        f"system without a runtime here, as a model: {', '.join(SYSTEMS)}",
    )
    parser.add_argument("--format", choices=sorted(_FORMATS), default="table")
    parser.add_argument(
        "--events",
        metavar="DIR",
        help="a new folder for what each simulated job would write into its log, a run directory for each strategy and "
        "run, such as DIR/adaptive-0, for `holdfast inspect`",
    )
    add_simulating(parser, hours=f"as a FILE says, else {_HOURS:g}", runs=f"once for FILE and periodic, else {_RUNS}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what became of the job, and returns the exit code 0.

    Raises:
        ConfigError: a flag, the job or the trace cannot be used; the message names it and what would be right.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    job = job_of(args)
    profile = profile_needed(job, num_layers(job))
    (cluster, measured), failures = cluster_of(args, job), parse_failures(args.trace)
    speeds, names = speeds_of(profile, cluster, sums=sums_of(job)), _strategies(args.strategies, job)

    @cache
    def row(name: str) -> Prepared:
        return prepared(job_of(args, (key_of(cluster), f"resilience.strategy={name}")), profile)

    jobs: dict[str, Simulated] = {
        name: partial(simulate, row(name), speeds=speeds) for name in names if name not in SYSTEMS
    }
    systems = _systems([name for name in names if name in SYSTEMS], job, row, speeds)
    jobs |= {system.name: become for system, become in systems}
    worlds = worlds_of(args, failures, job, hours=_HOURS, runs=_RUNS)
    logs = None if args.events is None else _new_folder(Path(args.events))
    found = compare(jobs, worlds, job.samples_per_step, processes=processes_of(args), said=progress())
    shown = ShownRuns(
        job=job.name,
        trace=args.trace,
        worlds=worlds,
        found=found,
        assumed=cluster,
        measured=measured,
        systems=tuple(system for system, _ in systems),
    )
    if logs is not None:
        _write_logs(logs, job, found)
    sys.stdout.write(_FORMATS[args.format](shown))
    return 0


def _new_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"--events {path}: is not empty; expected a new folder, nothing was overwritten")
    except OSError as error:
        raise ConfigError(f"--events {path}: cannot be written: {error.strerror}") from None
    return path


def _write_logs(folder: Path, job: Job, found: Mapping[str, Compared]) -> None:
    """A run directory for each strategy and run, with its earlier attempts; systems that are models have no log."""
    for name, compared in found.items():
        for run, outcome in enumerate(compared.outcomes):
            told = list(attempts(outcome.events, job.name, job.num_workers, job.samples_per_step, outcome.seconds))
            for number, events in enumerate(told, 1):
                run_dir = folder / f"{name}-{run}"
                _write_log(run_dir if number == len(told) else attempt_folder(run_dir, number), events)


def _write_log(run_dir: Path, events: Sequence[Timed]) -> None:
    run_dir.mkdir(parents=True, mode=0o700, exist_ok=True)
    with closing(EventLog(run_dir / "events.jsonl")) as log:
        if not all(log.write(*timed) for timed in events):
            raise ConfigError(f"--events: {run_dir} cannot be written, its file system may be full")


def _strategies(text: str | None, job: Job) -> tuple[str, ...]:
    names = tuple(dict.fromkeys((text or job.resilience.strategy).split(",")))
    if not all(names):
        raise ConfigError(f"--strategies {text}: expected names such as adaptive,templates")
    return names


def _systems(
    names: Sequence[str], job: Job, row: Callable[[str], Prepared], speeds: Speeds
) -> tuple[tuple[System, Simulated], ...]:
    """Each system as a row, and what becomes of the job by it."""
    if not names:
        return ()
    shapes = row("templates").rules.shapes if OOBLECK in names else None
    facts = facts_of(job, row(job.resilience.strategy), speeds, shapes)
    places = len(facts.pipelines_of)
    return tuple(
        (system, partial(simulate_system, system, places=places, healthy_s=facts.job_s))
        for system in (SYSTEMS[name](facts) for name in names)
    )
