"""``holdfast plan``: builds, proves, times and shows the plan of a grid, healthy or after failures."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from dataclasses import dataclass

from holdfast.config.load import load_job
from holdfast.core.bounds import Bound, bound, failures_per_stage
from holdfast.core.builders import Limit, adaptive_plan, regular_plan
from holdfast.core.evaluate import Timeline, evaluate
from holdfast.core.ids import WorkerId
from holdfast.core.placement import Placement, regular_placement, split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, parse_costs
from holdfast.core.render import render_timeline
from holdfast.core.validate import validate
from holdfast.errors import ConfigError, InfeasiblePlan

__all__ = ["add_plan_parser", "run"]


def add_plan_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``plan`` command; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser("plan", help="build, prove, time and show the plan of a grid", description=__doc__)
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="take grid and micro-batches from this job file")
    parser.add_argument("--grid", metavar="DPxPP", help="pipelines x stages, such as 3x4")
    parser.add_argument("--microbatches", metavar="M", help="micro-batches per pipeline")
    parser.add_argument("--costs", default="1,1,1", metavar="F,I,W", help="time of F, I and W; B takes I + W")
    parser.add_argument("--comm", default="0", metavar="C", help="time of a message between stages")
    parser.add_argument("--optimizer-cost", default="0", metavar="O", help="time of the optimizer step")
    parser.add_argument("--memory", metavar="aF,aI,aW,cap", help="what F takes, I and W give back, and the limit")
    failures = parser.add_mutually_exclusive_group()
    failures.add_argument("--failed", default="", metavar="1.2,0.3", help="the workers that have failed")
    failures.add_argument(
        "--failures",
        default="0",
        metavar="N",
        help="that many failures, one per stage from the last stage to the first and again, in the last pipeline first",
    )
    parser.add_argument("--technique", choices=("1f1b", "adaptive"), help="default: adaptive after failures, else 1f1b")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan that the flags ask for and returns the exit code 0.

    Raises:
        ConfigError: a flag cannot be used; the message names it and what would be right.
        InfeasiblePlan: the memory is too small, or there are more failures than the grid survives.
        StateUnavailable: the failed workers leave layers without an owner.
    """
    task = _read(args)
    started = time.perf_counter()
    plan = _build(task)
    solve_s = time.perf_counter() - started
    validate(plan, costs=task.costs)
    result = _Result(
        timeline=evaluate(plan, task.costs),
        lost=failures_per_stage(task.grid, task.failed),
        bound=bound(task.grid, failures_per_stage(task.grid, task.failed), task.microbatches, task.costs),
        solve_s=solve_s,
    )
    print(json.dumps(_to_json(result)) if args.format == "json" else _to_table(result))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What the flags ask for; ``grid`` is the healthy placement."""

    grid: Placement
    num_pipelines: int
    num_stages: int
    microbatches: int
    costs: Costs
    failed: tuple[WorkerId, ...]
    technique: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    timeline: Timeline
    lost: tuple[int, ...]
    bound: Bound
    solve_s: float

    @property
    def optimal(self) -> bool:
        """Whether the bound certifies that no plan has a shorter period."""
        return math.isclose(self.timeline.period, self.bound.period, rel_tol=1e-12)


def _read(args: argparse.Namespace) -> _Task:
    if args.job:
        _take_grid_of(args)
    num_pipelines, num_stages = _parse_grid(args.grid)
    grid = regular_placement(num_pipelines, split_evenly(num_stages, num_stages))
    failed = _parse_failed(args.failed, grid) or _spread(args.failures, num_pipelines, num_stages)
    technique = args.technique or ("adaptive" if failed else "1f1b")
    if technique == "1f1b" and failed:
        raise ConfigError("--technique 1f1b plans healthy grids only: use adaptive after failures")
    return _Task(
        grid=grid,
        num_pipelines=num_pipelines,
        num_stages=num_stages,
        microbatches=_parse_count("--microbatches", args.microbatches, 1),
        costs=parse_costs(
            num_stages, costs=args.costs, comm=args.comm, optimizer=args.optimizer_cost, memory=args.memory
        ),
        failed=failed,
        technique=technique,
    )


def _take_grid_of(args: argparse.Namespace) -> None:
    """Fills in what the flags leave open from a job file; costs stay those of ``--costs``."""
    grid = load_job(args.job).grid
    args.grid = args.grid or f"{grid.pipelines}x{grid.stages}"
    args.microbatches = args.microbatches or str(grid.microbatches)


def _build(task: _Task) -> Plan:
    """Builds the plan; without ``--memory`` adaptive may hold as many micro-batches as it likes."""
    stages = split_evenly(task.num_stages, task.num_stages)
    if task.technique == "1f1b":
        return regular_plan(task.num_pipelines, stages, task.microbatches, costs=task.costs)
    healthy = regular_plan(task.num_pipelines, stages, task.microbatches, "gpipe")
    return adaptive_plan(healthy, task.failed, task.costs, limit=Limit.MEMORY)


def _parse_grid(text: str | None) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text or "", re.ASCII)
    if match is None:
        found = "is missing" if text is None else f"{text} is no grid"
        raise ConfigError(f"--grid {found}: expected pipelines x stages, both at least 1, such as 3x4")
    return int(match[1]), int(match[2])


def _parse_count(flag: str, text: str | None, least: int) -> int:
    if text is None or not (text.isascii() and text.isdecimal()) or int(text) < least:
        found = "is missing" if text is None else f"{text} is impossible"
        raise ConfigError(f"{flag} {found}: expected a whole number from {least}")
    return int(text)


def _parse_failed(text: str, grid: Placement) -> tuple[WorkerId, ...]:
    try:
        failed = {WorkerId.parse(name) for name in text.split(",") if text}
    except ConfigError as error:
        raise ConfigError(f"--failed {text}: {error}") from error
    for worker in sorted(failed):
        if worker not in grid.workers:
            last = grid.workers[-1]
            raise ConfigError(f"--failed {worker}: no such worker, the grid has 0.0 to {last.pipeline}.{last.stage}")
    return tuple(sorted(failed))


def _spread(text: str, num_pipelines: int, num_stages: int) -> tuple[WorkerId, ...]:
    """Chooses failures stage by stage from the last one, in the last pipeline, then in the one before it, and so on."""
    count, most = _parse_count("--failures", text, 0), (num_pipelines - 1) * num_stages
    if count > most:
        raise InfeasiblePlan(
            f"--failures {count}: a grid of {num_pipelines}x{num_stages} survives at most {most}, "
            "as every stage has to keep one worker"
        )
    places = (divmod(number, num_stages) for number in range(count))
    return tuple(sorted(WorkerId(num_pipelines - 1 - turn, num_stages - 1 - back) for turn, back in places))


def _to_json(result: _Result) -> dict[str, object]:
    timeline = result.timeline
    orders: dict[str, list[list[object]]] = {str(worker): [] for worker, _ in timeline.peak_memory}
    for span in timeline.spans:
        microbatch = span.op.microbatch
        orders[str(span.worker)].append(
            [span.op.kind.value, microbatch.pipeline, microbatch.index, span.start, span.end]
        )
    return {
        "period": timeline.period,
        "makespan": timeline.makespan,
        "bound": {"period": result.bound.period, "makespan": result.bound.makespan},
        "optimal": result.optimal,
        "failures_per_stage": list(result.lost),
        "peak_memory": {str(worker): peak for worker, peak in timeline.peak_memory},
        "solve_s": result.solve_s,
        "orders": orders,
    }


def _to_table(result: _Result) -> str:
    lower = result.bound
    return (
        render_timeline(result.timeline)
        + f"bound     period {lower.period:g}, makespan {lower.makespan:g}"
        + (" (reached: optimal)" if result.optimal else "")
        + f"\nfailures  {' '.join(map(str, result.lost))} per stage\nsolved    in {result.solve_s * 1e3:.1f} ms"
    )
