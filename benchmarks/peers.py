"""Holdfast next to torchft and torchrun's elastic restart: one of three data-parallel workers is killed in mid-step.

All train the same small GPT on the same samples with the same optimizer, on this machine, in turns. The other systems
are installed into an environment of their own (``benchmarks/.peers-venv``). What cannot be installed, and every run
that fails or reaches its time limit, is reported as such.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.config.job import Job
from holdfast.config.load import dump_job, parse_job
from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.errors import HoldfastError
from holdfast.runtime.node.signals import Interrupted
from holdfast.runtime.train import train
from holdfast.telemetry.events import Installed, StepOps, read_events
from measure import ROOT, Interval, Recorder, interval, print_table, progress, time_limit
from processes import PeerFailed, Processes

VENV = Path(__file__).resolve().parent / ".peers-venv"
PYTHON = VENV / "bin" / "python"
WORKER = Path(__file__).resolve().parent / "peers_worker.py"
_REPLICAS = 3
_VICTIM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run tells.

    Attributes:
        next_commit_s: from the kill to the next committed step, whichever; None without a kill.
        caught_up_s: from the kill to the commit of the step that it interrupted.
        repeated_steps: steps begun more than once, the interrupted one included.
        smallest_batch: micro-batches in the smallest committed step.
        sha256: of the weights at the end; equal on all survivors.
        step_s: time of a healthy step, median over the steps before the kill.
    """

    next_commit_s: float | None
    caught_up_s: float | None
    repeated_steps: int
    smallest_batch: int
    sha256: str
    step_s: float


Runner = Callable[[Job, Path, argparse.Namespace, bool], Outcome]


