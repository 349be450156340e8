"""What a lost stage of a pipeline without replicas costs: everybody goes back to the checkpoint, or it is replayed.

As in SWIFT, section 7.1: a checkpoint at step 20, a failure in step 30. A worker is killed by its process id, by a
thread that knows nothing but the log of events; a spare takes its place. Compute is emulated, everything else is real.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from holdfast import Job, Summary
from holdfast.config.load import parse_job
from holdfast.core.evaluate import evaluate
from holdfast.core.ids import WorkerId
from holdfast.core.profile import costs_from_profile
from holdfast.planning.jobs import healthy_plan
from holdfast.telemetry.events import Agreed, Replaying, read_events
from measure import Recorder, interval, print_table, progress
from measured_run import op_profile
from remainder import Killer, struck

WAYS = ("checkpoint", "replay", "parallel")


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    recorder = Recorder("replays", vars(options))
    cells = list(product(options.microbatches, WAYS))
    for repetition in range(options.repetitions):
        for microbatches, way in cells:
            recorder.begin()
            found = measure(microbatches, way, options)
            row = recorder.add(microbatches=microbatches, way=way, repetition=repetition, **found)
            told = row["error"] or f"{row['recovery_s']:.2f} s to be back at step {options.kill_step}"
            progress(f"{microbatches} micro-batches, {way}: {told}")
    summary = [_summary(microbatches, options, recorder.rows) for microbatches in options.microbatches]
    _show(summary)
    recorder.write([_plain(row) for row in summary])
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[32, 16])
    parser.add_argument("--op-ms", type=float, default=5.0, help="length of every emulated F, I and W")
    parser.add_argument("--checkpoint-step", type=int, default=20)
    parser.add_argument("--kill-step", type=int, default=30)
    parser.add_argument("--stage", type=int, default=8, help="whose worker is killed")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=240.0, help="a run longer than this has failed")
    return parser.parse_args()


def measure(microbatches: int, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains once with one kill; returns the row, with ``error`` set and no numbers if the run failed."""
    job = _job(microbatches, way, options)
    profile = op_profile(options.stages, options.stages, options.op_ms / 1000)
    step_s = evaluate(healthy_plan(job, options.stages), costs_from_profile(profile)).makespan
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
        killer = Killer(
            run_dir=Path(folder) / "run",
            worker=WorkerId(0, options.stage),
            step=options.kill_step - 1,
            delay_s=step_s / 2,
            workers=options.stages,
        )
        summary = struck(job, profile, killer, options.limit_s)
        return {"error": summary} if isinstance(summary, str) else _row(summary, killer, way, step_s, options)


def _job(microbatches: int, way: str, options: argparse.Namespace) -> Job:
    tree = {
        "name": "replays",
        "model": {"kind": "gpt", "layers": options.stages - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0},
        "data": {"kind": "text", "path": __file__},
        "grid": {"pipelines": 1, "stages": options.stages, "microbatches": microbatches},
        "train": {"steps": options.kill_step + 2},
        "resilience": {"spares": 1},
        "checkpoint": {"every": options.checkpoint_step},
        "logging": {
            "use": "off" if way == "checkpoint" else "on",
            "helpers": options.stages - 1 if way == "parallel" else 0,
        },
    }
    return parse_job(tree)


def _row(summary: Summary, killer: Killer, way: str, step_s: float, options: argparse.Namespace) -> dict[str, Any]:
    events = read_events(killer.run_dir / "events.jsonl")
    agreed = [(at, event) for at, event in events if isinstance(event, Agreed) and event.generation > 1]
    replays = [event for _, event in events if isinstance(event, Replaying)]
    if killer.killed_at is None or len(agreed) != 1 or bool(replays) == (way == "checkpoint"):
        return {"error": f"{len(agreed)} agreement(s), {len(replays)} replay(s)"}
    commits = {step: at for step, at in summary.report.commits if at > killer.killed_at}
    first, (agreed_at, last) = options.checkpoint_step, agreed[0]
    expected = first if way == "checkpoint" else options.kill_step
    if last.step != expected:
        return {"error": f"all went on from step {last.step}, not from {expected}"}
    back_at = commits[options.kill_step - 1] if way == "checkpoint" else agreed_at
    return {
        "error": None,
        "planned_step_s": step_s,
        "recovery_s": back_at - killer.killed_at,
        "to_commit_s": commits[options.kill_step] - killer.killed_at,
        "weights_sha256": summary.weights_sha256,
    }


def _summary(microbatches: int, options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    fine = [row for row in rows if row["microbatches"] == microbatches and not row["error"]]
    times = {way: interval([row["recovery_s"] for row in fine if row["way"] == way]) for way in WAYS}
    base = times["checkpoint"].median
    bubbles = (options.stages - 1) / (microbatches + options.stages - 1)
    return {
        "microbatches": microbatches,
        "runs": len(fine),
        **{f"{way}_s": times[way] for way in WAYS},
        "bound": bubbles,
        **{f"{way}_saves": _saved(times[way].median, base) for way in WAYS[1:]},
        "same_weights": len({row["weights_sha256"] for row in fine}) == 1,
    }


def _saved(seconds: float | None, base: float | None) -> float | None:
    return None if seconds is None or not base else 1 - seconds / base


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_json() if hasattr(value, "to_json") else value for name, value in row.items()}


def _show(summary: list[dict[str, Any]]) -> None:
    header = ["micro-batches", *(f"{way}, s" for way in WAYS), "bubbles", "replay saves", "parallel saves", "same bits"]
    rows = [
        [
            str(row["microbatches"]),
            *(row[f"{way}_s"].show(1, 2) for way in WAYS),
            f"{row['bound']:.1%}",
            *("-" if row[f"{way}_saves"] is None else f"{row[f'{way}_saves']:.1%}" for way in WAYS[1:]),
            "yes" if row["same_weights"] else "NO",
        ]
        for row in summary
    ]
    print_table("seconds until all are back at the step of the failure: median and 95 % interval", header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
