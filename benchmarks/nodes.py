"""From the death of a whole node, or of its network, to the next committed step: an agent per network namespace.

Three nodes run four emulated workers each, for a job that was begun in a fourth network. Struck from outside at a
random moment: SIGKILL to one agent, with which its workers end, or its cable is cut, which closes no connection. Then
the start: how long until many agents' workers, who load no model, have all attached. Linux, root, `ip`, `nsenter`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from holdfast.config.job import Job
from holdfast.config.load import dump_job, parse_job
from holdfast.config.profiles import dump_profile
from holdfast.runtime.isolation import Namespace, Networks
from holdfast.telemetry.events import Detected, Event, Rebuilt, StepOps, read_events
from measure import Interval, Recorder, interval, print_table, progress, verdict
from measured_run import op_profile

TARGETS_S = {"kill": 0.15, "cut": 1.5, "head": None}
"""Of a kill to the links that are made anew, which is all but what is left of the step; of a cut to that as well; none
for the loss of the machine where the job was begun, with its coordinator."""
START_TARGET_S = 30.0
METRICS = ("detected_s", "rebuilt_s", "commit_s")
_LAYERS = 12
_LIMIT_S = 180.0


class _Nodes:
    """A job in networks of its own, and its agents."""

    def __init__(self, folder: Path, job: Job, op_s: float, networks: Networks, slots: int) -> None:
        self.events_path = folder / "run" / "events.jsonl"
        self._folder, self._networks = folder, networks
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "job.yaml").write_text(dump_job(job))
        (folder / "profile.json").write_bytes(dump_profile(op_profile(_LAYERS, job.grid.stages, op_s)))
        self._head = self._start(
            "head",
            networks.hub,
            *("train", "job.yaml", "--emulate", "profile.json", "--run-dir", "run", "--slots", str(slots), "--quiet"),
            *("--listen", networks.hub.host, "--set", "control.insecure=true", "--set", "control.reattach_s=5"),
        )
        found = _until(lambda: re.search(r"by: holdfast (agent .*) --slots N", (folder / "head").read_text()))
        self._invitation = found[1].split()

    def join(self, node: int, slots: int) -> subprocess.Popen[bytes]:
        """Starts an agent in the network of this number."""
        return self._start(
            f"node-{node}",
            self._networks.node(node),
            *self._invitation,
            "--slots",
            str(slots),
            "--node",
            f"node-{node}",
        )

    def _start(self, name: str, place: Namespace, *words: str) -> subprocess.Popen[bytes]:
        line = ["nsenter", f"--net={place.path}", sys.executable, "-m", "holdfast", *words]
        with (self._folder / name).open("w") as out:
            self._processes.append(subprocess.Popen(line, cwd=self._folder, stdout=out, stderr=subprocess.STDOUT))
        return self._processes[-1]

    def kill_head(self) -> float:
        """Kills the machine where the job was begun, once another coordinator stands by; returns when."""
        _until(lambda: any("stands by at" in path.read_text() for path in self._folder.glob("node-*")))
        struck = time.monotonic()
        _kill(self._head)
        return struck

    def events(self) -> list[tuple[float, Event]]:
        """What has happened so far."""
        return read_events(self.events_path)

    def committed(self, step: int) -> None:
        """Waits until this step is over for somebody."""
        _until(lambda: any(isinstance(event, StepOps) and event.step >= step for _, event in self.events()))

    def close(self) -> None:
        """Ends all of it."""
        for process in self._processes:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        agent = psutil.Process(process.pid)
        for each in (*agent.children(recursive=True), agent):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed."""
    options = _options()
    recorder, source = Recorder("nodes", vars(options)), random.Random(0)
    for repetition in range(options.repetitions):
        for how in TARGETS_S:
            recorder.begin()
            row = recorder.add(how=how, repetition=repetition, **_struck(how, source.random(), options))
            progress(f"{how} {repetition + 1}/{options.repetitions}: {row}")
    for repetition in range(options.starts):
        recorder.begin()
        row = recorder.add(how="start", repetition=repetition, error=None, **_started(options))
        progress(f"start {repetition + 1}/{options.starts}: {row}")
    summary = [_summary(how, recorder.rows) for how in (*TARGETS_S, "start")]
    _show(summary)
    recorder.write([{**row, **{name: row[name].to_json() for name in METRICS if name in row}} for row in summary])
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10, help="runs of each way to strike, in turns")
    parser.add_argument("--op-ms", type=float, default=20.0, help="length of every emulated F, I and W")
    parser.add_argument("--starts", type=int, default=1, help="how often it is looked how long a start takes")
    parser.add_argument("--agents", type=int, default=16, help="of a start, with four workers each")
    return parser.parse_args()


