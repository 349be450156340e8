"""What an asynchronous checkpoint costs the step in which it is taken.

The same job with and without checkpoints, runs alternating. Compared are the same steps of both: those before which a
checkpoint is pinned, and the ones after them, in which it is still being written. The stall itself, the time for which
a worker's training waits for its copies, is measured in every worker, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.runtime.train import Summary
from holdfast.storage.blobs import LocalStore
from holdfast.telemetry.events import Pinned, read_events
from measure import Interval, Recorder, interval, print_table, progress, ratio_interval
from measured_run import measured_run, step_lengths

SIDES = ("without", "with")
TARGET = 0.02


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed or made other checkpoints than were asked for."""
    options = _options()
    recorder = Recorder("checkpoint_stall", vars(options))
    order = random.Random(0)
    for repetition in range(options.repetitions):
        for side in order.sample(SIDES, k=len(SIDES)):
            recorder.begin()
            row = recorder.add(side=side, repetition=repetition, **measure(side, options))
            progress(f"run {repetition + 1}/{options.repetitions} {side}: {_brief(row)}")
    summary = summarise(recorder.rows)
    _show(summary)
    recorder.write(summary)
    return int(bool(summary["problems"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--grid", default="2x2", help="pipelines x stages")
    parser.add_argument("--microbatches", type=int, default=6, help="per pipeline")
    parser.add_argument("--microbatch-size", type=int, default=4, help="samples")
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks")
    parser.add_argument("--width", type=int, default=128, help="of the residual stream")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints, at least 3")
    parser.add_argument("--checkpoints", type=int, default=4, help="checkpoints of a run")
    parser.add_argument("--repetitions", type=int, default=10, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="2 repetitions of 2 checkpoints")
    parser.add_argument("--limit-s", type=float, default=600.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.checkpoints = 2, 2
    return options


def _job(side: str, options: argparse.Namespace) -> Job:
    pipelines, stages = map(int, options.grid.split("x"))
    model = {"kind": "gpt", "layers": options.layers, "width": options.width, "dropout": 0}
    grid = {"pipelines": pipelines, "stages": stages, "microbatches": options.microbatches}
    return parse_job(
        {
            "name": "checkpoint-stall",
            "model": model,
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {**grid, "microbatch_size": options.microbatch_size},
            "optimizer": {"kind": "adamw"},
            "train": {"steps": options.every * options.checkpoints + options.every - 1},
            "checkpoint": {"every": options.every if side == "with" else 0},
        }
    )


def measure(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one side once; returns the row, with ``error`` set and no numbers if the run failed."""
    return measured_run(_job(side, options), partial(_row, side, options), limit_s=options.limit_s)


def _row(side: str, options: argparse.Namespace, summary: Summary) -> dict[str, Any]:
    taken = [options.every * (number + 1) for number in range(options.checkpoints)]
    expected = tuple(taken) if side == "with" else ()
    if summary.report.checkpoints != expected:
        return {"error": f"checkpoints of steps {summary.report.checkpoints}, expected {expected}"}
    lengths = step_lengths(summary)
    return {
        "error": None,
        "taken_s": statistics.median(lengths[step] for step in taken),
        "after_s": statistics.median(lengths[step + 1] for step in taken),
        "stall_s": _stall_s(summary) if side == "with" else None,
        "bytes": _size(summary.run_dir / "checkpoints", taken[-1]),
        "steps_s": lengths,
    }


def _stall_s(summary: Summary) -> float:
    """The median over the checkpoints of the longest wait of any worker."""
    longest: dict[int, float] = {}
    for _, event in read_events(summary.run_dir / "events.jsonl"):
        if isinstance(event, Pinned):
            longest[event.step] = max(event.seconds, longest.get(event.step, 0.0))
    return statistics.median(longest.values())


def _size(folder: Path, step: int) -> int:
    """Bytes of one checkpoint."""
    names = [name for name in LocalStore(folder).list() if f"{step:08d}" in name]
    return sum((folder / name).stat().st_size for name in names)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians and ratios with intervals, and whatever went wrong."""
    good = {
        side: {row["repetition"]: row for row in rows if row["side"] == side and not row["error"]} for side in SIDES
    }
    both = sorted(good["with"].keys() & good["without"].keys())
    without = {n: good["without"][n]["taken_s"] for n in both}
    return {
        "problems": [f"{row['side']} {row['repetition']}: {row['error']}" for row in rows if row["error"]],
        "bytes": max((row["bytes"] for row in good["with"].values()), default=0),
        "step_s": {
            side: {
                name: interval([row[name] for row in good[side].values()]).to_json() for name in ("taken_s", "after_s")
            }
            for side in SIDES
        },
        "stall_s": interval([good["with"][n]["stall_s"] for n in both]).to_json(),
        "ratios": {
            "stall / step": _judged(ratio_interval([(good["with"][n]["stall_s"], without[n]) for n in both]), TARGET),
            "step taken, with / without": _judged(_ratio(good, both, "taken_s"), 1 + TARGET),
            "step after, with / without": _judged(_ratio(good, both, "after_s"), None),
        },
    }


def _ratio(good: dict[str, dict[int, dict[str, Any]]], both: list[int], name: str) -> Interval:
    return ratio_interval([(good["with"][n][name], good["without"][n][name]) for n in both])


def _judged(found: Interval, target: float | None) -> dict[str, Any]:
    """A ratio, and what its interval says about the target."""
    verdict = "-"
    if target is not None and found.low is not None and found.high is not None:
        verdict = "met" if found.high <= target else "MISSED" if found.low > target else "within noise"
    return {"target": target, "verdict": verdict, **found.to_json()}


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    stall = "" if row["stall_s"] is None else f", stall {1000 * row['stall_s']:.1f} ms"
    return f"step taken {row['taken_s']:.3f} s, after {row['after_s']:.3f} s{stall}"


def _show(summary: dict[str, Any]) -> None:
    steps = [
        [side, *(_interval(found[name]).show(1000, 0) for name in ("taken_s", "after_s"))]
        for side, found in summary["step_s"].items()
    ]
    print_table("ms per step: median [95 % interval]", ["checkpoints", "step in which taken", "step after"], steps)
    ratios = [
        [name, _interval(found).show(1, 4), str(found["target"] or "-"), found["verdict"]]
        for name, found in summary["ratios"].items()
    ]
    print_table("Ratios of medians", ["ratio", "[95 %]", "target", "verdict"], ratios)
    stall = _interval(summary["stall_s"]).show(1000, 2)
    print(f"\nstall of the slowest worker: {stall} ms; one checkpoint: {summary['bytes'] / 2**20:.1f} MiB")
    for problem in summary["problems"]:
        print(f"PROBLEM {problem}")


def _interval(found: dict[str, Any]) -> Interval:
    return Interval(**{key: found[key] for key in ("median", "low", "high", "count")})


if __name__ == "__main__":
    raise SystemExit(main())
