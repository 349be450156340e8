"""``holdfast launch``: has a batch system or a cluster run a job on its machines."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.arguments import add_overrides, whole_number
from holdfast.cli.run import job_of
from holdfast.config.job import Job
from holdfast.config.load import load_job
from holdfast.errors import ConfigError
from holdfast.launchers.job import LaunchedJob
from holdfast.launchers.kubernetes import Pods, kubernetes_manifest
from holdfast.launchers.ray import ray_program
from holdfast.launchers.slurm import slurm_script
from holdfast.launchers.ssh import ssh_script
from holdfast.launchers.torchrun import torchrun_script
from holdfast.plain import one_line
from holdfast.runtime.train import default_directory

__all__ = ["add_launch_parser"]

_NODES = frozenset({"nodes", "spare_nodes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How something starts jobs.

    Attributes:
        ending: of the file's name.
        text: what is in the file.
        submit: the words that hand the file over, which comes last; none: it is handed over by hand.
        without_checkpoints: what happens to a job that makes none.
        executable: whether the file may be called as a command.
        takes: those options that only some ways have.
        nodes: how many there are, if that was said.
        evicts: whether nodes are told to leave, so that each of them needs to be able to.
        python: the interpreter that has Holdfast.
    """

    ending: str
    text: Callable[[LaunchedJob, argparse.Namespace], str]
    submit: tuple[str, ...]
    without_checkpoints: str
    executable: bool = True
    takes: frozenset[str] = _NODES
    nodes: Callable[[argparse.Namespace], int | None] = lambda args: args.nodes
    evicts: bool = False
    python: str = sys.executable


def _hosts(args: argparse.Namespace) -> list[str]:
    """The machines that ssh reaches.

    Raises:
        ConfigError: they are none.
    """
    hosts = [host for host in (args.hosts or "").split(",") if host]
    if not hosts or any(re.fullmatch(r"([A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9._-]*", each) is None for each in hosts):
        raise ConfigError(f"--hosts {args.hosts or ''}: expected HOST or USER@HOST, several joined by commas")
    return hosts


def _pods(job: LaunchedJob, args: argparse.Namespace) -> Pods:
    """What pods are made of.

    Raises:
        ConfigError: that was not said, or the job is nowhere where pods could see it.
    """
    claim, colon, mount = (args.claim or "").partition(":")
    if not args.image or not claim or not colon or not mount.startswith("/"):
        raise ConfigError(
            "--on kubernetes: expected --image IMAGE, with Holdfast in it, and --claim CLAIM:/PATH, a "
            "PersistentVolumeClaim that all pods mount there"
        )
    for what, path in (("--folder", job.folder), ("--run-dir", job.run_dir)):
        if not path.is_relative_to(mount):
            raise ConfigError(
                f"{what}: {path} is not below {mount}, where pods mount {claim}; expected where they see it"
            )
    return Pods(image=args.image, claim=claim, mount=mount)


_WAYS = {
    "slurm": _Way(
        ending=".slurm.sh",
        text=lambda job, args: slurm_script(job),
        submit=("sbatch",),
        without_checkpoints="if the allocation ends before the job, all is lost, so it is not queued again",
        takes=_NODES | {"option"},
    ),
    "kubernetes": _Way(
        ending=".kubernetes.yaml",
        text=lambda job, args: kubernetes_manifest(job, _pods(job, args)),
        submit=("kubectl", "apply", "-f"),
        without_checkpoints="if all pods are gone at once, all is lost",
        executable=False,
        takes=_NODES | {"image", "claim"},
        evicts=True,
        python="python3",
    ),
    "ray": _Way(
        ending=".ray.py",
        text=lambda job, args: ray_program(job),
        submit=(sys.executable,),
        without_checkpoints="if all nodes are gone at once, all is lost",
        executable=False,
    ),
    "ssh": _Way(
        ending=".ssh.sh",
        text=lambda job, args: ssh_script(job, _hosts(args)),
        submit=("bash",),
        without_checkpoints="if all machines are gone at once, all is lost",
        takes=frozenset({"hosts", "option"}),
        nodes=lambda args: len(_hosts(args)),
    ),
    "torchrun": _Way(
        ending=".torchrun.sh",
        text=lambda job, args: torchrun_script(job),
        submit=(),
        without_checkpoints="if all nodes are gone at once, all is lost",
    ),
}
_NOT_FOR_ALL = frozenset[str]().union(*(way.takes for way in _WAYS.values()))


