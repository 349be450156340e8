"""What commands share that simulate whole jobs: their flags, the worlds that these name, and progress."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.cli.arguments import above_0, add_overrides, whole_number
from holdfast.config.job import Cluster, Job
from holdfast.config.load import load_job, num_layers
from holdfast.config.profiles import load_profile
from holdfast.errors import ConfigError, StorageError
from holdfast.settings.planning import profile_of, sums_of, with_technique
from holdfast.sim.calibrate import Layers, Shown, medians, shown_by
from holdfast.sim.failures import FORMS, SLOW, Failures
from holdfast.sim.prepare import parse_cluster, settled_on
from holdfast.sim.traces import read_trace
from holdfast.sim.world import World
from holdfast.telemetry.events import Scheduled
from holdfast.telemetry.story import read_story

__all__ = ["TRACE_HELP", "add_simulating", "cluster_of", "job_of", "key_of", "processes_of", "progress", "worlds_of"]

_HOUR_S = 3600.0
TRACE_HELP = (
    f"what happens to machines: {FORMS}; all but FILE may have notice=2m (for which machines still work), and all but "
    "it and spot repair=1h (after which another machine comes for each that is lost); all but FILE, whose lines say it "
    f"themselves, may have {SLOW} (now and then a machine takes twice as long, for so long)"
)


def add_simulating(parser: argparse.ArgumentParser, *, hours: str, runs: str) -> None:
    """Adds the flags that all of them have; ``hours`` and ``runs`` say what these are by default."""
    parser.add_argument("--profile", metavar="FILE", help="from `holdfast profile`, instead of the job's train.profile")
    parser.add_argument("--hours", type=above_0("hours"), metavar="H", help=f"how long; default: {hours}")
    parser.add_argument("--runs", type=whole_number(1), metavar="R", help=f"how often; default: {runs}")
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="of all that is drawn (default 0)")
    parser.add_argument(
        "--speeds",
        default="",
        metavar="NAME=NUMBER,...",
        help=f"what no profile tells, in s and bytes/s, if not as the job says; by default {Cluster()}",
    )
    parser.add_argument(
        "--speeds-of",
        action="append",
        default=[],
        metavar="RUN_DIR",
        help="take of them what this run shows, as of a small job on the same cluster in which somebody was lost and "
        "came back; --speeds goes before it; may be repeated",
    )
    parser.add_argument(
        "--jobs", type=whole_number(1), metavar="N", help="simulations at once; default: one for each processor"
    )
    add_overrides(parser, "checkpoint.every=100")


def job_of(args: argparse.Namespace, more: Sequence[str] = ()) -> Job:
    """Returns the job that the flags name, with more of its keys set otherwise.

    Raises:
        ConfigError: it cannot be read, or is wrong.
    """
    overrides = [*args.overrides, *more]
    if args.profile is not None:
        overrides.append(f"train.profile={msgspec.json.encode(str(args.profile)).decode()}")
    return load_job(args.job, overrides)


def cluster_of(args: argparse.Namespace, job: Job) -> tuple[Cluster, tuple[str, ...]]:
    """Returns how fast the cluster is by the job and the flags, and what of that the runs show that they name.

    Raises:
        ConfigError: a flag cannot be used, or no run can be read where one is said to be.
    """
    try:
        measured = medians(map(_shown_in, map(Path, args.speeds_of)))
    except StorageError as error:
        raise ConfigError(f"--speeds-of: {error}") from None
    cluster = parse_cluster(args.speeds, job.cluster, measured)
    return cluster, tuple(name for name, value in measured.items() if getattr(cluster, name) == value)


def key_of(cluster: Cluster) -> str:
    """Returns what makes it that of a job."""
    return f"cluster={msgspec.json.encode(cluster).decode()}"


def _shown_in(run_dir: Path) -> Shown:
    """What a run shows; how fast state is, and messages are, where its layers have a profile."""
    job, events = load_job(run_dir / "job.yaml"), read_story(run_dir)
    emulated = run_dir / "profile.json"
    profile = load_profile(emulated) if emulated.exists() else profile_of(job, num_layers(job))
    if profile is None:
        return shown_by(events)
    told = next((event for _, event in events if isinstance(event, Scheduled)), None)
    if job.train.technique == "auto":  # what decided there is not known here, such as how many processors there were
        job = with_technique(job, "1f1b") if told is None else with_technique(job, told.technique, told.in_flight)
    plan, ahead = settled_on(job, profile).plan, job.train.technique == "staggered"
    sums = 0 if emulated.exists() else sums_of(job)
    return shown_by(events, Layers(plan=plan, profile=profile, ahead=ahead, sums=sums))


def worlds_of(args: argparse.Namespace, failures: Failures, job: Job, *, hours: float, runs: int) -> tuple[World, ...]:
    """Returns what happens in each run; a trace's is the same in each, but for who is lost where it has numbers only.

    Args:
        args: the flags.
        failures: how machines fail.
        job: so many machines there are in the beginning as it needs, and has spares.
        hours: how long, where the flags do not say it, and no trace does.
        runs: how often, where the flags do not say it and something is drawn.

    Raises:
        ConfigError: a trace cannot be read, or never has as many machines as the job needs.
    """
    room = job.grid.workers_per_node
    needed = -(-job.num_workers // room)
    if failures.is_trace:
        path, lasts_s = Path(failures.kind), None if args.hours is None else args.hours * _HOUR_S
        worlds = tuple(read_trace(path, lasts_s=lasts_s, seed=args.seed + number) for number in range(args.runs or 1))
        most = max(count for _, count in worlds[0].available())
        if most < needed:
            raise ConfigError(f"{path}: never are more than {most} machines there, and the job needs {needed}")
        return worlds
    machines, lasts_s = needed + -(-job.resilience.spares // room), (args.hours or hours) * _HOUR_S
    count = args.runs or (1 if failures.kind == "periodic" else runs)
    return tuple(failures.draw(machines, lasts_s, f"{args.seed}:{number}") for number in range(count))


def processes_of(args: argparse.Namespace) -> int:
    """Returns how many simulate side by side."""
    return args.jobs or len(os.sched_getaffinity(0))


def progress() -> Callable[[int, int], None]:
    """Returns what shows on a terminal how many simulations are over, and about how long the others take."""
    began = time.monotonic()

    def said(done: int, of: int) -> None:
        if sys.stderr.isatty():
            left = f", about {(time.monotonic() - began) / done * (of - done):.0f} s left" if done else ""
            text = f"{done} of {of} simulations{left}" if done < of else ""
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return said
