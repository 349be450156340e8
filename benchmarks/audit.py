"""What a standing audit costs a healthy step: every N-th step with one, next to steps without, run by turns.

Two measures: the mean of all steps with N against that without, as only one in N is another; and within the
audited runs, the steps that have a sample against those that have none.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.errors import HoldfastError
from holdfast.recovery.audit import audits_weights, sample
from holdfast.runtime.train import train
from holdfast.settings.rules import sampling_of
from measure import Recorder, interval, print_table, progress, ratio_interval, time_limit

SIDES = ("without", "audited")


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed, or the two did not end in the same bits."""
    options = _options()
    recorder, order = Recorder("audit", vars(options)), random.Random(0)
    for repetition in range(options.repetitions):
        for side in order.sample(SIDES, k=len(SIDES)):
            recorder.begin()
            recorder.add(side=side, repetition=repetition, **measure(side, options))
        progress(f"run {repetition + 1}/{options.repetitions}")
    summary = summarise(recorder.rows)
    print_table(
        "A step with audits", ["measure", "ms", "against none [95 %]"], [_line(row) for row in summary["measures"]]
    )
    recorder.write(summary)
    return int(bool(summary["problems"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--every", type=int, default=10, help="N: one step of so many is audited")
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks")
    parser.add_argument("--width", type=int, default=128, help="of the residual stream")
    parser.add_argument("--steps", type=int, default=40, help="steps that are timed in a run, behind one block of N")
    parser.add_argument("--repetitions", type=int, default=8, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="2 repetitions of 20 steps")
    parser.add_argument("--limit-s", type=float, default=600.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.steps = 2, 20
    return options


def _job(side: str, options: argparse.Namespace) -> Job:
    model = {"kind": "gpt", "layers": options.layers, "width": options.width, "heads": 4, "context": 128, "dropout": 0}
    return parse_job(
        {
            "name": "audit",
            "model": model,
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {"pipelines": 2, "stages": 2, "microbatches": 6, "microbatch_size": 4},
            "optimizer": {"kind": "adamw", "lr": 3e-4},
            "train": {
                "steps": options.every + options.steps + 1,
                "audit_every": options.every if side == "audited" else 0,
            },
        }
    )


def measure(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one side once; returns the row, with ``error`` set and no numbers if the run failed."""
    job = _job(side, options)
    try:
        with time_limit(options.limit_s), tempfile.TemporaryDirectory(prefix="holdfast-audit-") as folder:
            summary = train(job, run_dir=Path(folder) / "run")
    except (HoldfastError, TimeoutError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    ends = [time for _, time in summary.report.commits]
    steps = {step: after - before for step, (before, after) in enumerate(pairwise(ends), start=1)}
    timed = {step: seconds for step, seconds in steps.items() if options.every <= step < options.every + options.steps}
    busy = {step for step in timed if _is_audited(job, step, options)}
    return {
        "error": None,
        "digest": summary.weights_sha256,
        "mean_s": statistics.mean(timed.values()),
        "median_s": statistics.median(timed.values()),
        "audited_s": statistics.median([timed[step] for step in busy]) if busy else None,
    }


def _is_audited(job: Job, step: int, options: argparse.Namespace) -> bool:
    """Whether there is a sample in a step, or weights are compared before it."""
    sampling = sampling_of(job)
    if sampling is None:
        return False
    layers = options.layers + 2  # with embedding and head
    sampled = sample(job.train.seed, step, sampling.every, layers, job.global_microbatches) is not None
    return sampled or audits_weights(step - 1, options.every)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians and ratios, and whatever went wrong."""
    problems = [f"{row['side']} {row['repetition']}: {row['error']}" for row in rows if row["error"]]
    good = [row for row in rows if not row["error"]]
    if len({row["digest"] for row in good}) > 1:
        problems.append("the sides ended in different bits")
    sides = {side: {row["repetition"]: row for row in good if row["side"] == side} for side in SIDES}
    both = [
        (sides["audited"][each], sides["without"][each]) for each in sides["audited"].keys() & sides["without"].keys()
    ]
    measures = [
        _compared("mean of all steps", [(audited["mean_s"], plain["mean_s"]) for audited, plain in both]),
        _compared("step with an audit", [(audited["audited_s"], plain["median_s"]) for audited, plain in both]),
    ]
    return {"problems": problems, "measures": measures}


def _compared(measure: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    times = interval([audited for audited, _ in pairs])
    return {"measure": measure, "seconds": times.to_json(), "ratio": ratio_interval(pairs).to_json()}


def _line(row: dict[str, Any]) -> list[str]:
    ratio = row["ratio"]
    shown = f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return [row["measure"], f"{1000 * row['seconds']['median']:.1f}", shown]


if __name__ == "__main__":
    raise SystemExit(main())
