"""``holdfast simulate``: what becomes of a whole job under failures, by each strategy, without running it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from holdfast.cli.arguments import above_0, add_overrides, whole_number
from holdfast.cli.simulate_page import to_page
from holdfast.cli.simulate_shown import ShownRuns, to_json, to_table
from holdfast.config.job import Job
from holdfast.config.load import load_job, num_layers
from holdfast.errors import ConfigError
from holdfast.sim.compare import compare
from holdfast.sim.engine import Prepared
from holdfast.sim.failures import FORMS, Failures, parse_failures
from holdfast.sim.prepare import DEFAULTS, parse_assumed, prepared, profile_needed, speeds_of
from holdfast.sim.traces import read_trace
from holdfast.sim.world import World

__all__ = ["add_simulate_parser", "run"]

_FORMATS: Mapping[str, Callable[[ShownRuns], str]] = MappingProxyType(
    {"html": to_page, "json": to_json, "table": to_table}
)
_HOURS, _RUNS = 24.0, 5
_HOUR_S = 3600.0


def add_simulate_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``simulate`` command; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser(
        "simulate", help="a whole job under failures, by each strategy, without running it", description=__doc__
    )
    parser.add_argument("job", metavar="JOB.yaml", help="the job; it needs a profile of its layers")
    parser.add_argument(
        "--trace",
        required=True,
        metavar="FAILURES",
        help=f"what happens to machines: {FORMS}; all but FILE may have repair=1h (after which another machine comes "
        "for each that is lost) and notice=2m (for which machines still work)",
    )
    parser.add_argument("--strategies", metavar="a,b,...", help="what answers losses; default: that of the job")
    parser.add_argument("--profile", metavar="FILE", help="from `holdfast profile`, instead of the job's train.profile")
    parser.add_argument(
        "--hours", type=above_0("hours"), metavar="H", help=f"how long; default: as a FILE says, else {_HOURS:g}"
    )
    parser.add_argument(
        "--runs",
        type=whole_number(1),
        metavar="R",
        help=f"how often; default: once for FILE and periodic, else {_RUNS}",
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="of all that is drawn (default 0)")
    parser.add_argument(
        "--speeds", default="", metavar="NAME=NUMBER,...", help=f"what no profile tells, in s and bytes/s: {DEFAULTS}"
    )
    parser.add_argument(
        "--jobs", type=whole_number(1), metavar="N", help="simulations at once; default: one for each processor"
    )
    parser.add_argument("--format", choices=sorted(_FORMATS), default="table")
    add_overrides(parser, "checkpoint.every=100")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what became of the job, and returns the exit code 0.

    Raises:
        ConfigError: a flag, the job or the trace cannot be used; the message names it and what would be right.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    job = _job(args, ())
    profile = profile_needed(job, num_layers(job))
    assumed, failures = parse_assumed(args.speeds), parse_failures(args.trace)
    names = _strategies(args.strategies, job)
    jobs = {name: prepared(_job(args, (f"resilience.strategy={name}",)), profile) for name in names}
    worlds = _worlds(args, failures, next(iter(jobs.values())))
    began = time.monotonic()

    def said(done: int, of: int) -> None:
        if sys.stderr.isatty():
            left = f", about {(time.monotonic() - began) / done * (of - done):.0f} s left" if done else ""
            text = f"{done} of {of} simulations{left}" if done < of else ""
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    samples = sum(job.grid.batch.counts) * job.grid.microbatch_size
    processes = args.jobs or len(os.sched_getaffinity(0))
    found = compare(jobs, worlds, speeds_of(profile, assumed), samples, processes=processes, said=said)
    shown = ShownRuns(job=job.name, trace=args.trace, worlds=worlds, found=found, assumed=assumed)
    sys.stdout.write(_FORMATS[args.format](shown))
    return 0


def _job(args: argparse.Namespace, more: Sequence[str]) -> Job:
    overrides = [*args.overrides, *more]
    if args.profile is not None:
        overrides.append(f"train.profile={msgspec.json.encode(str(args.profile)).decode()}")
    return load_job(args.job, overrides)


def _strategies(text: str | None, job: Job) -> tuple[str, ...]:
    names = tuple(dict.fromkeys((text or job.resilience.strategy).split(",")))
    if not all(names):
        raise ConfigError(f"--strategies {text}: expected names such as adaptive,templates")
    return names


def _worlds(args: argparse.Namespace, failures: Failures, job: Prepared) -> tuple[World, ...]:
    """What happens in each run; a trace's is the same in each, but for who is lost where it has numbers only."""
    needed = -(-len(job.plan.workers) // job.workers_per_machine)
    hours = args.hours * _HOUR_S if args.hours is not None else None
    if failures.is_trace:
        path = Path(failures.kind)
        worlds = tuple(read_trace(path, lasts_s=hours, seed=args.seed + number) for number in range(args.runs or 1))
        most = max(count for _, count in worlds[0].available())
        if most < needed:
            raise ConfigError(f"{path}: never are more than {most} machines there, and the job needs {needed}")
        return worlds
    runs = args.runs or (1 if failures.kind == "periodic" else _RUNS)
    return tuple(failures.draw(needed, hours or _HOURS * _HOUR_S, f"{args.seed}:{number}") for number in range(runs))
