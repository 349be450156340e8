"""Real training with the planner's schedules against 1F1B: are steps as much faster as the evaluator predicts?

Two stages on two cores, a transformer, nothing emulated. The job is profiled first; the plans of ``decoupled`` and
``staggered`` are made from that profile, and it predicts the steps of all three. Runs of the techniques take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.config.profiles import save_profile
from holdfast.control.chain.opening import plans_in
from holdfast.core.profile import Profile, costs_from_profile
from holdfast.profiling.profiler import measure_profile
from holdfast.runtime.train import Summary
from holdfast.schedule.evaluate import steady_period
from measure import Recorder, interval, print_table, progress, ratio_interval
from measured_run import measured_run, step_lengths

TECHNIQUES = ("1f1b", "decoupled", "staggered")
TARGET = 0.05  # how far the measured ratio to 1F1B may be from the predicted one
_STEADY = 5


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed or a ratio is off."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
        path = Path(folder) / "profile.json"
        profile = measure_profile(_job("1f1b", None, options), iterations=options.iterations)
        save_profile(profile, path)
        progress(f"profiled {len(profile.layers)} layers")
        recorder = Recorder("planned_step", vars(options))
        for repetition in range(options.repetitions):
            for technique in TECHNIQUES:
                recorder.begin()
                job = _job(technique, path, options)
                found = measured_run(job, partial(_row, technique, profile), limit_s=options.limit_s)
                row = recorder.add(technique=technique, repetition=repetition, **found)
                progress(f"{technique}, run {repetition + 1}/{options.repetitions}: {_brief(row)}")
    summary = [_summary(technique, recorder.rows) for technique in TECHNIQUES]
    _show(summary)
    recorder.write({"techniques": summary, "target": TARGET})
    return int(any(row["error"] for row in recorder.rows) or any(abs(each["off"] or 0) > TARGET for each in summary))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10, help="runs per technique, taking turns")
    parser.add_argument("--steps", type=int, default=20, help="of every run")
    parser.add_argument("--microbatches", type=int, default=4, help="of every step")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the transformer")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--iterations", type=int, default=30, help="of the profiler")
    parser.add_argument("--quick", action="store_true", help="one run of 10 steps per technique")
    parser.add_argument("--limit-s", type=float, default=180.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.steps, options.iterations = 1, 10, 5
    return options


def _job(technique: str, profile: Path | None, options: argparse.Namespace) -> Job:
    model = {"kind": "gpt", "layers": options.layers, "width": options.width, "heads": 4, "context": 64, "dropout": 0}
    planned = {} if technique == "1f1b" else {"profile": str(profile)}
    return parse_job(
        {
            "name": f"planned-step-{technique}",
            "model": model,
            "data": {"kind": "text", "path": __file__},
            "grid": {"pipelines": 1, "stages": 2, "microbatches": options.microbatches, "microbatch_size": 8},
            "train": {"steps": options.steps, "technique": technique, "numerics": "fast", **planned},
        }
    )


def _row(technique: str, profile: Profile, summary: Summary) -> dict[str, Any]:
    (plan,) = plans_in(summary.run_dir / "control.db").values()
    steps = [took for step, took in step_lengths(summary).items() if step > _STEADY]
    return {
        "error": None,
        "planned_s": steady_period(plan, costs_from_profile(profile), staggered=technique == "staggered"),
        "period_s": statistics.median(steps),
        "stages": [str(layers) for _, layers in plan.placement.ranges],
        "weights_sha256": summary.weights_sha256,
    }


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    return f"{row['period_s'] * 1e3:.0f} ms a step, planned {row['planned_s'] * 1e3:.0f}"


def _summary(technique: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A technique's runs, against those of 1F1B beside them: how many times as fast, measured and predicted."""
    good = [row for row in rows if not row["error"]]
    own = {row["repetition"]: row for row in good if row["technique"] == technique}
    base = {row["repetition"]: row for row in good if row["technique"] == "1f1b"}
    both = sorted(own.keys() & base.keys())
    measured = ratio_interval([(base[at]["period_s"], own[at]["period_s"]) for at in both])
    predicted = base[both[0]]["planned_s"] / own[both[0]]["planned_s"] if both else None
    off = None if measured.median is None or predicted is None else measured.median / predicted - 1
    return {
        "technique": technique,
        "stages": own[both[0]]["stages"] if both else None,
        "period_s": interval([row["period_s"] for row in own.values()]),
        "planned_s": own[both[0]]["planned_s"] if both else None,
        "faster": measured,
        "predicted": predicted,
        "off": off,
    }


def _show(summary: list[dict[str, Any]]) -> None:
    print_table(
        f"real training on two stages; target: as many times as fast as 1F1B as predicted, within {TARGET:.0%}",
        ["technique", "stages", "step ms", "planned ms", "x as fast as 1F1B", "predicted", "off %"],
        [
            [
                row["technique"],
                " ".join(row["stages"] or ["-"]),
                row["period_s"].show(1e3, 0),
                "-" if row["planned_s"] is None else f"{row['planned_s'] * 1e3:.0f}",
                row["faster"].show(1, 3),
                "-" if row["predicted"] is None else f"{row['predicted']:.3f}",
                "-" if row["off"] is None else f"{row['off'] * 100:+.1f}",
            ]
            for row in summary
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
