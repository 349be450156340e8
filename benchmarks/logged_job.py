"""What logging costs a healthy job: whole runs with ``logging.use`` on and off, by turns.

One pipeline without replicas, each worker on a node of its own, so that all that crosses boundaries is logged. Real
compute, no checkpoint within the steps that are timed. All runs must end in the same bits. Where workers have cores of
their own, what a thread writes in bubbles costs training nothing; on fewer cores than workers, wall time is processor
time, and there are no bubbles.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.errors import HoldfastError
from holdfast.runtime.node.signals import Interrupted
from measure import Recorder, interval, print_table, progress, ratio_interval, time_limit, verdict
from measured_run import CpuWindow, step_lengths, watched_run
from memory import handed_on_bytes

SIDES = ("off", "on")
MEASURES = {"step_s": "wall", "cpu_s": "processor, workers", "control_cpu_s": "processor, all else"}
TARGET = 1.01


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed, or they did not end in the same bits."""
    options = _options()
    recorder, order = Recorder("logged_job", vars(options)), random.Random(0)
    for repetition in range(options.repetitions):
        for side in order.sample(SIDES, k=len(SIDES)):
            recorder.begin()
            row = recorder.add(side=side, repetition=repetition, **measure(side, options))
            progress(f"run {repetition + 1}/{options.repetitions} {side}: {_brief(row)}")
    summary = summarise(recorder.rows, sum(handed_on_bytes(_job("on", options)).values()))
    _show(summary)
    recorder.write(summary)
    return int(bool(summary["problems"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--stages", type=int, default=3, help="of the one pipeline")
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--microbatch-size", type=int, default=4, help="samples")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--width", type=int, default=192, help="of the residual stream")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--when", default="idle", help="logging.when: idle, at-once or before-sending")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=25, help="steps that are timed in a run")
    parser.add_argument("--repetitions", type=int, default=10, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="2 repetitions of 6 steps")
    parser.add_argument("--limit-s", type=float, default=300.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.steps = 2, 6
    return options


def _job(side: str, options: argparse.Namespace) -> Job:
    steps = options.warmup + options.steps + 1
    return parse_job(
        {
            "name": "logged-job",
            "model": {
                "kind": "gpt",
                "layers": options.layers,
                "width": options.width,
                "heads": 4,
                "context": options.context,
                "dropout": 0,
            },
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {
                "pipelines": 1,
                "stages": options.stages,
                "microbatches": options.microbatches,
                "microbatch_size": options.microbatch_size,
            },
            "optimizer": {"kind": "adamw", "lr": 3e-4},
            "train": {"steps": steps},
            "checkpoint": {"every": steps + 1},
            "logging": {"use": side, "when": options.when},
        }
    )


def measure(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one side once; returns the row, with ``error`` set and no numbers if the run failed."""
    window = CpuWindow(first=options.warmup - 1, last=options.warmup + options.steps - 1)
    try:
        with time_limit(options.limit_s):
            summary, _ = watched_run(_job(side, options), window)
        workers, others = window.per_step()
    except (HoldfastError, Interrupted, TimeoutError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    lengths = [seconds for step, seconds in step_lengths(summary).items() if window.first < step <= window.last]
    return {
        "error": None,
        "step_s": statistics.mean(lengths),
        "median_step_s": statistics.median(lengths),
        "cpu_s": workers,
        "control_cpu_s": others,
        "weights_sha256": summary.weights_sha256,
    }


def summarise(rows: list[dict[str, Any]], logged: int) -> dict[str, Any]:
    """Returns medians, ratios of pairs and bytes, and whatever went wrong.

    ``logged``: bytes that all workers together log in a step, without sums and verdicts, which are small beside it.
    """
    good = {
        side: {row["repetition"]: row for row in rows if row["side"] == side and not row["error"]} for side in SIDES
    }
    problems = [f"{row['side']} {row['repetition']}: {row['error']}" for row in rows if row["error"]]
    if len({row["weights_sha256"] for found in good.values() for row in found.values()}) > 1:
        problems.append("the runs ended in different bits")
    both = sorted(good["on"].keys() & good["off"].keys())
    return {
        "problems": problems,
        "logged_bytes_per_step": logged,
        "sides": {
            side: {name: interval([row[name] for row in found.values()]) for name in MEASURES}
            for side, found in good.items()
        },
        "ratios": {
            name: ratio_interval([(good["on"][each][name], good["off"][each][name]) for each in both])
            for name in MEASURES
        },
    }


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    return f"step {1000 * row['step_s']:.1f} ms, processor {1000 * row['cpu_s']:.1f} ms"


def _show(summary: dict[str, Any]) -> None:
    sides = [[side, *(found[name].show(1000, 1) for name in MEASURES)] for side, found in summary["sides"].items()]
    print_table("ms per step: median [95 % interval]", ["logging", *MEASURES.values()], sides)
    ratios = [[MEASURES[name], found.show(1, 3), verdict(found, TARGET)] for name, found in summary["ratios"].items()]
    print_table("on / off", ["time", "ratio", f"<= {TARGET}"], ratios)
    print(f"{summary['logged_bytes_per_step'] / 1e6:.2f} MB cross boundaries in a step")
    for problem in summary["problems"]:
        print(f"PROBLEM {problem}")


if __name__ == "__main__":
    raise SystemExit(main())