def _job(pipelines: int) -> Job:
    return parse_job(
        {
            "name": "nodes",
            "model": {"kind": "gpt", "layers": _LAYERS - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0},
            "data": {"kind": "text", "path": __file__},
            "grid": {"pipelines": pipelines, "stages": 4, "microbatches": 6},
            "train": {"steps": 10_000, "technique": "1f1b"},
        }
    )


@contextlib.contextmanager
def _nodes(pipelines: int, op_s: float, slots: int = 0) -> Iterator[tuple[_Nodes, Networks]]:
    with tempfile.TemporaryDirectory(prefix="holdfast-nodes-") as folder, Networks(pipelines) as networks:
        nodes = _Nodes(Path(folder), _job(pipelines), op_s, networks, slots)
        with contextlib.closing(nodes):
            yield nodes, networks


def _struck(how: str, moment: float, options: argparse.Namespace) -> dict[str, Any]:
    """Strikes the second of three nodes, or the one where the job was begun; returns the row."""
    op_s, slots = options.op_ms / 1000, 4 if how == "head" else 0
    with _nodes(3, op_s, slots) as (nodes, networks):
        agents = [nodes.join(node, 4) for node in range(2 if slots else 3)]
        nodes.committed(4)
        time.sleep(moment * op_s * 36)
        struck = time.monotonic()
        if slots:
            struck = nodes.kill_head()
        elif how == "kill":
            agents[1].send_signal(signal.SIGKILL)
        else:
            networks.cut(1)
        _until(lambda: _after(nodes.events(), struck, 2) is not None)
        return _after(nodes.events(), struck, 2) or {}


def _after(events: list[tuple[float, Event]], struck: float, generation: int) -> dict[str, Any] | None:
    """What came of it, in seconds from then on; None if no step has been committed since."""
    detected = [at for at, event in events if isinstance(event, Detected) and at >= struck]
    rebuilt = [at for at, event in events if isinstance(event, Rebuilt) and at >= struck]
    commits = [at for at, event in events if isinstance(event, StepOps) and detected and at > max(rebuilt, default=9e9)]
    if not (detected and rebuilt and commits):
        return None
    newest = max(at for at in rebuilt if at < min(commits))
    lost = {event.worker for _, event in events if isinstance(event, Detected)}
    problem = None if len(lost) == 4 else f"{sorted(lost)} are lost, instead of the four workers of one node"
    return {
        "error": problem,
        "detected_s": min(detected) - struck,
        "rebuilt_s": newest - struck,
        "commit_s": min(commits) - struck,
    }


def _started(options: argparse.Namespace) -> dict[str, Any]:
    """How long it takes from the first agent's start to the end of the first step."""
    with _nodes(options.agents, 0.001) as (nodes, _):
        began = time.monotonic()
        for node in range(options.agents):
            nodes.join(node, 4)
        nodes.committed(0)
        return {"commit_s": time.monotonic() - began}


def _until(condition: Any) -> Any:
    end = time.monotonic() + _LIMIT_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError("what is waited for did not come")
        time.sleep(0.02)
    return found


def _summary(how: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if row["how"] == how and not row["error"]]
    names = METRICS if how in TARGETS_S else METRICS[-1:]
    metrics: dict[str, Interval] = {name: interval([row[name] for row in good]) for name in names}
    failed = sum(row["how"] == how for row in rows) - len(good)
    return {"how": how, "runs": len(good), "failed": failed, **metrics}


def _show(summary: list[dict[str, Any]]) -> None:
    header = ["struck", "runs (failed)", "detected, ms", "links stand again, ms", "next commit, ms", "target"]
    table = []
    for row in summary:
        values = [row[name].show(1000, 0) if name in row else "-" for name in METRICS]
        how = row["how"]
        measured, target = (row["rebuilt_s"], TARGETS_S[how]) if how in TARGETS_S else (row["commit_s"], START_TARGET_S)
        told = "-" if target is None else f"{target:g} s: {verdict(measured, target)}"
        table.append([how, f"{row['runs']} ({row['failed']})", *values, told])
    print_table("A node dies, or is cut off; and how long agents take to start", header, table)


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("needs root, to make networks")
    raise SystemExit(main())
