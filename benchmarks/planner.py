"""How near do the planner's schedules come to what nothing can beat, and how long does it take?

Unit costs and memory 2,1,1,2*stages unless said; the period of the staggered technique. CPU time is of this process and
of the solvers that it starts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import LayerRange, Placement, home_placement, split_evenly
from holdfast.core.profile import Costs, parse_costs
from holdfast.core.routes import Routes, home_routes, reroute
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.library import PlanLibrary
from holdfast.planning.normalise import bound_cost, min_max, place
from holdfast.planning.planner import Planned, Solver, Technique, make_plan, plan_routes
from measure import Recorder, print_table, progress

UNEVEN = {"costs": "10,11,8", "comm": "1", "optimizer": "5"}
EXAMPLE = (
    ("1F1B, makespan", "1f1b", False, "1,0,1,4:3:2:1", 27),
    ("adaptive, 1F1B's memory, makespan", "adaptive", True, "1,0,1,4:3:2:1", 36),
    ("adaptive, no limit, makespan", "adaptive", True, None, 33),
    ("decoupled, makespan", "decoupled", True, "1,0,1,4", 29),
    ("staggered, 2,1,1,8, period", "staggered", True, "2,1,1,8", 27),
    ("staggered, 1,0,1,4, period", "staggered", True, "1,0,1,4", 29),
    ("staggered, 1,0,1,5, period", "staggered", True, "1,0,1,5", 28),
    ("staggered, 1,0,1,6, period", "staggered", True, "1,0,1,6", 27),
    ("decoupled, fault-free, makespan", "decoupled", False, None, 21),
    ("staggered, fault-free, period", "staggered", False, None, 19),
)
GAPS: tuple[tuple[int, int, int, dict[str, str], float], ...] = (
    (8, 4, 16, {}, 0.0),
    (8, 8, 32, {}, 0.01),
    (16, 8, 32, {}, 0.02),
    (16, 32, 64, {}, 0.02),
    (8, 8, 16, {}, 0.04),
    (8, 8, 32, UNEVEN, 0.08),
    (16, 8, 64, UNEVEN, 0.08),
    (64, 32, 256, {}, 0.035),
)
MISSING = ((3, 4, 6), (4, 8, 16), (8, 4, 16), (8, 8, 32), (16, 8, 32), (8, 16, 64), (16, 16, 64), (32, 16, 64))
_RECOVERING = (Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED)
SCATTERED = ((4, 4, 16), (8, 4, 16), (8, 8, 16), (16, 8, 32), (32, 16, 16))
SCATTERED_S = 5.0
FIGURE_9 = ((8, 32), (16, 32), (32, 32), (64, 24))


def main() -> int:
    """Prints the tables and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small grids only")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the search of one plan")
    parser.add_argument("--solver-limit", type=float, default=150.0, help="seconds for CP-SAT, where it is asked")
    parser.add_argument(
        "--tables",
        default="example,normalise,gaps,scattered,unlike,figure9,largest,missing",
        help="which tables",
    )
    args = parser.parse_args()
    recorder = Recorder(name="planner", settings=vars(args))
    tables: dict[str, Callable[[Recorder, argparse.Namespace], list[list[str]]]] = {
        "example": example,
        "normalise": normalise,
        "gaps": gaps,
        "scattered": scattered,
        "unlike": unlike,
        "figure9": figure9,
        "largest": largest,
        "missing": missing,
    }
    for name in args.tables.split(","):
        rows = tables[name](recorder, args)
        print_table(name, rows[0], rows[1:])
        recorder.write({"tables": args.tables})
    return 0


def example(recorder: Recorder, args: argparse.Namespace) -> list[list[str]]:
    """The paper's running example: 3 x 4, 6 micro-batches, worker 1.2 lost."""
    table = [["schedule", "target", "list", "with CP-SAT", "bound", "proved"]]
    for name, technique, lost, memory, target in EXAMPLE:
        grid = CostedGrid(pipelines=3, stages=split_evenly(4, 4), microbatches=6, costs=parse_costs(4, memory=memory))
        failed = [WorkerId(1, 2)] if lost else []
        found = {}
        for engine in (Solver.LIST, Solver.CP_SAT):
            with _Timed(recorder, table="example", name=name, engine=engine.value, target=target) as timed:
                made = make_plan(grid, failed, Technique(technique), time_limit_s=args.time_limit, engine=engine)
                found[engine] = timed.add(made)
        value = [str(found[e].found.period) for e in (Solver.LIST, Solver.CP_SAT)]
        best = found[Solver.CP_SAT]
        table.append([name, str(target), *value, f"{best.bound.period:g}", "yes" if best.optimal else "no"])
    return table


