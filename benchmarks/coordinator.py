"""How long everyone takes to come back to a coordinator that was killed and started again.

A job with emulated compute runs; its coordinator is killed in the middle of it. Training is not interrupted, so the
numbers are of the control side alone.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from holdfast.config.load import parse_job
from holdfast.core.faults import Fault
from holdfast.runtime.train import train
from holdfast.telemetry.events import CoordinatorLost, CoordinatorReady, Reattached, StepOps, read_events
from measure import Recorder, interval, print_table, progress, time_limit
from measured_run import op_profile

TARGET_S = 0.5
METRICS = ("restarted_s", "reattached_s")
_LAYERS = 12


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed to be adopted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["2x2", "3x4"], help="pipelines x stages")
    parser.add_argument("--repetitions", type=int, default=10, help="runs per grid, alternating between grids")
    parser.add_argument("--op-ms", type=float, default=20.0, help="length of every emulated F, I and W")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a run longer than this has failed")
    options = parser.parse_args()
    recorder = Recorder("coordinator", vars(options))
    for repetition in range(options.repetitions):
        for grid in options.grids:
            recorder.begin()
            row = recorder.add(grid=grid, repetition=repetition, **measure(grid, options))
            progress(f"{grid} run {repetition + 1}/{options.repetitions}: {row}")
    summary = [_summary(grid, recorder.rows) for grid in options.grids]
    _show(summary)
    recorder.write([{**row, **{name: row[name].to_json() for name in METRICS}} for row in summary])
    return int(not all(row["adopted"] for row in recorder.rows))


def measure(grid: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run, with one death of the coordinator."""
    pipelines, stages = map(int, grid.split("x"))
    tree = {
        "model": {"kind": "gpt", "layers": _LAYERS - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0},
        "data": {"kind": "text", "path": __file__},
        "grid": {"pipelines": pipelines, "stages": stages, "microbatches": 6},
        "train": {"steps": 6},
    }
    profile = op_profile(_LAYERS, stages, options.op_ms / 1000)
    with tempfile.TemporaryDirectory(prefix="holdfast-coordinator-") as folder, time_limit(options.limit_s):
        run_dir = Path(folder) / "run"
        train(parse_job(tree), run_dir=run_dir, faults=[Fault.parse("kill-coordinator@2")], emulate=profile)
        return _row(read_events(run_dir / "events.jsonl"))


def _row(events: list[tuple[float, Any]]) -> dict[str, Any]:
    lost = next(time for time, event in events if isinstance(event, CoordinatorLost))
    ready = [time for time, event in events if isinstance(event, CoordinatorReady)][-1]
    back, reattached = next((time, event) for time, event in events if isinstance(event, Reattached))
    steps = {event.step for time, event in events if isinstance(event, StepOps) and lost < time < back}
    return {
        "restarted_s": ready - lost,
        "reattached_s": back - ready,
        "adopted": reattached.adopted,
        "steps_meanwhile": len(steps),
    }


def _summary(grid: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [row for row in rows if row["grid"] == grid]
    found = {name: interval([row[name] for row in mine]) for name in METRICS}
    median = found["reattached_s"].median
    return {"grid": grid, "runs": len(mine), "target_met": median is not None and median < TARGET_S, **found}


def _show(summary: list[dict[str, Any]]) -> None:
    header = ["grid", "runs", "death seen to ready again", "ready to all back", "< 500 ms"]
    rows = [
        [
            row["grid"],
            str(row["runs"]),
            row["restarted_s"].show(1000),
            row["reattached_s"].show(1000),
            "yes" if row["target_met"] else "NO",
        ]
        for row in summary
    ]
    print_table("the coordinator comes back, milliseconds (median [95 % interval])", header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
