"""Recovery time of Holdfast's adaptive strategy against three baselines in the same runtime.

SWIFT, section 7.1: "Recovery time is the duration from when the replacements of workers join the training job to the
time they recover to the pre-failure iteration." For the baselines this is from the moment when the last new process is
ready to the commit of the step before the interrupted one. ``adaptive`` waits for no replacement, so its time is
counted from the detection of the loss to the moment when all survivors are at the pre-failure iteration and connected;
that begins earlier than the definition says. ``snapshots`` (Elastic Horovod's) waits for none either: its time begins
in the same moment and ends with the commit of the step before the interrupted one. Apart from it, the whole way from
SIGKILL to the commit of the interrupted step is measured, which for the baselines that go back to checkpoints has the
start of a process in it.

Intervals are those of section 7.1 by five: a checkpoint every 20 steps (there 100) and every 6 (there 30, found by
CheckFreq's rule, for its checkpoints and for Elastic Horovod's snapshots alike); the kill is in step 29, so that 9 and
5 whole steps are lost (there 50 and 30). A fifth side uses the interval that CheckFreq's rule gives for this very job,
from a run in which stall, writing and step are measured; it is killed in the middle of an interval. Compute is emulated
by sleeps; all else is real.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.core.faults import Fault
from holdfast.core.profile import Profile
from holdfast.recovery.checkfreq import checkpoint_interval
from holdfast.runtime.train import Summary, train
from holdfast.telemetry.events import Agreed, Checkpointed, Event, Pinned, Rebuilt, WorkerReady, read_events
from measure import Interval, Recorder, interval, print_table, progress, ratio_interval, time_limit
from measured_run import measured_run, op_profile

ADAPTIVE, RESTART, CHECKFREQ, BY_RULE = "adaptive", "checkpoint-restart", "checkfreq", "checkfreq by its rule"
SNAPSHOTS = "snapshots"
IN_PLACE = (ADAPTIVE, SNAPSHOTS)
TARGETS = {RESTART: 98.9, CHECKFREQ: 98.1, SNAPSHOTS: 98.1, BY_RULE: None}
METRICS = ("recovery_s", "to_commit_s")
_LAYERS = 8
Timed = list[tuple[float, Event]]


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed."""
    options = _options()
    recorder = Recorder("baselines", vars(options))
    rule = _rule(options)
    progress(f"CheckFreq's rule: every {rule['every']} steps, from {rule}")
    sides = _sides(options, rule["every"])
    order = random.Random(0)
    for repetition in range(options.repetitions):
        for side in order.sample(list(sides), k=len(sides)):
            recorder.begin()
            row = recorder.add(side=side, repetition=repetition, **measure(side, *sides[side], options))
            progress(f"{side} run {repetition + 1}/{options.repetitions}: {_brief(row)}")
    summary = summarise(recorder.rows, rule)
    _show(summary)
    recorder.write(summary)
    return int(bool(summary["problems"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--grid", default="2x2", help="pipelines x stages")
    parser.add_argument("--microbatches", type=int, default=4, help="per pipeline")
    parser.add_argument("--op-ms", type=float, default=20.0, help="of each F, I and W")
    parser.add_argument("--every", type=int, default=20, help="steps between synchronous checkpoints")
    parser.add_argument("--checkfreq-every", type=int, default=6, help="steps between asynchronous checkpoints")
    parser.add_argument("--snapshot-every", type=int, default=6, help="steps between snapshots in memory")
    parser.add_argument("--kill-step", type=int, default=29, help="in which a worker is killed")
    parser.add_argument("--repetitions", type=int, default=10, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="1 repetition")
    parser.add_argument("--limit-s", type=float, default=300.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 1
    return options


def _sides(options: argparse.Namespace, by_rule: int) -> dict[str, tuple[int, int]]:
    """Per side the steps between checkpoints or snapshots, and the step in which a worker is killed."""
    kill = options.kill_step
    return {
        ADAPTIVE: (options.every, kill),
        RESTART: (options.every, kill),
        CHECKFREQ: (options.checkfreq_every, kill),
        SNAPSHOTS: (options.snapshot_every, kill),
        BY_RULE: (by_rule, kill - kill % by_rule + by_rule // 2),
    }


def _job(side: str, every: int, steps: int, options: argparse.Namespace) -> Job:
    pipelines, stages = map(int, options.grid.split("x"))
    return parse_job(
        {
            "name": "baselines",
            "model": {"kind": "gpt", "layers": _LAYERS - 2, "width": 64, "heads": 2, "context": 16, "dropout": 0},
            "data": {"kind": "text", "path": __file__},
            "grid": {"pipelines": pipelines, "stages": stages, "microbatches": options.microbatches},
            "train": {"steps": steps},
            "checkpoint": {"every": 0 if side == SNAPSHOTS else every, "synchronous": side == RESTART},
            "resilience": {
                "strategy": CHECKFREQ if side == BY_RULE else side,
                "wait_for_replacement": 0 if side in IN_PLACE else options.limit_s,
                "snapshot_every": every if side == SNAPSHOTS else 0,
            },
        }
    )


def _profile(options: argparse.Namespace) -> Profile:
    return op_profile(_LAYERS, int(options.grid.split("x")[1]), options.op_ms / 1000)


def _rule(options: argparse.Namespace) -> dict[str, Any]:
    """What CheckFreq's rule says, from a failure-free run with a checkpoint every 4 steps."""
    with tempfile.TemporaryDirectory(prefix="holdfast-baselines-") as directory, time_limit(options.limit_s):
        job = _job(CHECKFREQ, 4, 16, options)
        summary = train(job, run_dir=Path(directory) / "run", emulate=_profile(options))
        events = list(read_events(summary.run_dir / "events.jsonl"))
    pins = [(at, event) for at, event in events if isinstance(event, Pinned)]
    taken = sorted({event.step for _, event in pins} - {job.train.steps})
    begun = {step: min(at - event.seconds for at, event in pins if event.step == step) for step in taken}
    stalls = [max(event.seconds for _, event in pins if event.step == step) for step in taken]
    writes = [at - begun[e.step] for at, e in events if isinstance(e, Checkpointed) and e.step in begun]
    lengths = [b - a for (_, a), (step, b) in pairwise(summary.report.commits) if step not in taken]
    found = {name: statistics.median(each) for name, each in _named(stalls, writes, lengths)}
    return {**found, "every": checkpoint_interval(**found)}


def _named(stalls: list[float], writes: list[float], steps: list[float]) -> list[tuple[str, list[float]]]:
    return [("stall_s", stalls), ("write_s", writes), ("step_s", steps)]


def measure(side: str, every: int, kill_step: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains once with one kill; returns the row, with ``error`` set and no numbers if the run failed."""
    fault = Fault.parse(f"kill:{int(options.grid[0]) // 2}.1@{kill_step}:backward")
    job = _job(side, every, kill_step + 2, options)
    row = partial(_row, side, every, fault)
    return measured_run(job, row, limit_s=options.limit_s, faults=[fault], emulate=_profile(options))


def _row(side: str, every: int, fault: Fault, summary: Summary) -> dict[str, Any]:
    known = {"every": every, "killed": str(fault)}
    failures, commits = summary.report.failures, dict(summary.report.commits)
    if summary.unfired or len(failures) != 1:
        return {**known, "error": f"{len(failures)} failures instead of one; not fired: {summary.unfired}"}
    events: Timed = list(read_events(summary.run_dir / "events.jsonl"))
    agreed_at, agreed = [(at, event) for at, event in events if isinstance(event, Agreed)][-1]
    detected_s, agreed_s = failures[0].detected_s, failures[0].agreed_s
    if detected_s is None or agreed_s is None:
        return {**known, "error": "the times of the failure are not known"}
    killed_at = agreed_at - agreed_s
    rebuilt_at = next(at for at, event in events if event == Rebuilt(generation=agreed.generation))
    ready_at = [at for at, event in events if isinstance(event, WorkerReady)][-1]
    lost = fault.step - agreed.step
    begin = killed_at + detected_s if side in IN_PLACE else ready_at
    end = commits[fault.step - 1] if lost else max(rebuilt_at, agreed_at)
    return {
        **known,
        "error": None,
        "lost_steps": lost,
        "recovery_s": end - begin,
        "to_commit_s": commits[fault.step] - killed_at,
    }


def summarise(rows: list[dict[str, Any]], rule: dict[str, Any]) -> dict[str, Any]:
    """Returns medians with intervals, by how much less ``adaptive`` takes, and whatever went wrong."""
    good = {(row["side"], row["repetition"]): row for row in rows if not row["error"]}
    sides = list(dict.fromkeys(row["side"] for row in rows))
    return {
        "problems": [f"{row['side']} {row['repetition']}: {row['error']}" for row in rows if row["error"]],
        "rule": rule,
        "sides": {side: _side([row for (name, _), row in good.items() if name == side]) for side in sides},
        "less_percent": {side: _less(good, side) for side in TARGETS if side in sides},
    }


def _side(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "every": sorted({row["every"] for row in rows}),
        "lost_steps": sorted({row["lost_steps"] for row in rows}),
        **{metric: interval([row[metric] for row in rows]).to_json() for metric in METRICS},
    }


def _less(good: dict[tuple[str, int], dict[str, Any]], side: str) -> dict[str, Any]:
    """By how many percent less time ``adaptive`` takes than ``side``, over the repetitions that both have."""
    both = [n for name, n in good if name == side and (ADAPTIVE, n) in good]
    found: dict[str, Any] = {"target": TARGETS[side]}
    for metric in METRICS:
        ratio = ratio_interval([(good[ADAPTIVE, n][metric], good[side, n][metric]) for n in both])
        found[metric] = _complement(ratio).to_json()
    return found


def _complement(ratio: Interval) -> Interval:
    """100 x (1 - ratio); the ends of the interval change places."""
    if ratio.median is None or ratio.low is None or ratio.high is None:
        return ratio
    median, low, high = (100 * (1 - each) for each in (ratio.median, ratio.high, ratio.low))
    return Interval(median=median, low=low, high=high, count=ratio.count)


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    return f"recovery {row['recovery_s']:.3f} s, to commit {row['to_commit_s']:.3f} s, {row['lost_steps']} steps lost"


def _show(summary: dict[str, Any]) -> None:
    header = ["side", "every", "whole steps lost", "recovery time (SWIFT 7.1)", "SIGKILL to commit"]
    rows = [
        [side, _plain(found["every"]), _plain(found["lost_steps"]), *(_shown(found[m], 1000, 0) for m in METRICS)]
        for side, found in summary["sides"].items()
    ]
    print_table("ms: median [95 % interval]", header, rows)
    less = [
        [side, *(_shown(found[m], 1, 2) for m in METRICS), str(found["target"] or "-"), _verdict(found)]
        for side, found in summary["less_percent"].items()
    ]
    header = ["against", "recovery time", "SIGKILL to commit", "target of recovery time", "verdict"]
    print_table("adaptive takes so many % less", header, less)
    for problem in summary["problems"]:
        print(f"PROBLEM {problem}")


def _plain(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _shown(found: dict[str, Any], unit: float, digits: int) -> str:
    return Interval(**found).show(unit, digits)


def _verdict(found: dict[str, Any]) -> str:
    """What the interval says about the target, as in the other benchmarks."""
    low, high, target = found["recovery_s"]["low"], found["recovery_s"]["high"], found["target"]
    if target is None or low is None or high is None:
        return "-"
    return "met" if low >= target else "MISSED" if high < target else "within noise"


if __name__ == "__main__":
    raise SystemExit(main())
