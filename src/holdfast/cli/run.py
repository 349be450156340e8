"""``holdfast run``: runs a training script on several workers, through whatever dies."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from holdfast.cli.arguments import add_overrides, preemption, whole_number
from holdfast.cli.train import add_run_options, listening, train_and_tell
from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.errors import ConfigError

__all__ = ["add_run_parser", "job_of"]

_SCRIPTS = ("train.steps", "train.seed")
_SET = ("name", "train", "resilience", "checkpoint", "control", "grid.workers_per_node", "track")


def add_run_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``run`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "run",
        help="run a training script on several workers, through whatever dies",
        description="Runs a training script on several workers, through whatever dies. The script has its own loop, "
        "over the steps of holdfast.session(); workers are 0.0, 1.0 and so on.",
    )
    parser.add_argument(
        "--workers", type=whole_number(1), required=True, metavar="N", help="how many processes run the script"
    )
    add_overrides(parser, "checkpoint.every=100")
    add_run_options(parser)
    parser.add_argument("script", metavar="SCRIPT", help="the script, which calls holdfast.session()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="what the script is given")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the script, prints a short summary and returns the exit code."""
    job = job_of(args.script, args.arguments, args.workers, listening(args))
    words = ["holdfast", "run", "--workers", str(args.workers)]
    with preemption(args):
        return train_and_tell(job, args, words, [args.script, *args.arguments])


def job_of(script: str, arguments: list[str], workers: int, overrides: list[str]) -> Job:
    """Returns the job that runs a script; how many steps and micro-batches there are, the script has yet to say.

    Raises:
        ConfigError: there is no such script, or a key is set that is the script's to say.
    """
    if not Path(script).is_file():
        raise ConfigError(f"{script}: there is no such script")
    for override in overrides:
        key = override.partition("=")[0]
        if key in _SCRIPTS or not any(key == name or key.startswith(f"{name}.") for name in _SET):
            raise ConfigError(f"--set {override}: the script says this; expected another key of {', '.join(_SET)}")
    tree = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).stem)[:100] or "script",
        "model": {"kind": "script", "path": script, "arguments": arguments},
        "data": {"kind": "script"},
        "grid": {"pipelines": workers, "stages": 1, "microbatches": 1},
        "train": {"steps": 1},
        "logging": {"use": "off"},  # every worker holds the whole model
    }
    return parse_job(tree, overrides, source="holdfast run")
