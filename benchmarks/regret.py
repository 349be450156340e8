"""What `strategy: auto` trains less than the strategy that would have been the best one, had all been known before.

Jobs are simulated in worlds that differ in how machines fail and come back, by each exact strategy, and by auto, in the
same worlds. Of each world the regret is 1 - steps by auto / steps by the best fixed one; below 0 auto is better than
any of them. Nothing of a world is told to auto, nor is any of its constants made from one of these.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.config.job import Cluster
from holdfast.config.load import load_job
from holdfast.config.profiles import load_profile
from holdfast.errors import ConfigError
from holdfast.settings.planning import sums_of
from holdfast.sim.compare import Simulated, compare
from holdfast.sim.compare import interval as of_mean
from holdfast.sim.engine import Prepared, simulate
from holdfast.sim.failures import parse_failures
from holdfast.sim.prepare import parse_cluster, prepared, speeds_of
from measure import ROOT, Recorder, print_table, progress

AUTO, TARGET = "auto", 0.05
_JOB = ROOT / "examples" / "simulate-gpt3.yaml"
_FIXED = ("adaptive", "templates", "checkpoint-restart", "checkfreq", "snapshots")
_OWN = {"checkfreq": ("checkpoint.every=0",), "snapshots": ("resilience.snapshot_every=20",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A grid of the job, and how many machines it takes."""

    pipelines: int
    stages: int
    microbatches: int

    def __str__(self) -> str:
        """As a table has it."""
        return f"{self.pipelines}x{self.stages}"

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the job file."""
        sizes = ("pipelines", "stages", "microbatches")
        return (*(f"grid.{name}={getattr(self, name)}" for name in sizes), "checkpoint.every=auto")


GRIDS = (
    Grid(pipelines=4, stages=6, microbatches=24),
    Grid(pipelines=2, stages=4, microbatches=24),
    Grid(pipelines=1, stages=8, microbatches=48),
    Grid(pipelines=3, stages=2, microbatches=16),
)
WORLDS = {
    "calm": ("poisson:mtbf=12h,repair=2h", "poisson:mtbf=8h"),
    "often": ("poisson:mtbf=2h,repair=1h", "poisson:mtbf=20m,repair=20m", "periodic:1h,repair=30m"),
    "at once": ("racks:mtbf=6h,size=2,repair=1h", "weibull:mtbf=3h,shape=0.5,repair=1h"),
    "spot": ("spot:ec2-p3", "spot:gcp-v100,notice=2m", "spot:gcp-a100", "spot:ec2-g4dn,notice=30s"),
    "mixed": (
        "bursts:mtbf=24h,every=6h,lasts=1h,burst=5m,repair=30m",
        "bursts:mtbf=6h,every=8h,lasts=2h,burst=10m,repair=3h",
    ),
}


def main() -> int:
    """Runs the benchmark."""
    options = _options()
    recorder = Recorder("regret", vars(options))
    profile = load_profile(ROOT / "profiles" / "gpt3-medium-350m.json")
    grids = [grid for grid in GRIDS if not options.grids or str(grid) in options.grids.split(",")]
    kinds = {kind: each for kind, each in WORLDS.items() if not options.kinds or kind in options.kinds.split(",")}
    total = sum(map(len, kinds.values())) * len(grids)
    done = 0
    for grid in grids:
        rows = _rows(grid)
        job = load_job(_JOB, [*grid.keys])
        speeds = speeds_of(profile, parse_cluster(options.speeds, Cluster()), sums=sums_of(job))
        jobs: dict[str, Simulated] = {name: partial(simulate, row, speeds=speeds) for name, row in rows.items()}
        for kind, failures in kinds.items():
            for each in failures:
                recorder.begin()
                worlds = [
                    parse_failures(each).draw(grid.pipelines * grid.stages, options.hours * 3600, f"held out:{run}")
                    for run in range(options.runs)
                ]
                found = compare(jobs, worlds, job.samples_per_step, processes=options.jobs)
                done += 1
                for run in range(options.runs):
                    steps = {name: one.outcomes[run].steps for name, one in found.items()}
                    row = recorder.add(grid=str(grid), kind=kind, failures=each, run=run, steps=steps, **_regret(steps))
                progress(f"{done}/{total} {grid}, {each}: {row['regret']:+.1%} to {row['best']}: {steps}")
    summary = _summary(recorder.rows)
    _show(summary)
    recorder.write(summary)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0, help="of each world")
    parser.add_argument("--runs", type=int, default=5, help="worlds of each kind")
    parser.add_argument("--speeds", default="start_s=120,detect_s=1", help="as `holdfast simulate` takes them")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="simulations at once")
    parser.add_argument("--grids", default="", help="of these only: such as 2x4,1x8")
    parser.add_argument("--kinds", default="", help=f"of these only: {','.join(WORLDS)}")
    parser.add_argument("--quick", action="store_true", help="one world of each kind")
    options = parser.parse_args()
    if options.quick:
        options.runs = 1
    return options


def _rows(grid: Grid) -> dict[str, Prepared]:
    """What the job is by each strategy that it can have; and where it logs, by the same without logs."""
    found: dict[str, Prepared] = {}
    profile = load_profile(ROOT / "profiles" / "gpt3-medium-350m.json")
    for name in (AUTO, *_FIXED):
        keys = [*grid.keys, f"resilience.strategy={name}", *_OWN.get(name, ())]
        try:
            found[name] = prepared(load_job(_JOB, keys), profile)
        except ConfigError as error:
            progress(f"{grid}: not {name}: {error}")
            continue
        if found[name].rules.logging is not None and name != AUTO:
            found[f"{name} without logs"] = prepared(load_job(_JOB, [*keys, "logging.use=off"]), profile)
    return found


def _regret(steps: dict[str, int]) -> dict[str, Any]:
    best = max((name for name in steps if name != AUTO), key=lambda name: steps[name])
    return {"best": best, "regret": 1 - steps[AUTO] / steps[best]}


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for kind in (*WORLDS, "all"):
        some = [row for row in rows if kind in (row["kind"], "all")]
        if not some:
            continue
        low, high = of_mean([row["regret"] for row in some])
        mean = sum(row["regret"] for row in some) / len(some)
        fixed = {name for row in some for name in row["steps"]}
        against = {
            name: sum(row["steps"][AUTO] / row["steps"][name] - 1 for row in those) / len(those)
            for name in sorted(fixed - {AUTO})
            if (those := [row for row in some if row["steps"].get(name)])
        }
        worst = max(some, key=lambda row: row["regret"])
        found.append(
            {"kind": kind, "worlds": len(some), "mean": mean, "low": low, "high": high, "against": against}
            | {"worst": {key: worst[key] for key in ("regret", "grid", "failures", "run", "best")}}
        )
    return found


def _show(summary: list[dict[str, Any]]) -> None:
    names = sorted({name for each in summary for name in each["against"]})
    header = ["worlds", "number", "mean regret [95 %]", "worst", *(f"more than {name}" for name in names)]
    rows = [
        [
            each["kind"],
            str(each["worlds"]),
            f"{each['mean']:+.2%} [{each['low']:+.2%}, {each['high']:+.2%}]",
            f"{each['worst']['regret']:+.1%}",
            *(f"{each['against'][name]:+.1%}" if name in each["against"] else "" for name in names),
        ]
        for each in summary
    ]
    print_table(
        f"auto against the best fixed strategy of each world; target: mean <= {TARGET:.0%}, mixed < 0", header, rows
    )


if __name__ == "__main__":
    raise SystemExit(main())
