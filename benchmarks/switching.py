"""What going over to other pipelines holds training up for: the loss is re-routed at once, then layers are handed over.

Twelve workers as real processes whose compute is emulated by sleeps; one is killed in the middle of its backward
passes. Measured are the time from the moment at which the loss is known to the first operation of the next generation,
by how much the first step behind each of the two boundaries is longer than those that follow with the same plan, and
how many layers, and bytes of state, were copied.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from holdfast.config.load import parse_job
from holdfast.control.chain.opening import plans_in
from holdfast.core.faults import Fault
from holdfast.runtime.train import Summary
from holdfast.telemetry.events import Agreed, Detected, HandingOver, StepOps, Synced, read_events
from measure import Recorder, interval, print_table, progress
from measured_run import measured_run, op_profile, step_lengths

TARGET_S = 0.150
_LAYERS, _STAGES, _STEPS = 12, 4, 26


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    recorder = Recorder("switching", vars(options))
    for repetition in range(options.repetitions):
        for technique in options.techniques:
            recorder.begin()
            row = recorder.add(technique=technique, repetition=repetition, **_measure(technique, options))
            told = row["error"] or f"next operation {row['next_op_s'] * 1e3:.0f} ms after the loss was known"
            progress(f"{technique}, run {repetition + 1}/{options.repetitions}: {told}")
    summary = _summary(recorder.rows)
    _show(summary)
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--techniques", nargs="+", default=["1f1b", "decoupled"], help="of the planner")
    parser.add_argument("--op-ms", type=float, default=20.0, help="length of F, I and W of a worker")
    parser.add_argument("--repetitions", type=int, default=10, help="runs of each, alternating")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a run longer than this has failed")
    return parser.parse_args()


def _measure(technique: str, options: argparse.Namespace) -> dict[str, Any]:
    job = parse_job(
        {
            "name": "switching",
            "model": {"kind": "gpt", "layers": _LAYERS - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0},
            "data": {"kind": "text", "path": __file__},
            "grid": {"pipelines": 3, "stages": _STAGES, "microbatches": 6},
            "train": {"steps": _STEPS, "technique": technique},
            "resilience": {"strategy": "templates", "smallest_pipeline": 3},
        }
    )
    profile = op_profile(_LAYERS, _STAGES, options.op_ms / 1000)
    faults = [Fault.parse("kill:1.2@4:backward")]
    return measured_run(job, _row, limit_s=options.limit_s, faults=faults, emulate=profile)


def _row(summary: Summary) -> dict[str, Any]:
    events = list(read_events(summary.run_dir / "events.jsonl"))
    detected = [at for at, event in events if isinstance(event, Detected)]
    handing = [event.generation for _, event in events if isinstance(event, HandingOver)]
    steps = [event for _, event in events if isinstance(event, StepOps)]
    if summary.unfired or len(detected) != 1 or len(handing) != 1:
        return {"error": f"{len(detected)} losses, layers were handed over {len(handing)} times"}
    follows, rerouted = handing[0], handing[0] - 1
    agreed = next(at for at, event in events if isinstance(event, Agreed) and event.generation == rerouted)
    ran = (op[3] for event in steps if event.generation == rerouted for op in event.ops)
    began = min(at for at in ran if at > agreed)  # the step is gone on with, and has operations of before, too
    plan = plans_in(summary.run_dir / "control.db")[follows]
    return {
        "error": None,
        "next_op_s": began - detected[0],
        "extra_s": [_extra_s(summary, steps, generation) for generation in (follows, follows + 1)],
        "copied_bytes": sum(event.bytes for _, event in events if isinstance(event, Synced)),
        "copied_layers": sum(len(layers.indices) for _, layers in plan.placement.followed),
    }


def _extra_s(summary: Summary, steps: list[StepOps], generation: int) -> float | None:
    """How much longer the first step of a generation is than its later ones, or those before it if it has but one."""
    lengths = step_lengths(summary)
    of = {event.step: event.generation for event in steps}
    first, *later = sorted(step for step, ran_in in of.items() if ran_in == generation)
    same = later or [step for step, ran_in in of.items() if ran_in == generation - 1][1:]
    return lengths[first] - statistics.median(lengths[step] for step in same) if same else None


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for technique in sorted({row["technique"] for row in rows if not row["error"]}):
        of = [row for row in rows if row["technique"] == technique and not row["error"]]
        entry: dict[str, Any] = {"technique": technique, "next_op_s": interval([row["next_op_s"] for row in of])}
        for number, name in enumerate(("follow_extra_s", "switch_extra_s")):
            told = [row["extra_s"][number] for row in of if row["extra_s"][number] is not None]
            entry[name] = interval(told) if told else None
        entry["copied_layers"] = sorted({row["copied_layers"] for row in of})
        entry["copied_bytes"] = sorted({row["copied_bytes"] for row in of})
        found.append(entry)
    return found


def _show(summary: list[dict[str, Any]]) -> None:
    table = []
    for row in summary:
        shown = [
            row[name].show(1e3, 1) if row[name] else "-" for name in ("next_op_s", "follow_extra_s", "switch_extra_s")
        ]
        copied = "/".join(map(str, row["copied_layers"])), "/".join(map(str, row["copied_bytes"]))
        table.append([row["technique"], *shown, *copied])
    header = ["technique", "loss known to next operation, ms", "first boundary, ms", "second, ms", "layers", "bytes"]
    print_table(f"one of 12 workers is lost; target: next operation within {TARGET_S * 1e3:.0f} ms", header, table)


if __name__ == "__main__":
    raise SystemExit(main())
