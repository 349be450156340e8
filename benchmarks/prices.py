"""What a recovery is said to cost (`recovery/actions.py`) beside what it takes, with compute emulated by sleeps.

The rates of the machine (a message, a connection) are medians of runs on a smaller grid; then workers of larger grids
are killed at several points of a step, and each action is priced and measured.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Link, Profile
from holdfast.recovery.actions import Abort, InstallPlan, Recompute
from holdfast.recovery.rates import Rates, step_seconds
from holdfast.recovery.rules import JobRules
from holdfast.recovery.view import ClusterView
from holdfast.runtime.train import Summary
from holdfast.settings.planning import healthy_plan
from holdfast.strategies.adaptive import adaptive
from holdfast.telemetry.events import FaultInjected, StepOps, read_events
from measure import Recorder, interval, print_table, progress
from measured_run import measured_run, op_profile

_LAYERS = 12
_POINTS = (Point.START, Point.FORWARD, Point.BACKWARD)
_ACTIONS = (Abort, InstallPlan, Recompute)
_NO_TIME = Link(latency_s=0.0, bytes_per_s=1e18)
_KILL_STEP = 4
TARGET_SHARE, TARGET_S = 0.10, 0.020


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    recorder = Recorder("prices", vars(options))
    rates: dict[str, Rates] = {}
    cases = [(grid, stage, point) for grid in options.grids for stage, point in product(range(_stages(grid)), _POINTS)]
    for repetition in range(options.repetitions):
        calibration = [_measured(options.calibrate, 1, point, options) for point in _POINTS]
        for grid, stage, point in cases:
            rates[grid] = _rates(calibration, op_profile(_LAYERS, _stages(grid), options.op_ms / 1000))
            recorder.begin()
            found = _measured(grid, stage, point, options)
            row = recorder.add(grid=grid, stage=stage, point=point.value, repetition=repetition, **found)
            if not row["error"]:
                row.update(_told(row, rates[grid]))
            progress(f"{grid} stage {stage} {point.value}: {row['error'] or _brief(row)}")
    good = [row for row in recorder.rows if not row["error"]]
    header = ["action", "runs", "price s", "taken s", "off", "off by at most", "within 10 % or 20 ms"]
    table, summary = list[list[str]](), []
    for name in (*(action.__name__ for action in _ACTIONS), "together", "Step"):
        off = [row["taken"][name] - row["price"][name] for row in good]
        worst = max(off, key=abs)
        met = sum(_within(row, name) for row in good)
        off_by = interval(off)
        summary.append({"action": name, "off_s": off_by.to_json(), "worst_s": worst, "met": met, "of": len(good)})
        price, taken = (statistics.median(row[which][name] for row in good) for which in ("price", "taken"))
        times = [f"{price:.3f}", f"{taken:.3f}", f"{off_by.show(1000)} ms", f"{worst * 1e3:.1f} ms"]
        table.append([name, str(len(good)), *times, f"{met} of {len(good)}"])
    print_table("Prices, and what was taken", header, table)
    recorder.write(summary)
    return int(len(good) < len(recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["3x4", "2x3"], help="pipelines x stages")
    parser.add_argument("--calibrate", default="2x2", help="the grid that the machine's rates are measured on")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--op-ms", type=float, default=50.0, help="length of every emulated F, I and W")
    parser.add_argument("--microbatches", type=int, default=6, help="per pipeline")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 1
    return options


def _stages(grid: str) -> int:
    return int(grid.split("x")[1])


def _measured(grid: str, stage: int, point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """Trains once with one kill of a worker of the middle pipeline."""
    pipelines, stages = map(int, grid.split("x"))
    fault = Fault(kind=FaultKind.KILL, worker=WorkerId(pipelines // 2, stage), step=_KILL_STEP, point=point)
    tree = {
        "name": "prices",
        "model": {"kind": "gpt", "layers": _LAYERS - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0},
        "data": {"kind": "text", "path": __file__},
        "grid": {"pipelines": pipelines, "stages": stages, "microbatches": options.microbatches},
        "train": {"steps": _KILL_STEP + 2, "technique": "1f1b"},
        "resilience": {"step_log": False},  # what is left of a step depends on the very moment of the kill
    }
    job, profile = parse_job(tree), op_profile(_LAYERS, stages, options.op_ms / 1000)
    row = partial(_row, job, fault, profile)
    return measured_run(job, row, limit_s=options.limit_s, faults=[fault], emulate=profile)


def _row(job: Job, fault: Fault, profile: Profile, summary: Summary) -> dict[str, Any]:
    failures = summary.report.failures
    if summary.unfired or len(failures) != 1 or failures[0].resumed_s is None:
        return {"error": f"{len(failures)} failures instead of one; not fired: {summary.unfired}"}
    failure, commits = failures[0], dict(summary.report.commits)
    events = read_events(Path(summary.run_dir) / "events.jsonl")
    struck = next(at for at, event in events if isinstance(event, FaultInjected))
    ops = [op for _, event in events if isinstance(event, StepOps) and event.step == fault.step - 1 for op in event.ops]
    began, lengths = min(op[3] for op in ops), [commits[at] - commits[at - 1] for at in range(2, fault.step)]
    plan = healthy_plan(job, _LAYERS)
    step_s = statistics.median(lengths)
    assert fault.worker is not None
    view = ClusterView(
        rules=JobRules(steps=job.train.steps),
        baseline=plan,
        lost=frozenset([fault.worker]),
        plan=plan,
        step=fault.step,
    )
    view = replace(view, elapsed_s=struck + failure.detected_s - began - step_s)
    return {
        "error": None,
        "view": view,
        "plan": plan,
        "profile": profile,
        "taken": {
            Abort.__name__: failure.agreed_s - failure.detected_s,
            InstallPlan.__name__: failure.rebuilt_s - failure.agreed_s,
            Recompute.__name__: failure.resumed_s - failure.rebuilt_s,
            "together": failure.resumed_s - failure.detected_s,
            "Step": step_s,
        },
    }


def _rates(calibration: list[dict[str, Any]], profile: Profile) -> Rates:
    """Of this machine, as the smaller grid showed them; nothing is loaded, saved or started here."""
    good = [row for row in calibration if not row["error"]]
    blank = _blank(profile)

    def median(of: list[float]) -> float:
        return max(0.0, statistics.median(of))

    steps = [row["taken"]["Step"] - step_seconds(row["plan"], _blank(row["profile"])) for row in good]
    told = [row["taken"]["Abort"] - _prices(row["view"], _blank(row["profile"]))["Abort"] for row in good]
    connected = [row["taken"]["InstallPlan"] for row in good]
    return replace(blank, message_s=median(steps), control_s=median(told) / 2, connect_s=median(connected))


def _blank(profile: Profile) -> Rates:
    return Rates(
        profile=profile,
        message_s=0.0,
        control_s=0.0,
        connect_s=0.0,
        start_s=0.0,
        copy=_NO_TIME,
        load=_NO_TIME,
        save=_NO_TIME,
    )


def _prices(view: ClusterView, rates: Rates) -> dict[str, float]:
    """Those that are measured apart; the order that all send when they have stopped is told before they are agreed."""
    recovery = adaptive(view)
    found = {
        type(action).__name__: each.seconds
        for action, each in zip(recovery.actions, recovery.priced(view, rates), strict=True)
    }
    found["Abort"] += rates.control_s
    return found


def _told(row: dict[str, Any], rates: Rates) -> dict[str, Any]:
    prices, plan = _prices(row.pop("view"), rates), row.pop("plan")
    row.pop("profile")
    price = {action.__name__: prices[action.__name__] for action in _ACTIONS}
    healthy: Plan = plan
    return {"price": {**price, "together": sum(price.values()), "Step": step_seconds(healthy, rates)}}


def _within(row: dict[str, Any], name: str) -> bool:
    price, taken = row["price"][name], row["taken"][name]
    return bool(abs(taken - price) <= max(TARGET_S, TARGET_SHARE * taken))


def _brief(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {row['price'][name] * 1e3:.0f}/{row['taken'][name] * 1e3:.0f} ms" for name in row["taken"]
    )


if __name__ == "__main__":
    raise SystemExit(main())