def normalise(recorder: Recorder, args: argparse.Namespace) -> list[list[str]]:
    """All assignments of up to 512 failures to 64 stages."""
    grid = _grid(64, 32, 128)
    started = time.perf_counter()
    min_max(64, 512, bound_cost(grid))
    seconds = time.perf_counter() - started
    recorder.add(table="normalise", seconds=seconds, target_s=0.2)
    return [["normalisation", "target, s", "s"], ["all F <= 512, N = 64", "0.2", f"{seconds:.3f}"]]


def gaps(recorder: Recorder, args: argparse.Namespace) -> list[list[str]]:
    """How far the period is above its bound; where the list engine should reach that and does not, the solver tries."""
    table = [["PP,DP,M", "costs", "failed", "engine", "period", "bound", "gap", "target", "s", "CPU s"]]
    for stages, pipelines, microbatches, costs, target in GAPS:
        if args.quick and stages * pipelines > 128:
            continue
        grid, workers = _grid(stages, pipelines, microbatches, **costs), stages * pipelines
        for count in sorted({1, 2, math.ceil(workers / 20), math.ceil(workers / 10), workers // 4}):
            labels = {"shape": f"{stages},{pipelines},{microbatches}", "costs": costs, "failed": count}
            for engine, limit in ((Solver.LIST, args.time_limit), (Solver.CP_SAT, args.solver_limit)):
                with _Timed(recorder, table="gaps", **labels, engine=engine.value, target=target) as timed:
                    planned = timed.add(_plan(grid, count, limit, engine))
                table.append(
                    [
                        labels["shape"],
                        costs.get("costs", "unit"),
                        str(count),
                        engine.value,
                        f"{planned.found.period:g}",
                        f"{planned.bound.period:g}",
                        f"{planned.gap:.2%}",
                        f"{target:.1%}",
                        f"{timed.wall_s:.1f}",
                        f"{timed.cpu_s:.1f}",
                    ]
                )
                if target or planned.optimal:
                    break
    return table


def scattered(recorder: Recorder, args: argparse.Namespace) -> list[list[str]]:
    """Workers lost anywhere: lined up, and with everybody keeping its own micro-batches, against the bound."""
    table = [
        [
            "DP,PP,M",
            "sets",
            "lined up, gap: median",
            "worst",
            "keep home: median",
            "worst",
            "above the best: median",
            "worst",
        ]
    ]
    for pipelines, stages, microbatches in SCATTERED[:2] if args.quick else SCATTERED:
        rng = random.Random(pipelines * stages)
        grid, many = _grid(stages, pipelines, microbatches), 5 if args.quick else 20
        gaps: dict[bool, list[float]] = {False: [], True: []}
        above: list[float] = []
        for nth in range(many):
            failed = _any_lost(rng, pipelines, stages)
            shape = f"{pipelines},{stages},{microbatches}"
            found = {}
            for keep in (False, True):
                labels = {"shape": shape, "nth": nth, "failed": len(failed), "keep_home": keep}
                with _Timed(recorder, table="scattered", **labels) as timed:
                    found[keep] = timed.add(
                        make_plan(grid, failed, Technique.STAGGERED, time_limit_s=SCATTERED_S, keep_home=keep)
                    )
                gaps[keep].append(found[keep].gap)
            above.append(found[True].found.period / found[False].found.period - 1)
        numbers = (
            f"{value:.2%}"
            for each in (gaps[False], gaps[True], above)
            for value in (statistics.median(each), max(each))
        )
        table.append([f"{pipelines},{stages},{microbatches}", str(many), *numbers])
    return table


def _any_lost(rng: random.Random, pipelines: int, stages: int) -> list[WorkerId]:
    """Up to a quarter of the workers, anywhere, but for one of each stage."""
    kept = {WorkerId(rng.randrange(pipelines), stage) for stage in range(stages)}
    others = [
        worker
        for worker in (WorkerId(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages))
        if worker not in kept
    ]
    return rng.sample(others, rng.randint(1, max(1, pipelines * stages // 4)))


def unlike(recorder: Recorder, args: argparse.Namespace) -> list[list[str]]:
    """Random pipelines that are not alike, up to 24 workers, many after losses: gaps to the bound of the routes."""
    table = [["technique", "engine", "instances", "optimal", "gap: median", "p95", "worst", "s: median", "worst"]]
    for technique in _RECOVERING:
        for engine, limit, many in ((Solver.LIST, 1.0, 200), (Solver.CP_SAT, 10.0, 50)):
            rng, gaps, took, optimal = random.Random(1), [], [], 0
            many = 20 if args.quick else many
            for nth in range(many):
                placement, routes, costs = _unlike(rng)
                labels = {"technique": technique.value, "engine": engine.value, "nth": nth}
                with _Timed(recorder, table="unlike", **labels) as timed:
                    found = timed.add(
                        plan_routes(placement, routes, costs, technique, time_limit_s=limit, engine=engine)
                    )
                gaps.append(found.gap)
                took.append(timed.wall_s)
                optimal += found.optimal
            gaps.sort()
            shares = (statistics.median(gaps), gaps[int(0.95 * many)], gaps[-1])
            times = (f"{statistics.median(took):.2f}", f"{max(took):.1f}")
            table.append(
                [technique.value, engine.value, str(many), str(optimal), *(f"{gap:.2%}" for gap in shares), *times]
            )
    return table


def _unlike(rng: random.Random) -> tuple[Placement, Routes, Costs]:
    """2 to 5 pipelines of 1 to 5 stages, with micro-batches by how fast each is; many have lost up to 3 workers."""
    layers = rng.randint(5, 12)
    rows: list[list[LayerRange]] = []
    left = rng.randint(4, 24)
    for _ in range(rng.randint(2, 5)):
        depth = min(rng.randint(1, 5), layers, max(1, left))
        cuts = sorted(rng.sample(range(1, layers), depth - 1))
        rows.append([LayerRange(*pair) for pair in itertools.pairwise([0, *cuts, layers])])
        left -= depth
    pace = rng.randint(8, 30)
    counts = tuple(max(1, round(pace / max(cut.stop - cut.start for cut in row))) for row in rows)
    placement, memory = home_placement(rows), {}
    if rng.random() < 0.5:
        memory = {"memory": f"{rng.choice(['1,0,1', '1,0.5,0.5'])},{rng.choice([3, 5, 8]) * layers}"}
    if rng.random() < 0.5:
        memory |= {
            "costs": ",".join(str(rng.randint(1, 12)) for _ in range(3)),
            "comm": str(rng.randint(0, 3)),
            "optimizer": str(rng.randint(0, 5)),
        }
    routes, costs = home_routes(placement, Batch(counts)), parse_costs(layers, **memory)
    while rng.random() < 0.75:
        gone = frozenset(rng.sample(placement.workers, min(len(placement.workers) - 1, rng.randint(1, 3))))
        if not placement.unowned_layers(gone):
            return placement.without(gone), reroute(placement, routes, gone), costs
    return placement, routes, costs


def figure9(recorder: Recorder, args: argparse.Namespace) -> list[list[str]]:
    """Throughput at 10 % failed against 1F1B, fault-scaled 1F1B and the planner's own fault-free schedule."""
    table = [["PP,DP", "failed", "x 1F1B", "x fault-scaled 1F1B", "x own fault-free, scaled"]]
    for stages, pipelines in FIGURE_9[:1] if args.quick else FIGURE_9:
        grid, workers = _grid(stages, pipelines, 4 * stages), stages * pipelines
        healthy = _plan(grid, 0, args.time_limit).found.period
        classic = (grid.microbatches + stages - 1) * 3
        for count in (math.ceil(workers / 100), math.ceil(workers / 20), workers // 10):
            alive = 1 - count / workers
            with _Timed(recorder, table="figure9", stages=stages, pipelines=pipelines, failed=count) as timed:
                period = timed.add(_plan(grid, count, args.time_limit)).found.period
            ratios = (classic / period, classic / period / alive, healthy / period / alive)
            table.append([f"{stages},{pipelines}", str(count), *(f"{ratio:.3f}" for ratio in ratios)])
    return table


def largest(recorder: Recorder, args: argparse.Namespace) -> list[list[str]]:
    """The cell of 2,048 workers: at most 120 s, 2 GB, and 1.5 % above the bound."""
    stages, pipelines = (8, 8) if args.quick else (64, 32)
    row = _fill(recorder, "largest", stages, pipelines, 2 * stages, 100.0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return [["PP", "DP", "counts", "schedules", "worst gap", "s", "CPU s", "GB"], [*row, f"{peak:.2f}"]]


def missing(recorder: Recorder, args: argparse.Namespace) -> list[list[str]]:
    """A plan that the library lacks, made at once for 1 or 2 failures: at most 100 ms."""
    table = [["DP,PP,M", *(technique.value for technique in _RECOVERING)]]
    for pipelines, stages, microbatches in MISSING[:3] if args.quick else MISSING:
        row = []
        for technique in _RECOVERING:
            grid = _grid(stages, pipelines, microbatches)
            recorder.begin()
            took = [_made_at_once(grid, failures, technique) for failures in (1, 2) for _ in range(3)]
            ms = [1e3 * statistics.median(took[:3]), 1e3 * statistics.median(took[3:])]
            shape = f"{pipelines},{stages},{microbatches}"
            recorder.add(table="missing", shape=shape, technique=technique.value, target_ms=100, cpu_ms=ms)
            row.append(f"{max(ms):.0f} ms")
        table.append([f"{pipelines},{stages},{microbatches}", *row])
    return table


def _made_at_once(grid: CostedGrid, failures: int, technique: Technique) -> float:
    with tempfile.TemporaryDirectory() as folder:
        library, started = PlanLibrary(Path(folder)), time.process_time()
        library.get(grid, failures, technique)
        return time.process_time() - started


def _fill(recorder: Recorder, table: str, stages: int, pipelines: int, microbatches: int, limit: float) -> list[str]:
    count = stages * pipelines // 4
    progress(f"{table}: {stages} stages, {pipelines} pipelines, 1 to {count} failures")
    recorder.begin()
    with tempfile.TemporaryDirectory() as folder:
        library = PlanLibrary(Path(folder))
        grid = _grid(stages, pipelines, microbatches)
        filled = library.fill(grid, count, Technique.DECOUPLED, time_limit_s=limit)
    recorder.add(
        table=table, stages=stages, pipelines=pipelines, counts=count, schedules=filled.schedules,
        worst_gap=filled.worst_gap, wall_s=filled.wall_s, cpu_s=filled.cpu_s,
    )  # fmt: skip
    numbers = [str(number) for number in (stages, pipelines, count, filled.schedules)]
    return [*numbers, f"{filled.worst_gap:.2%}", f"{filled.wall_s:.1f}", f"{filled.cpu_s:.1f}"]


def _grid(stages: int, pipelines: int, microbatches: int, **costs: str) -> CostedGrid:
    return CostedGrid(
        pipelines=pipelines,
        stages=split_evenly(stages, stages),
        microbatches=microbatches,
        costs=parse_costs(stages, memory=f"2,1,1,{2 * stages}", **costs),
    )


def _plan(grid: CostedGrid, count: int, time_limit_s: float, engine: Solver = Solver.LIST) -> Planned:
    counts = min_max(len(grid.stages), count, bound_cost(grid))[count]
    failed = place(counts, grid.pipelines)
    return make_plan(grid, failed, Technique.STAGGERED, time_limit_s=time_limit_s, engine=engine)


class _Timed:
    """Takes the time of what runs inside, and records it with the plan that is added."""

    def __init__(self, recorder: Recorder, **labels: Any) -> None:
        self._recorder, self._labels = recorder, labels
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> _Timed:
        progress(" ".join(str(label) for label in self._labels.values()))
        self._recorder.begin()
        self._wall, self._cpu = time.perf_counter(), _cpu()
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def add(self, planned: Planned) -> Planned:
        """Records a plan and returns it."""
        self.wall_s, self.cpu_s = time.perf_counter() - self._wall, _cpu() - self._cpu
        self._recorder.add(
            **self._labels,
            period=planned.found.period,
            makespan=planned.found.makespan,
            bound_period=planned.bound.period,
            bound_makespan=planned.bound.makespan,
            optimal=planned.optimal,
            gap=planned.gap,
            wall_s=self.wall_s,
            cpu_s=self.cpu_s,
        )
        return planned


def _cpu() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


if __name__ == "__main__":
    raise SystemExit(main())
