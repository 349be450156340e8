"""``holdfast advise``: which grid and strategy a job should have, how often it is to be saved, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from holdfast.cli.advise_shown import ShownAdvice, to_json, to_text
from holdfast.cli.arguments import above_0, from_0
from holdfast.cli.simulate_shown import ShownRuns
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
from holdfast.settings.planning import sums_of
from holdfast.sim.advice import AS_IT_IS, MANY_BYTES, Settings, advise
from holdfast.sim.failures import parse_failures
from holdfast.sim.prepare import profile_needed, speeds_of

__all__ = ["add_advise_parser", "run"]

_FORMATS: Mapping[str, Callable[[ShownAdvice], str]] = MappingProxyType({"json": to_json, "text": to_text})
_HOURS, _FAILURES, _RUNS = 24.0, 12, 3


def add_advise_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``advise`` command; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser(
        "advise", help="which grid, strategy and checkpoints a job should have, by simulation", description=__doc__
    )
    parser.add_argument("job", metavar="JOB.yaml", help="the job; it needs a profile of its layers")
    fail = parser.add_mutually_exclusive_group(required=True)
    fail.add_argument("--mtbf", metavar="4h", help="mean time between two failures of the whole cluster")
    fail.add_argument("--trace", metavar="FAILURES", help=TRACE_HELP)
    parser.add_argument(
        "--repair", metavar="1h", help="with --mtbf: after it another machine comes; default: none ever does"
    )
    parser.add_argument(
        "--worker-memory",
        type=above_0("bytes, such as 80e9"),
        metavar="BYTES",
        help="of each worker; default: as the job says, else twice what the fullest one of its own grid holds",
    )
    parser.add_argument(
        "--log-storage",
        type=from_0("bytes, such as 2e12"),
        metavar="BYTES",
        help="that all logs together may take, where what crosses nodes is logged; default: no limit",
    )
    parser.add_argument("--format", choices=sorted(_FORMATS), default="text")
    add_simulating(
        parser,
        hours=f"as a FILE says, else {_HOURS:g}, or {_FAILURES} failures",
        runs=f"once for FILE and periodic, else {_RUNS}",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the advice, and returns the exit code 0.

    Raises:
        ConfigError: a flag, the job or the trace cannot be used; the message names it and what would be right.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    job = job_of(args)
    profile = profile_needed(job, num_layers(job))
    trace = args.trace or f"poisson:mtbf={args.mtbf}" + (f",repair={args.repair}" if args.repair else "")
    (cluster, measured), failures = cluster_of(args, job), parse_failures(trace)
    hours = max(_HOURS, _FAILURES * failures.gap_s / 3600) if not failures.is_trace else _HOURS
    worlds = worlds_of(args, failures, job, hours=hours, runs=_RUNS)

    def job_with(settings: Settings) -> Job:
        told = (f"{key}={msgspec.json.encode(value).decode()}" for key, value in settings)
        return job_of(args, (key_of(cluster), *told))

    speeds = speeds_of(profile, cluster, sums=sums_of(job))
    advice = advise(
        job_with,
        profile,
        worlds,
        speeds,
        memory_bytes=args.worker_memory or 0.0,
        log_bytes=MANY_BYTES if args.log_storage is None else args.log_storage,
        processes=processes_of(args),
        said=progress(),
    )
    found = {AS_IT_IS: advice.as_it_is, **{each.name: compared for each, compared in advice.ranked}}
    shown = ShownRuns(job=job.name, trace=trace, worlds=worlds, found=found, assumed=cluster, measured=measured)
    sys.stdout.write(_FORMATS[args.format](ShownAdvice(advice=advice, path=args.job, shown=shown)))
    return 0
