"""``holdfast simulate``: what becomes of a whole job under failures, by each strategy, without running it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
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
from holdfast.settings.planning import sums_of
from holdfast.sim.compare import Simulated, compare
from holdfast.sim.engine import Prepared, Speeds, simulate
from holdfast.sim.failures import parse_failures
from holdfast.sim.prepare import prepared, profile_needed, speeds_of
from holdfast.sim.systems.facts import facts_of
from holdfast.sim.systems.rows import OOBLECK, SYSTEMS
from holdfast.sim.systems.system import System, simulate_system

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
    sys.stdout.write(_FORMATS[args.format](shown))
    return 0


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
