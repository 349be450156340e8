"""SlipStream's techniques in real runs: periods against plans, throughput under failures, memory, and recovery.

Workers, sockets, coordinator, plans and updates are real; the compute is emulated by sleeps of equal length, so that
many workers fit on few cores. Every run loses its workers in step 2 and is measured from step 5 on.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.control.store import DecisionStore
from holdfast.core.evaluate import evaluate, peak_memory, steady_period
from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.core.profile import Profile, costs_from_profile, unit_costs
from holdfast.runtime.train import Summary
from measure import Recorder, interval, print_table, progress, ratio_interval
from measured_run import measured_run, op_profile

TECHNIQUES = ("1f1b", "decoupled", "staggered")
LOST = (0, 1, 2, 4)
_LAYERS, _STRIKE, _STEADY = 12, 2, 5
TARGET_PERIOD, TARGET_LOSS, TARGET_RESUME_S = 0.03, 0.03, 0.100


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of run: ``PIPELINESxSTAGESxMICROBATCHES``, a technique, and how many workers die."""

    grid: tuple[int, int, int]
    technique: str
    lost: int

    def __str__(self) -> str:
        pipelines, stages, microbatches = self.grid
        return f"{pipelines}x{stages}, {microbatches} micro-batches, {self.technique}, {self.lost} lost"

    @property
    def victims(self) -> tuple[WorkerId, ...]:
        """Spread over pipelines and stages, the first as in the paper's running example."""
        pipelines, stages, _ = self.grid
        first = WorkerId(1 % pipelines, 2 % stages)
        others = (
            WorkerId((first.pipeline + k) % pipelines, (first.stage + k * (stages // 2 + 1)) % stages)
            for k in range(1, pipelines * stages)
        )
        return tuple(dict.fromkeys((first, *others)))[: self.lost]


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    cases = [
        Case(grid=grid, technique=technique, lost=lost)
        for grid in options.grids
        for lost in options.lost
        for technique in options.techniques
    ]
    recorder = Recorder("slipstream", {**vars(options), "grids": [list(grid) for grid in options.grids]})
    for repetition in range(options.repetitions):
        for case in cases:
            recorder.begin()
            row = recorder.add(
                grid="x".join(map(str, case.grid)),
                technique=case.technique,
                lost=case.lost,
                repetition=repetition,
                **_measure(case, options),
            )
            progress(f"{case}, run {repetition + 1}/{options.repetitions}: {_brief(row)}")
    summary = [_summary(case, recorder.rows) for case in cases]
    _show(summary)
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--grids", nargs="+", type=_grid, default=[(3, 4, 6), (4, 6, 12)], help="pipelines x stages x micro-batches"
    )
    parser.add_argument("--techniques", nargs="+", choices=TECHNIQUES, default=list(TECHNIQUES))
    parser.add_argument("--lost", nargs="+", type=int, default=list(LOST), help="workers that die")
    parser.add_argument("--repetitions", type=int, default=3, help="runs per case, alternating between cases")
    parser.add_argument("--quick", action="store_true", help="one run per case of the small grid")
    parser.add_argument("--op-ms", type=float, default=50.0, help="length of every emulated F, I and W")
    parser.add_argument("--steps", type=int, default=14, help="of every run")
    parser.add_argument("--limit-s", type=float, default=180.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.grids = 1, [(3, 4, 6)]
    return options


def _grid(text: str) -> tuple[int, int, int]:
    pipelines, stages, microbatches = map(int, text.split("x"))
    return pipelines, stages, microbatches


def _measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    profile = op_profile(_LAYERS, case.grid[1], options.op_ms / 1000)
    faults = [Fault(kind=FaultKind.KILL, worker=w, step=_STRIKE, point=Point.BACKWARD) for w in case.victims]
    row = partial(_row, case, profile)
    return measured_run(_job(case, options), row, limit_s=options.limit_s, faults=faults, emulate=profile)


def _job(case: Case, options: argparse.Namespace) -> Job:
    pipelines, stages, microbatches = case.grid
    return parse_job(
        {
            "name": f"slipstream-{case.technique}",
            "model": {"kind": "gpt", "layers": _LAYERS - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0},
            "data": {"kind": "text", "path": __file__},
            "grid": {"pipelines": pipelines, "stages": stages, "microbatches": microbatches},
            "train": {"steps": options.steps, "technique": case.technique},
        }
    )


def _row(case: Case, profile: Profile, summary: Summary) -> dict[str, Any]:
    if summary.unfired or len(summary.report.failures) != case.lost:
        return {"error": f"{len(summary.report.failures)} failures; not fired: {summary.unfired}"}
    with closing(DecisionStore(summary.run_dir / "control.db")) as store:
        plans = store.plans()
    plan, costs = plans[max(plans)], costs_from_profile(profile)
    commits = dict(summary.report.commits)
    steps = [commits[after] - commits[before] for before, after in pairwise(sorted(commits)) if before >= _STEADY]
    planned = steady_period(plan, costs, staggered=case.technique == "staggered")
    held = unit_costs(_LAYERS)
    return {
        "error": None,
        "planned_s": planned,
        "period_s": statistics.median(steps),
        "resume_s": _beyond_redone(summary, evaluate(plan, costs).makespan) if case.lost == 1 else None,
        "generations": summary.generations,
        "peak": [
            max(
                peak_memory(row, held.of(plan.placement.layers_of(worker))) / (_LAYERS // case.grid[1])
                for worker, row in plan.orders.rows
                if plan.placement.layers_of(worker).start == stage * _LAYERS // case.grid[1]
            )
            for stage in range(case.grid[1])
        ],
    }


def _beyond_redone(summary: Summary, redone_s: float) -> float | None:
    """From the kill to the next commit, without the step that is run again, which is settled at its end."""
    (failure,) = summary.report.failures
    return None if failure.resumed_s is None else failure.resumed_s - redone_s


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    resumed = "" if row["resume_s"] is None else f", resumed {row['resume_s'] * 1e3:.0f} ms beyond the redone step"
    off = row["period_s"] / row["planned_s"] - 1
    return f"period {row['period_s']:.3f} s, planned {row['planned_s']:.3f} ({off:+.1%}){resumed}"


def _summary(case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs of a case, and the fault-free 1F1B runs beside them."""
    name = "x".join(map(str, case.grid))
    good = [row for row in rows if row["grid"] == name and not row["error"]]
    own = [row for row in good if (row["technique"], row["lost"]) == (case.technique, case.lost)]
    base = {row["repetition"]: row["period_s"] for row in good if (row["technique"], row["lost"]) == ("1f1b", 0)}
    pairs = [(row["period_s"], base[row["repetition"]]) for row in own if row["repetition"] in base]
    return {
        "grid": name,
        "technique": case.technique,
        "lost": case.lost,
        "planned_s": own[0]["planned_s"] if own else None,
        "period_s": interval([row["period_s"] for row in own]).to_json(),
        "off": interval([row["period_s"] / row["planned_s"] - 1 for row in own]).to_json(),
        "against_1f1b": ratio_interval(pairs).to_json() if pairs else None,
        "resume_s": interval([row["resume_s"] for row in own if row["resume_s"] is not None]).to_json(),
        "peak": own[0]["peak"] if own else None,
    }


def _show(summary: list[dict[str, Any]]) -> None:
    def text(value: dict[str, Any] | None, unit: float, digits: int) -> str:
        if value is None or value["median"] is None:
            return "-"
        return (
            f"{value['median'] * unit:.{digits}f} [{value['low'] * unit:.{digits}f}, {value['high'] * unit:.{digits}f}]"
        )

    print_table(
        f"emulated runs; targets: off plan within {TARGET_PERIOD:.0%}, staggered with one lost at most "
        f"{1 + TARGET_LOSS:.2f} x 1F1B, {TARGET_RESUME_S * 1e3:.0f} ms to resume",
        ["grid", "technique", "lost", "planned s", "period s", "off plan %", "x fault-free 1F1B", "resume ms", "held"],
        [
            [
                row["grid"],
                row["technique"],
                str(row["lost"]),
                "-" if row["planned_s"] is None else f"{row['planned_s']:.3f}",
                text(row["period_s"], 1, 3),
                text(row["off"], 100, 1),
                text(row["against_1f1b"], 1, 3),
                text(row["resume_s"], 1e3, 0),
                "-" if row["peak"] is None else ":".join(f"{each:g}" for each in row["peak"]),
            ]
            for row in summary
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