def main() -> int:
    """Runs the benchmark; returns 1 if a run of Holdfast failed, 0 else: the others' failures are results."""
    options = _options()
    recorder = Recorder("peers", vars(options))
    problem = install()
    names = [name for name in options.systems if name.startswith("holdfast") or problem is None]
    clean = {name: _run(recorder, name, -1, options) for name in names}
    for repetition in range(options.repetitions):
        for name in names:
            _run(recorder, name, repetition, options)
    summary = {
        "not_installed": problem,
        "systems": [_summary(name, clean[name], recorder.rows) for name in names],
    }
    _show(summary)
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows if row["system"].startswith("holdfast")))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), help="what to run")
    parser.add_argument("--repetitions", type=int, default=10, help="killed runs per system, in turns")
    parser.add_argument("--quick", action="store_true", help="1 repetition")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run")
    parser.add_argument("--kill-step", type=int, default=12, help="the step in which a worker is killed")
    parser.add_argument("--limit-s", type=float, default=90.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 1
    return options


def install() -> str | None:
    """Creates the environment of the other systems; returns what went wrong, None if nothing did."""
    if _works():
        return None
    progress(f"installing torchft-nightly into {VENV.relative_to(ROOT)}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = ["torchft-nightly", "psutil", *project["dependencies"]]
    commands = (
        [sys.executable, "-m", "venv", str(VENV)],
        [str(PYTHON), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *packages],
    )
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{' '.join(command[:4])}: {error}"
        if done.returncode:
            return f"{' '.join(command[:4])}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return None if _works() else "torchft cannot be imported after its installation"


def _works() -> bool:
    if not PYTHON.exists():
        return False
    command = [str(PYTHON), "-c", "import torchft.manager, holdfast.runtime.engine.build"]
    return subprocess.run(command, capture_output=True, timeout=120, env=environment(), check=False).returncode == 0


def environment() -> dict[str, str]:
    """Returns that of processes which import Holdfast from here and speak to this machine only."""
    own = {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}


def _job(options: argparse.Namespace) -> Job:
    return parse_job(
        {
            "name": "peers",
            "model": {"kind": "gpt", "layers": 2, "width": 128, "heads": 4, "context": 64, "dropout": 0},
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {"pipelines": _REPLICAS, "stages": 1, "microbatches": 4, "microbatch_size": 2},
            "train": {"steps": options.steps},
        }
    )


def _run(recorder: Recorder, name: str, repetition: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one system once, without a kill if ``repetition`` is -1; a failure becomes a row."""
    recorder.begin()
    kill = repetition >= 0
    with tempfile.TemporaryDirectory(prefix="holdfast-peers-") as directory:
        try:
            outcome = SYSTEMS[name](_job(options), Path(directory), options, kill)
            values = {field: getattr(outcome, field) for field in Outcome.__slots__}
            error = None
        except (HoldfastError, Interrupted, PeerFailed, TimeoutError) as problem:
            values, error = {}, f"{type(problem).__name__}: {problem}"
    row = recorder.add(system=name, repetition=repetition, killed=kill, error=error, **values)
    said = f"FAILED: {error}" if error else f"next commit {row['next_commit_s']}, steps of {row['step_s']:.3f} s"
    progress(f"{name} {'run ' + str(repetition + 1) if kill else 'without a kill'}: {said}")
    return row


def run_holdfast(numerics: Literal["exact", "fast"]) -> Runner:
    """Returns what trains with Holdfast on a grid of 3 x 1."""

    def run(job: Job, directory: Path, options: argparse.Namespace, kill: bool) -> Outcome:
        numbered = msgspec.structs.replace(job.train, numerics=numerics)
        return _train(msgspec.structs.replace(job, train=numbered), directory, options, kill)

    return run


def _train(job: Job, directory: Path, options: argparse.Namespace, kill: bool) -> Outcome:
    fault = Fault(kind=FaultKind.KILL, worker=WorkerId(_VICTIM, 0), step=options.kill_step, point=Point("backward"))
    with time_limit(options.limit_s):
        summary = train(job, run_dir=directory / "run", faults=[fault] if kill else [])
    if summary.unfired:
        raise PeerFailed(f"did not fire: {summary.unfired}")
    commits = dict(summary.report.commits)
    resumed = summary.report.failures[0].resumed_s if kill else None
    timed = read_events(directory / "run" / "events.jsonl")
    return Outcome(
        next_commit_s=resumed,
        caught_up_s=resumed,
        repeated_steps=int(kill),
        smallest_batch=min(_batches(timed).values()),
        sha256=summary.weights_sha256 or "",
        step_s=_step_s(commits, options.kill_step),
    )


def _batches(timed: list[tuple[float, Any]]) -> dict[int, int]:
    """Micro-batches whose forward pass went into every step, of the newest generation that committed it."""
    newest: dict[int, int] = {}
    found: dict[tuple[int, int], int] = defaultdict(int)
    for _, event in timed:
        if isinstance(event, StepOps):
            newest[event.step] = max(newest.get(event.step, 0), event.generation)
            found[event.step, event.generation] += sum(kind == "F" for kind, *_ in event.ops)
    assert any(isinstance(event, Installed) for _, event in timed)
    return {step: found[step, generation] for step, generation in newest.items()}


def _step_s(commits: dict[int, float], before: int) -> float:
    steps = [commits[step] - commits[step - 1] for step in range(2, before)]
    return interval(steps).median or 0.0


def run_torchft(*, heartbeat_ms: int, join_ms: int) -> Runner:
    """Returns what trains with torchft: three replica groups of one worker, and a lighthouse."""

    def run(job: Job, directory: Path, options: argparse.Namespace, kill: bool) -> Outcome:
        with Processes(options.limit_s, environment()) as processes:
            times = [f"--heartbeat-ms={heartbeat_ms}", f"--join-ms={join_ms}"]
            lighthouse = processes.start([str(PYTHON), str(WORKER), "lighthouse", *times], talks=True)
            address = f"http://127.0.0.1:{processes.line(lighthouse)}"
            command = [*_command(job, directory, options, kill, "torchft"), f"--lighthouse={address}"]
            workers = [processes.start([*command, f"--rank={rank}"], talks=True) for rank in range(_REPLICAS)]
            processes.lines(workers, "ready")  # their heartbeats have begun
            processes.release(workers)
            processes.lines(workers, "done", may_die=int(kill))
            processes.release(workers)
            processes.wait(workers, may_die=int(kill))
        return _read(job, directory, options, kill)

    return run


def run_torchrun(*, own_prefix: bool) -> Runner:
    """Returns what trains with torchrun: an agent that starts all three workers anew when one dies."""

    def run(job: Job, directory: Path, options: argparse.Namespace, kill: bool) -> Outcome:
        command = _command(job, directory, options, kill, "torchrun")[1:]
        launcher = [
            *(str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
            *(f"--nproc-per-node={_REPLICAS}", "--max-restarts=3"),
        ]
        with Processes(options.limit_s, environment()) as processes:
            agent = processes.start([*launcher, *command, *(["--own-prefix"] if own_prefix else [])])
            processes.wait([agent], may_die=0)
        return _read(job, directory, options, kill)

    return run


def _command(job: Job, directory: Path, options: argparse.Namespace, kill: bool, part: str) -> list[str]:
    (directory / "job.yaml").write_text(dump_job(job))
    command = [str(PYTHON), str(WORKER), part, f"--job={directory / 'job.yaml'}", f"--events={_events(directory)}"]
    return [*command, f"--kill-rank={_VICTIM}", f"--kill-step={options.kill_step}"] if kill else command


def _events(directory: Path) -> Path:
    return directory / "events.jsonl"


def _read(job: Job, directory: Path, options: argparse.Namespace, kill: bool) -> Outcome:
    """Reads the events of another system's run."""
    events = [json.loads(line) for line in _events(directory).read_text().splitlines()]
    commits = [event for event in events if event["event"] == "commit"]
    killed = next((event["time"] for event in events if event["event"] == "kill"), None)
    hashes = {event["sha256"] for event in events if event["event"] == "done"}
    if kill and killed is None:
        raise PeerFailed("nobody was killed")
    if len(hashes) != 1:
        raise PeerFailed(f"{len(hashes)} different results: {hashes}")
    first = _complete(commits, before=killed)
    after = _complete([event for event in commits if killed is not None and event["time"] > killed])
    return Outcome(
        next_commit_s=min(after.values()) - killed if killed is not None else None,
        caught_up_s=after[options.kill_step] - killed if killed is not None else None,
        repeated_steps=len(first.keys() & after.keys()) + int(kill),
        smallest_batch=min(event["members"] for event in commits) * job.grid.microbatches,
        sha256=hashes.pop(),
        step_s=_step_s(first, options.kill_step),
    )


def _complete(commits: list[dict[str, Any]], before: float | None = None) -> dict[int, float]:
    """When the last worker had committed each step."""
    found: dict[int, float] = {}
    for event in commits:
        if before is None or event["time"] <= before:
            found[event["step"]] = max(found.get(event["step"], 0.0), event["time"])
    return found


SYSTEMS: dict[str, Runner] = {
    "holdfast": run_holdfast("exact"),
    "holdfast-fast": run_holdfast("fast"),
    "torchft": run_torchft(heartbeat_ms=5000, join_ms=60000),
    "torchft-1s": run_torchft(heartbeat_ms=1000, join_ms=60000),
    "torchft-1s-join-0.1s": run_torchft(heartbeat_ms=1000, join_ms=100),
    "torchrun": run_torchrun(own_prefix=False),
    "torchrun-prefix": run_torchrun(own_prefix=True),
}


def _summary(name: str, clean: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [row for row in rows if row["system"] == name and row["killed"]]
    good = [row for row in mine if not row["error"]]
    batch = _REPLICAS * 4
    return {
        "system": name,
        "runs": len(mine),
        "failed": len(mine) - len(good),
        "next_commit_s": interval([row["next_commit_s"] for row in good]).to_json(),
        "caught_up_s": interval([row["caught_up_s"] for row in good]).to_json(),
        "step_s": interval([row["step_s"] for row in good]).to_json(),
        "repeated_steps": interval([row["repeated_steps"] for row in good]).to_json(),
        "batch_kept": all(row["smallest_batch"] == batch for row in good) if good else None,
        "weights_equal": all(row["sha256"] == clean["sha256"] for row in good) if good and not clean["error"] else None,
        "errors": [row["error"] for row in [clean, *mine] if row["error"]],
    }


def _show(summary: dict[str, Any]) -> None:
    header = [
        "system",
        "runs (failed)",
        "kill to next commit, s",
        "until the interrupted step is committed, s",
        "steps begun again",
        "global batch kept",
        "weights of the run without a kill",
        "healthy step, ms",
    ]
    rows = [
        [
            row["system"],
            f"{row['runs']} ({row['failed']})",
            _show_interval(row["next_commit_s"], 1, 2),
            _show_interval(row["caught_up_s"], 1, 2),
            "-" if row["repeated_steps"]["median"] is None else f"{row['repeated_steps']['median']:.0f}",
            *({True: "yes", False: "NO", None: "-"}[row[key]] for key in ("batch_kept", "weights_equal")),
            _show_interval(row["step_s"], 1000, 0),
        ]
        for row in summary["systems"]
    ]
    print_table("SIGKILL of one of three data-parallel workers in mid-step: median [95 % interval]", header, rows)
    if summary["not_installed"]:
        print(f"NOT INSTALLED torchft-nightly: {summary['not_installed']}")
    for row in summary["systems"]:
        for error in row["errors"]:
            print(f"FAILED {row['system']}: {error}")


def _show_interval(found: dict[str, Any], unit: float, digits: int) -> str:
    return Interval(**found).show(unit, digits)


if __name__ == "__main__":
    raise SystemExit(main())
