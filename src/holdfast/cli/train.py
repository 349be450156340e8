"""``holdfast train``: trains a job on this machine, through whatever dies."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.cli.agent import START_ELSEWHERE, take_part
from holdfast.cli.arguments import add_overrides, add_preempt, check_address, preemption, token_from, whole_number
from holdfast.cli.lines import ProgressLine
from holdfast.config.job import Job
from holdfast.config.load import load_job
from holdfast.config.profiles import load_profile
from holdfast.core.faults import Fault
from holdfast.core.profile import Profile
from holdfast.errors import (
    ConfigError,
    DecisionsLost,
    LedElsewhere,
    NodeLeft,
    StateUnavailable,
    TooFewWorkers,
)
from holdfast.runtime.hardening import outlast_readers
from holdfast.runtime.launch.joining import JoinRequest
from holdfast.runtime.launch.reaching import reach_in
from holdfast.runtime.node.signals import Interrupted
from holdfast.runtime.train import Summary, default_directory, train

__all__ = [
    "add_coordinator_parser",
    "add_run_options",
    "add_train_parser",
    "describe",
    "listening",
    "train_and_tell",
]

_FAULT_HELP = (
    "KIND:TARGET@STEP[:POINT]; may be repeated. Of a worker: kill:1.2@5:backward, hang (stopped), stall (its thread is "
    "stuck), slow:1.2@5:3x, leave (told to go), suspend and wake (told to compute nothing, and to compute again), "
    "join:1.2@30 or join:new@30 (comes), partition (its node's link is cut). Of a node: kill-node:2@5. Points of a "
    "step: start (default), forward, backward, reduce, gradients:50 (half "
    "of its sums are there), verdict, update, commit; of an evaluation: evaluate; of a checkpoint: checkpoint; of a "
    "recovery: detect, install, "
    "copy, replay. Of the coordinator: kill-coordinator@10[:POINT]: when a step begins (start), or in a recovery: "
    "detect, persist, broadcast, install, copy. kill, kill-node and join at a time: kill:1.2@+12.5s, so long after the "
    "first step is over"
)


def add_train_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``train`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser("train", help="train a job, through whatever dies", description=__doc__)
    parser.add_argument("job", metavar="JOB.yaml", help="the job file")
    add_overrides(parser, "grid.stages=2")
    add_run_options(parser)
    parser.add_argument(
        "--emulate",
        metavar="PROFILE.json",
        help="sleep as long as this profile says instead of computing, on as many layers as it has; all else is real. "
        "The hash tells whether every micro-batch took its way through every layer",
    )
    parser.set_defaults(run=run)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the commands that train have in common."""
    parser.add_argument(
        "--fault",
        dest="faults",
        action="append",
        default=[],
        metavar="SPEC",
        help=_FAULT_HELP,
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="where to write; must not hold a run, unless --resume is auto; default runs/NAME-TIME (auto: runs/NAME)",
    )
    parser.add_argument(
        "--resume",
        metavar="auto|DIR|URL[@STEP]",
        help="auto: begin, or go on with what the same command began, or stop if that is done, or (with --listen) take "
        "part in it as an agent does, if other machines go on with it; else go on from the newest sound checkpoint of "
        "a run directory, a folder or s3://BUCKET/PREFIX, or from that of STEP; the grid may be another one, the "
        "global batch may not",
    )
    parser.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="KEY,...",
        help="with --resume: keys that are meant to differ from the checkpoint's, such as "
        "model.dropout,optimizer.betas; may be repeated",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        help="the address of this machine by which others reach it (as control.host and control.port, and needs tls as "
        "these do): agents of other machines can take part",
    )
    parser.add_argument(
        "--slots",
        type=whole_number(0),
        metavar="N",
        help="how many workers may run on this machine (default: all); the others begin where `holdfast agent` is "
        "started. Machines have the run directory in common",
    )
    parser.add_argument(
        "--notice",
        choices=("end", "leave"),
        default="end",
        help="what SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 do: end: the job makes a checkpoint, and ends everywhere "
        "(default); leave: the workers of this machine leave it, and it goes on on others (exit code 75)",
    )
    add_preempt(parser)
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="what agents have to know (-: piped in; default: HOLDFAST_TOKEN, else one is made up and written into the "
        "run directory)",
    )
    parser.add_argument(
        "--track",
        metavar="TRACKER",
        action="append",
        default=[],
        help="csv, tensorboard, wandb, mlflow, or file.py:Class of your own: told of the run while it goes on, as "
        "`holdfast track` does, besides what track in the job file says; may be repeated",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress line")


def add_coordinator_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``coordinator`` command: ``train`` with no worker on this machine."""
    about = "Trains a job with all its workers on other machines, where `holdfast agent` is started."
    parser = commands.add_parser("coordinator", help="train a job on other machines", description=about)
    parser.add_argument("job", metavar="JOB.yaml", help="the job file")
    add_overrides(parser, "grid.stages=2")
    add_run_options(parser)
    parser.set_defaults(run=run, slots=0, emulate=None)


def listening(args: argparse.Namespace) -> list[str]:
    """Returns the overrides of keys that the command line gives, those of ``--listen`` included."""
    if args.listen is None:
        return list(args.overrides)
    host, colon, port = args.listen.partition(":")
    check_address(f"--listen {args.listen}", f"{host}:{port if colon else 0}")
    if host == "0.0.0.0":
        raise ConfigError(f"--listen {args.listen}: expected the address by which other machines reach this one")
    return [*args.overrides, f"control.host={host}", f"control.port={port or 0}"]


def run(args: argparse.Namespace) -> int:
    """Trains, prints a short summary and returns the exit code."""
    words = ["holdfast", args.command, args.job]
    words += ["--emulate", args.emulate] if args.emulate else []
    emulate = load_profile(args.emulate) if args.emulate else None
    job = load_job(args.job, listening(args))
    with preemption(args):
        return train_and_tell(job, args, words, emulate=emulate)


def train_and_tell(
    job: Job, args: argparse.Namespace, words: Sequence[str], then: Sequence[str] = (), emulate: Profile | None = None
) -> int:
    """Trains a job, prints a short summary and returns the exit code.

    Args:
        job: the job.
        args: as `add_run_options` reads them.
        words: of a command that would train it, without these options.
        then: its last words.
        emulate: see :func:`holdfast.runtime.train.train`.
    """
    outlast_readers()
    token = token_from(args.token_file)
    faults = tuple(Fault.parse(text) for text in args.faults)
    job = msgspec.structs.replace(job, track=tuple(dict.fromkeys((*job.track, *args.track))))
    line = ProgressLine(job, quiet=args.quiet)
    auto = (args.resume or job.resume) == "auto"
    run_dir = Path(args.run_dir) if args.run_dir else default_directory(job, auto=auto)
    line.where = f"written to {run_dir}; shown by: {shlex.join(['holdfast', 'board', str(run_dir)])}"
    try:
        summary = train(
            job,
            run_dir=run_dir,
            faults=faults,
            emulate=emulate,
            resume=args.resume,
            accept=[key for text in args.accept for key in text.split(",") if key],
            slots=job.most_workers if args.slots is None and args.listen else args.slots,
            leaves=args.notice == "leave",
            token=token,
            on_event=line.tell,
            on_progress=line.show,
        )
    except Interrupted as interruption:
        line.end()
        told = f"{interruption.told}; " if interruption.told else ""
        print(f"holdfast: {interruption}: {told}every process is ended", file=sys.stderr)
        return 128 + interruption.signal_number
    except NodeLeft as left:
        line.end()
        print(left)
        return START_ELSEWHERE
    except LedElsewhere:
        line.end()
        if (joining := _joining(job, args, token)) is None:
            raise
        print("holdfast: the job goes on, led from another machine: this one takes part in that", file=sys.stderr)
        return take_part(joining, quiet=args.quiet)
    except (StateUnavailable, TooFewWorkers, DecisionsLost) as error:
        if error.resume:
            error.add_note(f"go on with: {_go_on(args, job, error.resume, words, then)}")
        raise
    finally:
        line.end()
    print(describe(summary))
    if faults and summary.report.missing:
        print(f"holdfast: whether every fault fired is not known: {summary.report.missing}", file=sys.stderr)
    if summary.unfired:
        print(f"holdfast: never fired: {', '.join(summary.unfired)}", file=sys.stderr)
        return 4
    if summary.scripts_failed:
        who = ", ".join(summary.scripts_failed)
        print(
            f"holdfast: all steps are done and saved, but the script failed behind its loop (worker {who}; above is "
            "where)",
            file=sys.stderr,
        )
        return 1
    return 0


def _joining(job: Job, args: argparse.Namespace, token: str) -> JoinRequest | None:
    """How to take part in what the same command has begun and goes on elsewhere; None: nobody could run here."""
    slots = job.most_workers if args.slots is None else args.slots
    if args.listen is None or not slots:
        return None
    run_dir = Path(args.run_dir) if args.run_dir else default_directory(job, auto=True)
    find = partial(reach_in, run_dir.absolute(), token=token, tls=job.control.tls)
    patience_s = job.control.reattach_s
    return JoinRequest(where=str(run_dir), find=find, slots=slots, host=job.control.host, patience_s=patience_s)


def _go_on(args: argparse.Namespace, job: Job, resume: str, words: Sequence[str], then: Sequence[str]) -> str:
    """The command that goes on with a run that ended early; scheduled faults are not repeated."""
    options = [word for text in args.overrides for word in ("--set", text)]
    options += [word for name in args.track for word in ("--track", name)]
    given = {"--listen": args.listen, "--slots": args.slots, "--token-file": args.token_file, "--preempt": args.preempt}
    given["--notice"] = None if args.notice == "end" else args.notice
    options += [word for name, value in given.items() if value is not None for word in (name, str(value))]
    if "auto" in (args.resume, job.resume if args.resume is None else None):
        options += ["--run-dir", resume]
        resume = "auto"
    return shlex.join([*words, *options, "--resume", resume, *then])


def describe(summary: Summary) -> str:
    """Returns a few lines for people."""
    loss = "-" if summary.final_loss is None else f"{summary.final_loss:.6f}"
    rate = "" if summary.steps_per_s is None else f", {summary.steps_per_s:.2f} steps/s"
    done = "DONE, BUT NOT WELL" if summary.report.omitted_at_end else "done"
    done = "done already, nothing was changed" if summary.done_before else done
    lines = [f"{done}: {summary.steps} steps, loss {loss}{rate}, {summary.generations} generation(s)"]
    lines += [text for text in (summary.report.tell_omitted(),) if text]
    lines += [f"not known: {', '.join(fields)}: {why}" for why, fields in _unknown(summary).items()]
    for failure in summary.report.failures:
        after = "" if failure.resumed_s is None else f", next step committed {failure.resumed_s:.3f} s later"
        where = f" ({failure.kind} at {failure.point})" if failure.point else ""
        when = f" in step {failure.step}" if failure.step >= 0 else ""
        lines.append(f"lost worker {failure.worker}{when}{where}{after}")
        if failure.replaced_by is not None:
            since = "" if failure.replaced_s is None else f", {failure.replaced_s:.3f} s later"
            lines.append(f"worker {failure.replaced_by} did a step in its place{since}")
    if summary.resumed_from is not None:
        lines.append(f"went on from the checkpoint of step {summary.resumed_from}")
    if len(summary.attempts) > 1:
        lines.append(f"attempt {len(summary.attempts)} in this run directory")
    if summary.weights_sha256 is not None:
        lines.append(f"weights_sha256 {summary.weights_sha256}")
    lines.append(f"written to {summary.run_dir}")
    return "\n".join(lines)


def _unknown(summary: Summary) -> dict[str, list[str]]:
    """The fields that should have a value and have none, by the reason."""
    found: dict[str, list[str]] = {}
    for name, why in summary.reasons.items():
        found.setdefault(why, []).append(name)
    return found
