"""``holdfast profile``: measures what each layer of a job costs, for planning and for emulation.

One process trains every layer as a stage of its own and times F, I, W, B and the end of a step, with what a micro-batch
holds after F and after I; then two processes send messages to and fro over the job's own transport. Times are medians,
in seconds, for one micro-batch; the file is JSON. Nothing is trained that anybody keeps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.cli.arguments import add_overrides, whole_number
from holdfast.cli.counting import CountingLine
from holdfast.config.job import Job
from holdfast.config.load import load_job
from holdfast.config.profiles import save_profile
from holdfast.control.tls import check_tls
from holdfast.core.profile import LayerProfile, Profile
from holdfast.errors import ConfigError
from holdfast.profiling.profiler import measure_profile

__all__ = ["add_profile_parser", "describe"]


def add_profile_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``profile`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser("profile", help="measure what each layer of a job costs", description=__doc__)
    parser.add_argument("job", metavar="JOB.yaml", help="the job file; its grid gives the size of a micro-batch")
    parser.add_argument("--out", metavar="FILE", required=True, help="where to write; must not exist, see --force")
    parser.add_argument(
        "--iterations", type=whole_number(1), default=100, metavar="N", help="how often to measure; default 100"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to compute; default cpu")
    parser.add_argument(
        "--gpus",
        type=_numbers_of_gpus,
        metavar="N[,N...]",
        help="also on stages of so many GPUs, sharded over as many processes; default: as the job's are",
    )
    add_overrides(parser, "model.checkpoint_activations=true")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, writes the file, prints a table and returns the exit code 0.

    Raises:
        ConfigError: the job or a flag cannot be used; the message names it and what would be right.
    """
    job = load_job(args.job, args.overrides)
    _check_free(Path(args.out), force=args.force)
    if job.control.tls is not None:
        check_tls(job.control.tls, job.control.host)
    gpus = _gpus_of(job) if args.gpus is None else args.gpus
    line, total = CountingLine("iteration", quiet=args.quiet), args.iterations * (1 + len(gpus))
    options = {"iterations": args.iterations, "device": args.device, "gpus": gpus}
    try:
        profile = measure_profile(job, **options, on_iteration=lambda done: line.show(done, total))
    finally:
        line.end()
    save_profile(profile, args.out)
    print(describe(profile))
    print(f"written to {args.out}")
    return 0


def _numbers_of_gpus(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(map(whole_number(2), text.split(",")))))


def _gpus_of(job: Job) -> tuple[int, ...]:
    """On how many GPUs the job's stages are sharded, where that is several."""
    return tuple(sorted({gpus for row in job.shards for gpus in row} - {1}))


def _check_free(out: Path, *, force: bool) -> None:
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; expected a file in one that exists")
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; expected a file")
    if out.exists() and not force:
        raise ConfigError(f"--out {out}: exists already, nothing was overwritten; choose another file or use --force")


def describe(profile: Profile) -> str:
    """Returns a table for people."""
    width = max(len(layer.name) for layer in profile.layers)
    head = f"{'layer':{width}}" + "".join(f"{name:>9}" for name in ("F ms", "I ms", "W ms", "B ms", "step ms"))
    head += "".join(f"{name:>13}" for name in ("after F kB", "after I kB", "boundary kB", "weights kB"))
    rows = [f"{layer.name:{width}}" + _numbers(layer) for layer in profile.layers]
    link = profile.link
    ends = f"link: {link.latency_s * 1e6:.0f} us and {link.bytes_per_s / 1e6:.0f} MB/s; "
    ends += ", ".join(f"{name} {value}" for name, value in profile.machine.items())
    return "\n".join([head, *rows, ends])


def _numbers(layer: LayerProfile) -> str:
    seconds = (
        layer.forward_s,
        layer.backward_input_s,
        layer.backward_weight_s,
        layer.backward_s or 0.0,
        layer.optimizer_s,
    )
    sizes = (
        layer.held_after_forward_bytes,
        layer.held_after_input_bytes,
        layer.boundary_bytes,
        layer.parameter_bytes,
    )
    return "".join(f"{value * 1e3:9.3f}" for value in seconds) + "".join(f"{size / 1e3:13.1f}" for size in sizes)
