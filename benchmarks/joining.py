"""A worker comes into a running job: steps until it computes, and what the others lose by it.

Compute is emulated by sleeps in one half of the runs, a small GPT's in the other; processes, sockets, coordinator,
state transfer and executor are real in both. A worker is killed, and comes back some steps later. Its process is
forked from a server that has torch loaded, so the time from asking for it to its being ready is not a cold start's.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.core.faults import Fault
from holdfast.runtime.train import Summary
from holdfast.telemetry.events import FaultInjected, Installed, StepOps, WorkerReady, read_events
from measure import Recorder, interval, print_table, progress
from measured_run import measured_run, op_profile, step_lengths

TARGET_STEPS = 3
METRICS = ("start_s", "steps_to_useful", "ready_to_useful_s", "survivors_delay_steps")
_LAYERS = 12
_KILL_STEP, _JOIN_STEP = 3, 6


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    recorder = Recorder("joining", vars(options))
    for repetition in range(options.repetitions):
        for real in (False, True):
            recorder.begin()
            row = recorder.add(compute="real" if real else "emulated", repetition=repetition, **measure(real, options))
            progress(f"run {repetition + 1}/{options.repetitions}: {row}")
    summary = [_summary(compute, recorder.rows) for compute in ("emulated", "real")]
    header = [
        "compute",
        "runs",
        "start, s",
        "steps until it computes",
        "the same in s",
        "most a step took longer, steps",
    ]
    shown = [[row["compute"], str(row["runs"]), *(row[name].show(1) for name in METRICS)] for row in summary]
    print_table(f"a worker joins: median [95 % interval]; targets: <= {TARGET_STEPS} steps, < 1 step", header, shown)
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10, help="runs of each kind, alternating")
    parser.add_argument("--quick", action="store_true", help="2 repetitions")
    parser.add_argument("--op-ms", type=float, default=20.0, help="length of every emulated F, I and W")
    parser.add_argument("--steps", type=int, default=30, help="of a run")
    parser.add_argument("--limit-s", type=float, default=180.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 2
    return options


def measure(real: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Trains once with one worker lost and come back; returns the row, with ``error`` set if the run failed."""
    faults = [Fault.parse(f"kill:1.1@{_KILL_STEP}:backward"), Fault.parse(f"join:1.1@{_JOIN_STEP}")]
    job = _job(real, options)
    emulate = None if real else op_profile(_LAYERS, job.grid.stages, options.op_ms / 1000)
    return measured_run(job, _row, limit_s=options.limit_s, faults=faults, emulate=emulate)


def _job(real: bool, options: argparse.Namespace) -> Job:
    grid = (
        {"pipelines": 2, "stages": 2, "microbatches": 4} if real else {"pipelines": 3, "stages": 3, "microbatches": 6}
    )
    model = {"layers": _LAYERS - 2, "width": 128 if real else 8, "heads": 1, "context": 64 if real else 8, "dropout": 0}
    return parse_job(
        {
            "name": "joining",
            "model": {"kind": "gpt", **model},
            "data": {"kind": "text", "path": "stdlib"},
            "grid": grid,
            "train": {"steps": options.steps, "technique": "1f1b"},
            "resilience": {"strategy": "adaptive"},  # it is to come back to its place, to a grid that is as it was
        }
    )


def _row(summary: Summary) -> dict[str, Any]:
    timed = read_events(summary.run_dir / "events.jsonl")
    if summary.unfired:
        return {"error": f"not fired: {summary.unfired}"}
    asked = next(time for time, event in timed if isinstance(event, FaultInjected) and event.kind == "join")
    ready = max(time for time, event in timed if isinstance(event, WorkerReady) and event.worker == "1.1")
    useful = [
        (event.ops[0][3], event.step)
        for time, event in timed
        if isinstance(event, StepOps) and event.worker == "1.1" and event.ops and time > ready
    ]
    if not useful:
        return {"error": "the worker that came never computed; use more steps"}
    first_at, first_step = min(useful)
    commits = dict(summary.report.commits)
    under_way = min((step for step, time in commits.items() if time > ready), default=first_step)
    steps = step_lengths(summary)
    before = statistics.median(took for step, took in steps.items() if _KILL_STEP + 1 < step < under_way)
    entered = [time for time, event in timed if isinstance(event, Installed) and ready < time <= first_at]
    delay = max(took for step, took in steps.items() if under_way <= step <= first_step) - before
    return {
        "error": None,
        "start_s": ready - asked,
        "steps_to_useful": first_step - under_way,
        "ready_to_useful_s": first_at - ready,
        "survivors_delay_steps": delay / before,
        "generations": len(entered),
        "step_s": before,
    }


def _summary(compute: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if row["compute"] == compute and not row["error"]]
    return {"compute": compute, "runs": len(good), **{name: interval([row[name] for row in good]) for name in METRICS}}


if __name__ == "__main__":
    raise SystemExit(main())
