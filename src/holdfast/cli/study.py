"""``holdfast study``: what failures of data-parallel training do to a model, and what they cost, by strategy.

From one state before a mini-batch, failures are simulated at some progress of its backward pass, and answered by each
strategy; held-out data judges what comes of it, at once and later. The same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from holdfast.cli.arguments import add_overrides, whole_number
from holdfast.cli.counting import CountingLine
from holdfast.config.load import load_job
from holdfast.study.findings import Findings, find
from holdfast.study.pictures import draw
from holdfast.study.running import claim, run_study
from holdfast.study.scenarios import PROGRESS, STRATEGIES, plan_study
from holdfast.study.telling import to_csv, to_json, to_markdown, to_text

__all__ = ["add_study_parser"]

_FORMATS = {"text": to_text, "json": to_json}


def add_study_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``study`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "study", help="what failures of data-parallel training do to a model, by strategy", description=__doc__
    )
    parser.add_argument(
        "job", metavar="JOB.yaml", help="the job file, of pipelines of one stage: these are the workers"
    )
    parser.add_argument(
        "--strategies", type=_words, default=STRATEGIES, metavar="A,B", help=f"of {', '.join(STRATEGIES)}; default all"
    )
    parser.add_argument(
        "--progress",
        type=_numbers,
        default=PROGRESS,
        metavar="P,...",
        help="percent of the gradients that are used before the failure; default 25,50,75",
    )
    parser.add_argument(
        "--survivors",
        type=_numbers,
        metavar="N,...",
        help="workers that adaptive and lossy-forward go on with; default a quarter, a half and three quarters of all",
    )
    parser.add_argument(
        "--at", type=_numbers, metavar="STEP,...", help="steps that fail; default early, after a third and two thirds"
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        metavar="N|A,B,...",
        help="so many runs, or with these seeds (3, is seed 3 alone); default the job's",
    )
    parser.add_argument("--out", metavar="DIR", help="where to write; default studies/NAME; one that was begun goes on")
    parser.add_argument("--format", choices=sorted(_FORMATS), default="text", help="of what is printed; default text")
    add_overrides(parser, "train.steps=100")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Computes, writes and prints a study, and returns the exit code 0.

    Raises:
        ConfigError: the job or a flag cannot be used; the message names it and what would be right.
    """
    job = load_job(args.job, args.overrides)
    study = plan_study(
        job,
        strategies=args.strategies,
        progress=args.progress,
        survivors=args.survivors,
        at=args.at,
        seeds=args.seeds,
    )
    out = Path(args.out or Path("studies", job.name))
    line = CountingLine("scenario", quiet=args.quiet)
    with claim(out, job):
        try:
            records = run_study(job, study, out, line.show)
        finally:
            line.end()
        found = find(
            records.baselines,
            records.outcomes,
            workers=len(job.grid.depths),
            microbatches=job.global_microbatches,
            steps=job.train.steps,
        )
        _write(out, found)
    sys.stdout.write(_FORMATS[args.format](found))
    if args.format == "text":
        print(f"written to {out}: report.md, study.json, study.csv and pictures")
    return 0


def _write(out: Path, found: Findings) -> None:
    texts = {"study.json": to_json(found), "study.csv": to_csv(found), "report.md": to_markdown(found)}
    for name, content in (*texts.items(), *draw(found)):
        (out / name).write_text(content)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers of 0 or more, joined by commas; none in an empty text. What is too large is said later."""
    if not re.fullmatch(r"(-?\d{1,9}(,-?\d{1,9})*)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text}: expected whole numbers joined by commas, such as 25,50,75")
    return tuple(int(each) for each in text.split(",") if each)


def _seeds(text: str) -> tuple[int, ...]:
    if "," in text:
        return tuple(whole_number(0)(each) for each in text.split(",") if each)
    return tuple(range(whole_number(1)(text)))