def add_launch_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``launch`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "launch",
        help="have a batch system run a job on several machines",
        description="Writes a file that has a batch system start a job and its agents, says what it does with it, and "
        "does it. The file is yours to read and to change. The run directory, and the folder in which this is called, "
        "are to be seen on all machines.",
    )
    parser.add_argument("--on", required=True, choices=[*_WAYS], help="what starts the job")
    parser.add_argument(
        "--slots", type=whole_number(1), metavar="N", help="workers on each node (default: grid.workers_per_node)"
    )
    parser.add_argument(
        "--nodes", type=whole_number(1), metavar="N", help="nodes (default: as many as the job's workers need)"
    )
    parser.add_argument(
        "--spare-nodes",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="so many more, whose room is used as soon as somebody is lost (default: 0)",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(1),
        metavar="N",
        help="how many processes run the script, if the job is a script of yours",
    )
    parser.add_argument("--run-dir", metavar="DIR", help="where the job writes, and goes on from (default: runs/NAME)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option for sbatch, such as --option=--time=12:00:00, or for ssh; may be repeated",
    )
    parser.add_argument(
        "--hosts",
        metavar="HOST,...",
        help="ssh: the machines, HOST or USER@HOST, by names that all of them reach; the first one begins the job",
    )
    parser.add_argument("--image", metavar="IMAGE", help="kubernetes: what pods run, with Holdfast in its python3")
    parser.add_argument(
        "--claim",
        metavar="CLAIM:PATH",
        help="kubernetes: a PersistentVolumeClaim that all pods can mount (ReadWriteMany), and where they do; the "
        "job's folder is there",
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="the folder of the job, as its machines see it (default: this one's path)"
    )
    parser.add_argument("--out", metavar="FILE", help="the file (default: NAME.slurm.sh, NAME.ray.py and so on)")
    parser.add_argument("--dry-run", action="store_true", help="writes the file, and does nothing with it")
    add_overrides(parser, "train.steps=1000")
    parser.add_argument("job", metavar="JOB.yaml|SCRIPT", help="the job file; with --workers, a script of yours")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="what the script is given")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the file, has it submitted, and returns the exit code."""
    job, command, then = _asked_for(args)
    way = _WAYS[args.on]
    path = Path(args.out or f"{job.name}{way.ending}")
    run_dir = Path(args.run_dir) if args.run_dir else default_directory(job, auto=True)
    wanted = _launched(args, job, run_dir, (command, then))
    _write(path, way.text(wanted, args), way)
    told = f"{wanted.nodes} nodes with room for {wanted.slots} workers each, for {job.most_workers} workers"
    print(f"{path}: {told}; the job writes into {run_dir}")
    if wanted.notice_s is None:
        print(f"holdfast: checkpoint.every is 0: {way.without_checkpoints}", file=sys.stderr)
    words = [*way.submit, str(path)]
    if not way.submit:
        print(f"call it as the file says, on each of {wanted.nodes} nodes")
        return 0
    if args.dry_run:
        print(f"submit it by: {shlex.join(words)}")
        return 0
    return _submit(words, run_dir)


def _asked_for(args: argparse.Namespace) -> tuple[Job, tuple[str, ...], tuple[str, ...]]:
    """The job, the words of the command that begins it, and the last ones.

    Raises:
        ConfigError: it cannot be used.
    """
    if strange := [name for name in sorted(_NOT_FOR_ALL - _WAYS[args.on].takes) if getattr(args, name)]:
        raise ConfigError(f"--{strange[0].replace('_', '-')}: is not for --on {args.on}")
    overrides = [word for text in args.overrides for word in ("--set", text)]
    if args.workers is None:
        if args.arguments:
            raise ConfigError(
                f"{args.arguments[0]}: a job file is given no arguments; expected options before it, or --workers for "
                "a script"
            )
        return load_job(args.job, args.overrides), ("train", args.job, *overrides), ()
    job = job_of(args.job, args.arguments, args.workers, args.overrides)
    return job, ("run", "--workers", str(args.workers), *overrides), (args.job, *args.arguments)


def _launched(
    args: argparse.Namespace, job: Job, run_dir: Path, words: tuple[tuple[str, ...], tuple[str, ...]]
) -> LaunchedJob:
    way = _WAYS[args.on]
    if way.evicts and job.control.coordinators == 1:
        raise ConfigError("control.coordinators: 1: no pod could be done without; expected 0, or more")
    if job.control.store == "sqlite":
        raise ConfigError("control.store: sqlite: is seen on one node; expected auto, or what all nodes see")
    if job.resume not in (None, "auto"):
        raise ConfigError(
            f"resume: {job.resume}: expected auto, or nothing: the script goes on with what is in the run directory, "
            "and would begin there again each time"
        )
    folder = Path(args.folder or Path.cwd())
    slots = args.slots or job.grid.workers_per_node
    nodes = way.nodes(args) or -(-job.most_workers // slots)
    if nodes * slots < job.num_workers:
        raise ConfigError(
            f"--nodes {nodes}, --slots {slots}: there is room for {nodes * slots} workers, and the job begins with "
            f"{job.num_workers}; expected as many"
        )
    return LaunchedJob(
        name=job.name,
        made_by=_this_command(),
        folder=folder,
        run_dir=folder / run_dir,
        python=way.python,
        command=words[0],
        then=words[1],
        nodes=nodes + args.spare_nodes,
        slots=slots,
        gpus=job.train.device == "cuda",
        notice_s=job.checkpoint.on_sigterm if job.checkpoint_every else None,
        certificates=job.control.tls is None and not job.control.insecure,
        options=tuple(args.option),
    )


def _this_command() -> str:
    """For people, and the same whether it is done or not."""
    return one_line(shlex.join(["holdfast", *(word for word in sys.argv[1:] if word != "--dry-run")]), sys.maxsize)


def _write(path: Path, text: str, way: _Way) -> None:
    """Writes the file; one that is there and was changed stays.

    Raises:
        ConfigError: it cannot be written, or would be overwritten.
    """
    try:
        if path.exists() and path.read_text() != text:
            raise ConfigError(
                f"{path}: is there, and is another one; use it as it is, or remove it, or choose --out; it was not "
                "overwritten"
            )
        path.write_text(text)
        path.chmod(0o700 if way.executable else 0o600)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _submit(words: list[str], run_dir: Path) -> int:
    """Runs the command that submits it."""
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]}: is not installed here; call it where it is: {shlex.join(words)}")
    print(shlex.join(words), flush=True)
    done = subprocess.run(words, check=False)
    if done.returncode:
        print(f"holdfast: {words[0]} has refused it, with exit code {done.returncode}", file=sys.stderr)
        return 2
    print(f"see how it goes by: holdfast status {run_dir}, or holdfast inspect --follow {run_dir}")
    return 0
