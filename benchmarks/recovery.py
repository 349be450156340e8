"""From SIGKILL to the next committed step, on grids of 4, 12 and 24 workers, with compute emulated by sleeps.

Everything but the compute is real: processes, sockets, coordinator, agreement, rebuilding, executor. A worker in the
middle of its pipeline is killed half-way through its backward operations.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.core.profile import Profile, costs_from_profile
from holdfast.runtime.train import Summary
from holdfast.schedule.builders import adaptive_plan
from holdfast.schedule.evaluate import evaluate
from holdfast.settings.planning import healthy_plan
from holdfast.telemetry.events import StepOps, read_events
from holdfast.telemetry.report import FailureReport
from measure import Interval, Recorder, interval, print_table, progress
from measured_run import measured_run, op_profile

TARGET_S = 0.100
PHASES = ("detect_s", "agree_s", "rebuild_s", "redo_s")
METRICS = ("detected_s", "agreed_s", "rebuilt_s", "overhead_s", "healthy_excess_s", "rerouted_excess_s")
_LAYERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Pipelines x stages, and what carries bodies between them (``control.carrier``)."""

    pipelines: int
    stages: int
    carrier: str = "links"

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Reads ``3x4``."""
        pipelines, stages = map(int, text.split("x"))
        return cls(pipelines=pipelines, stages=stages)

    def __str__(self) -> str:
        return f"{self.pipelines}x{self.stages}" + (f" {self.carrier}" if self.carrier != "links" else "")

    @property
    def victim(self) -> WorkerId:
        """The middle stage of the middle pipeline."""
        return WorkerId(self.pipelines // 2, self.stages // 2)


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    grids = [replace(Grid.parse(text), carrier=each) for text in options.grids for each in options.carriers]
    recorder = Recorder("recovery", vars(options))
    for repetition in range(options.repetitions):
        for grid in grids:
            recorder.begin()
            row = recorder.add(grid=str(grid), repetition=repetition, **measure(grid, options))
            progress(f"{grid} run {repetition + 1}/{options.repetitions}: {_brief(row)}")
    summary = [_summary(grid, recorder.rows) for grid in grids]
    _show(summary)
    recorder.write([{**row, **{m: row[m].to_json() for m in (*METRICS, *PHASES)}} for row in summary])
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["2x2", "3x4", "6x4"], help="pipelines x stages")
    parser.add_argument("--repetitions", type=int, default=10, help="runs per grid, alternating between grids")
    parser.add_argument("--quick", action="store_true", help="2 repetitions")
    parser.add_argument("--carriers", nargs="+", default=["links"], help="of links and gloo; which alternate")
    parser.add_argument("--op-ms", type=float, default=20.0, help="length of every emulated F, I and W")
    parser.add_argument("--microbatches", type=int, default=6, help="per pipeline")
    parser.add_argument("--kill-step", type=int, default=3, help="the step in which the worker is killed")
    parser.add_argument("--point", default=Point.BACKWARD.value, help="the point of the step")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 2
    return options


def measure(grid: Grid, options: argparse.Namespace) -> dict[str, Any]:
    """Trains once with one kill; returns the row, with ``error`` set and no numbers if the run failed."""
    job = _job(grid, options)
    fault = Fault(kind=FaultKind.KILL, worker=grid.victim, step=options.kill_step, point=Point(options.point))
    profile = op_profile(_LAYERS, grid.stages, options.op_ms / 1000)
    row = partial(_row, job, fault, profile)
    return measured_run(job, row, limit_s=options.limit_s, faults=[fault], emulate=profile)


def _job(grid: Grid, options: argparse.Namespace) -> Job:
    tree = {
        "name": f"recovery-{grid.pipelines}x{grid.stages}",
        "model": {"kind": "gpt", "layers": _LAYERS - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0},
        "data": {"kind": "text", "path": __file__},
        "grid": {"pipelines": grid.pipelines, "stages": grid.stages, "microbatches": options.microbatches},
        "train": {"steps": options.kill_step + 3, "technique": "1f1b"},
        "control": {"carrier": grid.carrier, "carry_from": 64},
        "resilience": {"step_log": False},  # so that the step is run again whole: how long that takes is planned
    }
    return parse_job(tree)


def _row(job: Job, fault: Fault, profile: Profile, summary: Summary) -> dict[str, Any]:
    failures = summary.report.failures
    if summary.unfired or len(failures) != 1:
        return {"error": f"{len(failures)} failures instead of one; not fired: {summary.unfired}"}
    healthy = healthy_plan(job, _LAYERS)
    rerouted = adaptive_plan(healthy, [fault.worker])
    planned, redone = (evaluate(plan, costs_from_profile(profile)).makespan for plan in (healthy, rerouted))
    failure = failures[0]
    if failure.resumed_s is None:
        return {"error": "no step was committed after the failure"}
    commits = dict(summary.report.commits)
    return {
        "error": None,
        "workers": len(healthy.workers),
        "killed": str(fault),
        "planned_step_s": planned,
        "planned_redone_step_s": redone,
        "detected_s": failure.detected_s,
        "agreed_s": failure.agreed_s,
        "rebuilt_s": failure.rebuilt_s,
        **_phases(failure),
        "resumed_s": failure.resumed_s,
        "overhead_s": failure.resumed_s - redone,
        "healthy_excess_s": _step_s(commits, range(fault.step)) - planned,
        "rerouted_excess_s": _step_s(commits, range(fault.step, job.train.steps)) - redone,
        "recomputed_pairs": failure.recomputed_microbatches,
        "carried_bytes": sum(each.sent_carried for each in _steps_of(summary)),
    }


def _steps_of(summary: Summary) -> list[StepOps]:
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, StepOps)]


def _step_s(commits: dict[int, float], steps: range) -> float:
    """The median time between the commits of consecutive steps."""
    return statistics.median(commits[after] - commits[before] for before, after in pairwise(steps))


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    names = ("detected_s", "agreed_s", "rebuilt_s", "overhead_s")
    return ", ".join(f"{name.removesuffix('_s')} {row[name] * 1000:.0f} ms" for name in names)


def _phases(failure: FailureReport) -> dict[str, float]:
    """How long each phase of the recovery took, in seconds."""
    ends = [0.0, failure.detected_s, failure.agreed_s, failure.rebuilt_s, failure.resumed_s]
    times = [end for end in ends if end is not None]
    return {name: end - start for name, (start, end) in zip(PHASES, pairwise(times), strict=True)}


def _growth(summary: list[dict[str, Any]], row: dict[str, Any]) -> str:
    """What everything but the redone step takes, against the smallest grid; 1 would be no growth."""
    medians = [each["rebuilt_s"].median for each in (row, summary[0])]
    return "-" if None in medians else f"{medians[0] / medians[1]:.1f}"


def _summary(grid: Grid, rows: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [row for row in rows if row["grid"] == str(grid)]
    good = [row for row in mine if not row["error"]]
    metrics: dict[str, Interval] = {name: interval([row[name] for row in good]) for name in (*METRICS, *PHASES)}
    overhead = metrics["overhead_s"].median
    return {
        "grid": str(grid),
        "workers": grid.pipelines * grid.stages,
        "runs": len(mine),
        "failed": len(mine) - len(good),
        "target_s": TARGET_S,
        "target_met": overhead is not None and overhead <= TARGET_S and len(good) == len(mine),
        **metrics,
    }


def _show(summary: list[dict[str, Any]]) -> None:
    header = [
        "grid",
        "workers",
        "runs (failed)",
        "detected",
        "agreed",
        "rebuilt",
        "next commit - redone step",
        "<= 100 ms",
        "healthy step - plan",
        "re-routed step - plan",
    ]
    rows = [
        [
            row["grid"],
            str(row["workers"]),
            f"{row['runs']} ({row['failed']})",
            *(row[metric].show(1000) for metric in METRICS[:4]),
            "yes" if row["target_met"] else "NO",
            *(row[metric].show(1000) for metric in METRICS[4:]),
        ]
        for row in summary
    ]
    print_table("ms since SIGKILL: median [95 % interval]", header, rows)
    phases = [[row["grid"], *(row[phase].show(1000) for phase in PHASES), _growth(summary, row)] for row in summary]
    print_table("ms of each phase", ["grid", "detect", "agree", "rebuild", "redo", "all but redo, x smallest"], phases)


if __name__ == "__main__":
    raise SystemExit(main())
