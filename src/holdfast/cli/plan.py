"""``holdfast plan``: builds, proves, times and shows the plan of a grid, healthy or after failures."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.cli.arguments import above_0, grid_shape, whole_number, worker_names
from holdfast.cli.plan_shown import FORMATS, Shown
from holdfast.cli.ways_shown import tell_technique
from holdfast.config.job import Job
from holdfast.config.load import load_job, num_layers
from holdfast.config.profiles import load_profile
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, home_placement, regular_placement, split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, Profile, costs_from_profile, parse_costs, unit_costs
from holdfast.core.routes import home_routes, reroute
from holdfast.core.sum_order import most_held
from holdfast.core.validate import validate
from holdfast.errors import ConfigError, InfeasiblePlan
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.library import PlanLibrary
from holdfast.planning.normalise import Move, Normalisation, assigned, moves, normalised
from holdfast.planning.partition import balanced_stages
from holdfast.planning.planner import Planned, Solver, Technique, make_plan, plan_routes
from holdfast.planning.remainder import logged_bytes
from holdfast.planning.search import reached
from holdfast.planning.training import planned_grid, planned_routes, tries_for
from holdfast.recovery.choice import sizes_of
from holdfast.schedule.builders import adaptive_plan
from holdfast.schedule.evaluate import evaluate
from holdfast.schedule.problem import routes_problem
from holdfast.schedule.route_bounds import route_bound
from holdfast.schedule.timing import to_timeline
from holdfast.settings.planning import (
    grid_of,
    healthy_plan,
    in_flight_of,
    known_ties,
    profile_of,
    settled,
    stages_of,
    terms_of,
    with_technique,
)
from holdfast.settings.ways import decided

__all__ = ["add_plan_parser", "run"]

_OTHER_THAN_TRAINED = (
    "grid",
    "microbatches",
    "costs",
    "comm",
    "optimizer_cost",
    "split_cost",
    "memory",
    "profile",
    "technique",
    "time_limit",
    "all_failures",
    "out",
)
"""Flags that ask for another plan than that of a job's training."""
_OF_REGULAR_GRIDS = (
    *(flag for flag in _OTHER_THAN_TRAINED if flag not in ("technique", "time_limit")),
    "normalise",
    "keep_home",
    "failures",
)
"""Flags that do not go with a grid whose pipelines are unlike, or whose stages have several GPUs."""
_MOST_WORKERS, _MOST_OPERATIONS = 100_000, 20_000_000
_PROVED_TWICE = 50_000
"""Operations up to which the core's validator, which works on messages, proves the plan as well."""


def add_plan_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``plan`` command; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser("plan", help="build, prove, time and show the plan of a grid", description=__doc__)
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB.yaml",
        help="take grid and micro-batches from this job; its whole plan, if the planner makes that",
    )
    parser.add_argument(
        "--profile", metavar="FILE", help="times, sizes and cuts from `holdfast profile`, in s and bytes"
    )
    parser.add_argument("--grid", type=grid_shape, metavar="DPxPP", help="pipelines x stages, such as 3x4")
    parser.add_argument("--microbatches", type=whole_number(1), metavar="M", help="micro-batches per pipeline")
    parser.add_argument("--costs", metavar="F,I,W", help="time of F, I and W; B takes I + W; default: 1,1,1")
    parser.add_argument("--comm", metavar="C", help="time of a message between stages; default: 0")
    parser.add_argument("--optimizer-cost", metavar="O", help="time of the optimizer step; default: 0")
    parser.add_argument("--split-cost", metavar="S", help="by how much I takes longer apart from W; default: 0")
    parser.add_argument(
        "--memory",
        metavar="aF,aI,aW,cap",
        help="what F takes, I and W give back, and the limit; with --profile the memory of a worker alone, in bytes: "
        "it holds parameters, optimizer state and sums of gradients, too",
    )
    failures = parser.add_mutually_exclusive_group()
    failures.add_argument(
        "--failed", type=worker_names, default=frozenset(), metavar="1.2,0.3", help="the workers that have failed"
    )
    failures.add_argument(
        "--failures",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="that many failures, placed on the stages where they cost least",
    )
    parser.add_argument(
        "--normalise",
        choices=[each.value for each in Normalisation],
        help="who fails by --failures; with --failed, move failures there and say who takes whose place: the worst "
        "stage is as fast as possible (min-max, the default of --failures), or by SlipStream's algorithm 1 (paper)",
    )
    parser.add_argument(
        "--keep-home",
        action="store_true",
        help="with --failed, let all keep their own micro-batches, as in SlipStream; else workers of a stage, who hold "
        "the same layers, may change places, so that few pipelines are broken",
    )
    parser.add_argument(
        "--technique", choices=[each.value for each in Technique], help="default: adaptive after failures, else 1f1b"
    )
    parser.add_argument(
        "--time-limit",
        type=above_0("seconds, such as 10"),
        metavar="S",
        help="seconds for the search; default: 10, of a whole library 60",
    )
    parser.add_argument("--format", choices=sorted(FORMATS), default="table")
    parser.add_argument(
        "--solver",
        choices=[each.value for each in Solver],
        default="auto",
        help="what makes the schedule: the list scheduler, and from what it found CP-SAT where it is installed and can "
        "add something (auto, the default); or one of these",
    )
    parser.add_argument(
        "--all-failures", type=whole_number(1), metavar="N", help="fill a plan library for 1 to N failures, in --out"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder of the plan library")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan that the flags ask for and returns the exit code 0.

    Raises:
        ConfigError: a flag cannot be used; the message names it and what would be right.
        InfeasiblePlan: the memory is too small, or there are more failures than the grid survives.
        StateUnavailable: the failed workers leave layers without an owner.
    """
    trained = bool(args.job) and not _asks_for_another(args)  # before what flags leave open is filled in
    job, why = _settled(load_job(args.job), planned=trained) if args.job else (None, "")
    if job is not None and (job.grid.layout or job.most_lanes > 1):
        shown = _of_layout(args, job)
    else:
        task = _read(args, job)
        if task.fill is not None:
            return _fill(task, *task.fill)
        shown = _of_grid(task)
    shown = _with_sizes(shown, args, job, trained=trained)
    sys.stdout.write(FORMATS[args.format](replace(shown, note=shown.note or why)))
    return 0


def _settled(job: Job, *, planned: bool) -> tuple[Job, str]:
    """The job with the technique that it is trained by where no workers share a processor, and what decided.

    That is 1F1B where nothing is ``planned`` of the job, as flags ask for another plan, or nobody knows how many layers
    it has.
    """
    layers = _layers_of(job)
    if layers is None or not planned:
        return with_technique(job, job.train.technique_unprofiled), ""
    found = settled(job, layers, profile_of(job, layers), known_ties(job, layers))
    return found.job, found.why and tell_technique(found.job.train.technique, found.why)


def _layers_of(job: Job) -> int | None:
    """How many layers the model has; None if only the model itself could tell."""
    if (layers := num_layers(job)) is not None:
        return layers
    if job.grid.layout:
        return sum(job.grid.layout[0].stages)
    return None if job.train.profile is None else len(load_profile(job.train.profile).layers)


def _with_sizes(shown: Shown, args: argparse.Namespace, job: Job | None, *, trained: bool) -> Shown:
    """Adds what follows from sizes and times, where a profile tells them.

    How much of a step workers keep, and of a healthy grid how the job recovers from the loss of a node. ``trained``:
    the flags ask for the plan of the job's training.
    """
    path = args.profile or (job.train.profile if job is not None else None)
    profile = None if path is None else load_profile(path)
    plan = None if profile is None else _sized(shown, profile, job if trained else None)
    if profile is None or plan is None:
        return shown
    if job is not None and not tuple(shown.failed):
        shown = replace(shown, recovery=decided(job, plan, profile, restorable=job.resume is not None).chosen)
    if job is not None and not job.keeps_steps:
        return shown
    staggered = (args.technique or (job.train.technique if job is not None else "")) == Technique.STAGGERED
    return replace(shown, step_log=logged_bytes(plan, sizes_of(profile).boundary_bytes, staggered=staggered))


def _sized(shown: Shown, profile: Profile, job: Job | None) -> Plan | None:
    """The plan with a profile's layers: what is shown, or that of a job's training, if it is shown by stages."""
    layers = len(profile.layers)
    if shown.plan.placement.num_layers == layers:
        return shown.plan
    if job is None or tuple(shown.failed):
        return None
    return healthy_plan(job, layers, profile, known_ties(job, layers))


def _of_grid(task: _Task) -> Shown:
    """The plan of a regular grid, by the planner."""
    planned = make_plan(
        task.grid,
        task.failed,
        task.technique,
        time_limit_s=task.time_limit_s,
        engine=task.engine,
        tries=task.tries,
        keep_home=task.keep_home,
    )
    return _shown(planned, planned.failed, task.moves)


def _shown(planned: Planned, failed: Iterable[WorkerId], moves: tuple[Move, ...] = ()) -> Shown:
    plan, problem = planned.plan, planned.problem
    if problem.num_operations <= _PROVED_TWICE:
        validate(plan, costs=problem.costs)
    staggered = planned.technique is Technique.STAGGERED
    return Shown(
        plan=plan,
        timeline=to_timeline(problem, plan, planned.schedule, staggered=staggered),
        costs=problem.costs,
        failed=failed,
        solve_s=planned.solve_s,
        bound=planned.bound,
        optimal=planned.optimal,
        failures_per_stage=planned.failures_per_stage,
        moves=moves,
        note=planned.note,
    )


def _of_layout(args: argparse.Namespace, job: Job) -> Shown:
    """The plan of a grid whose pipelines are unlike, whole or without some workers: that of training, or as asked for.

    Raises:
        ConfigError: a flag is for regular grids.
    """
    _check_flags_of_layout(args)
    layers = _layers_of_layout(job)
    profile, ties = profile_of(job, layers), known_ties(job, layers)
    terms, began = terms_of(job, layers, profile, ties), time.monotonic()
    pipelines = stages_of(job, layers, profile)
    placement = home_placement(pipelines)
    routes, failed = home_routes(placement, job.grid.batch), _known(args.failed, placement.workers)
    routes, left = reroute(placement, routes, failed), placement.without(failed)
    costs = unit_costs(layers) if profile is None else costs_from_profile(profile)
    if args.technique or args.time_limit or args.solver == Solver.CP_SAT:
        technique = Technique(args.technique or (terms.technique if terms else "adaptive" if failed else "1f1b"))
        if technique is Technique.ONE_F_ONE_B and failed:
            raise ConfigError("--technique 1f1b plans healthy grids only: use adaptive after failures")
        if technique in (Technique.DECOUPLED, Technique.STAGGERED):
            costs = replace(costs, in_flight=in_flight_of(job))
        limit_s, engine = _time_limit(args), Solver(args.solver)
        planned = plan_routes(left, routes, costs, technique, ties=ties, time_limit_s=limit_s, engine=engine)
    elif terms is not None and (grid := grid_of(job, pipelines, terms)) is not None:
        planned = planned_grid(grid, failed, terms, at_once=bool(failed))
    elif terms is not None:
        planned = planned_routes(left, routes, terms, at_once=bool(failed))
    else:
        return _by_rules(healthy_plan(job, layers, profile), failed, costs, ties, began)
    return _shown(planned, failed)


def _layers_of_layout(job: Job) -> int:
    """How many layers the model has.

    Raises:
        ConfigError: only the model itself could tell.
    """
    if (layers := _layers_of(job)) is not None:
        return layers
    raise ConfigError(
        "grid: how many layers a model of one's own has is not in the job file: expected grid.layout, or train.profile"
    )


def _by_rules(
    healthy: Plan, failed: tuple[WorkerId, ...], costs: Costs, ties: tuple[tuple[int, ...], ...], began: float
) -> Shown:
    """The plan of training where it does not ask the planner."""
    plan = adaptive_plan(healthy, failed) if failed else healthy
    validate(plan, ties=ties)
    solve_s = time.monotonic() - began
    lower = route_bound(routes_problem(plan.placement, plan.routes, costs, coupled=True), Technique.ADAPTIVE.rules)
    timeline = evaluate(plan, costs, ties=ties)
    optimal = reached(timeline.makespan, lower.makespan)
    return Shown(
        plan=plan, timeline=timeline, costs=costs, failed=failed, solve_s=solve_s, bound=lower, optimal=optimal
    )


def _check_flags_of_layout(args: argparse.Namespace) -> None:
    given = [flag for flag in _OF_REGULAR_GRIDS if getattr(args, flag) not in (None, False, 0)]
    if given:
        name = f"--{given[0].replace('_', '-')}"
        raise ConfigError(
            f"{name}: {args.job} names its pipelines one by one (grid.layout) or has stages of several GPUs: expected "
            "only --failed, --technique, --time-limit, --solver and --format"
        )


def _fill(task: _Task, failures: int, folder: Path) -> int:
    """Fills a plan library and says what it took."""
    _check_writable(folder)
    library = PlanLibrary(folder, lambda text: print(f"holdfast: {text}", file=sys.stderr))
    summary = library.fill(task.grid, failures, task.technique, time_limit_s=task.time_limit_s)
    print(
        f"{folder}: plans for 1 to {summary.plans} failures, which share {summary.schedules} schedules\n"
        f"wall time {summary.wall_s:.2f} s, CPU time {summary.cpu_s:.2f} s, "
        f"worst gap to the bound {summary.worst_gap:.2%}"
    )
    return 0


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {folder}: cannot be written: {getattr(error, 'strerror', error)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What the flags ask for."""

    grid: CostedGrid
    failed: tuple[WorkerId, ...]
    technique: Technique
    time_limit_s: float
    engine: Solver
    fill: tuple[int, Path] | None
    moves: tuple[Move, ...] = ()
    tries: int | None = None
    keep_home: bool = False


def _read(args: argparse.Namespace, job: Job | None) -> _Task:
    if job is not None and (trained := _as_trained(args, job)) is not None:
        return trained
    if job is not None:
        args.grid = args.grid or (len(job.grid.depths), job.grid.depths[0])
        args.microbatches = args.microbatches or job.grid.batch.counts[0]
    shape = num_pipelines, num_stages, microbatches = _checked_grid(args.grid, args.microbatches)
    profile = load_profile(args.profile) if args.profile else None
    costs, stages = _given(args, num_stages) if profile is None else _profiled(args, job, profile, shape)
    grid = CostedGrid(
        pipelines=num_pipelines,
        stages=stages,
        microbatches=microbatches,
        costs=costs,
        ties=known_ties(job, costs.num_layers),
    )
    failing = args.failed or args.failures or args.all_failures
    technique = Technique(args.technique or ("adaptive" if failing else "1f1b"))
    failed, moved = _failures(args, grid, technique, profile)
    return _Task(
        grid=grid,
        failed=failed,
        moves=moved,
        technique=technique,
        time_limit_s=_time_limit(args),
        engine=Solver(args.solver),
        fill=_parse_fill(args),
        keep_home=args.keep_home,
    )


def _time_limit(args: argparse.Namespace) -> float:
    return args.time_limit or (60.0 if args.all_failures else 10.0)


def _asks_for_another(args: argparse.Namespace) -> bool:
    """Whether flags ask for another plan than that of a job's training."""
    given = any(getattr(args, flag) is not None for flag in _OTHER_THAN_TRAINED)
    return given or args.keep_home or args.solver not in (Solver.AUTO, Solver.LIST)


def _as_trained(args: argparse.Namespace, job: Job) -> _Task | None:
    """Returns the task of which training takes the plans; None if flags ask for another, or it makes none like this."""
    layers = _layers_of(job)
    if _asks_for_another(args) or layers is None:
        return None
    profile = profile_of(job, layers)
    terms = terms_of(job, layers, profile, known_ties(job, layers))
    if terms is None:
        return None
    grid = grid_of(job, stages_of(job, layers, profile), terms)
    if grid is None:
        return None
    failed, moved = _failures(args, grid, terms.technique, profile)
    return _Task(
        grid=grid,
        failed=failed,
        moves=moved,
        technique=terms.technique,
        time_limit_s=math.inf,
        engine=Solver.LIST,
        fill=None,
        tries=tries_for(grid.num_operations, at_once=bool(failed)),
    )


def _given(args: argparse.Namespace, num_stages: int) -> tuple[Costs, tuple[LayerRange, ...]]:
    """Returns the costs that the flags give; each stage is one layer."""
    costs = parse_costs(
        num_stages,
        costs=args.costs or "1,1,1",
        comm=args.comm or "0",
        optimizer=args.optimizer_cost or "0",
        split=args.split_cost,
        memory=args.memory,
    )
    return costs, split_evenly(num_stages, num_stages)


def _profiled(
    args: argparse.Namespace, job: Job | None, profile: Profile, grid: tuple[int, int, int]
) -> tuple[Costs, tuple[LayerRange, ...]]:
    """Returns the costs of a profile, in seconds and bytes, and the stages into which it is cut best."""
    for flag in ("costs", "comm", "optimizer_cost", "split_cost"):
        if getattr(args, flag) is not None:
            name = f"--{flag.replace('_', '-')}"
            raise ConfigError(
                f"{name} {getattr(args, flag)}: --profile {args.profile} gives that: expected one of both"
            )
    expected = None if job is None else num_layers(job)
    if expected not in (None, len(profile.layers)):
        raise ConfigError(
            f"--profile {args.profile} has {len(profile.layers)} layers, but the model of {args.job} has {expected}: "
            "is it the profile of another model?"
        )
    room = None if args.memory is None else _bytes(args.memory)
    copies = 1 if job is not None and job.resilience.commit == "undo" else 2
    num_pipelines, num_stages, microbatches = grid
    sums, _ = most_held((microbatches,) * num_pipelines, chunks=None if job is None else job.train.sum_chunks)
    costs = costs_from_profile(profile, capacity_bytes=room, copies=copies, sums=sums)
    return costs, balanced_stages(costs, num_stages)


def _parse_fill(args: argparse.Namespace) -> tuple[int, Path] | None:
    failures: int | None = args.all_failures
    folder: Path | None = args.out
    if failures is None and folder is None:
        return None
    if failures is None or folder is None:
        raise ConfigError("--all-failures N and --out DIR go together: expected both, to fill a plan library")
    if args.normalise == Normalisation.PAPER:
        raise ConfigError(
            "--normalise paper: a library shares plans between counts, which needs assignments that contain one "
            "another: expected min-max with --all-failures"
        )
    return failures, folder


def _checked_grid(shape: tuple[int, int] | None, microbatches: int | None) -> tuple[int, int, int]:
    """Returns pipelines, stages and micro-batches, if all are given and some machine has the memory to plan them."""
    if shape is None:
        raise ConfigError("--grid is missing: expected pipelines x stages, such as 3x4, or a job file that has them")
    if microbatches is None:
        raise ConfigError("--microbatches is missing: expected a whole number, or a job file that has it")
    pipelines, stages = shape
    if pipelines * stages > _MOST_WORKERS or 3 * pipelines * stages * microbatches > _MOST_OPERATIONS:
        raise ConfigError(
            f"--grid {pipelines}x{stages} with {microbatches} micro-batches is more than can be planned: expected at "
            f"most {_MOST_WORKERS} workers and {_MOST_OPERATIONS} operations"
        )
    return pipelines, stages, microbatches


def _bytes(text: str) -> float:
    """The memory of a worker, where a profile gives all else."""
    try:
        return above_0("bytes, such as 16e9")(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--memory {error}") from None


def _known(failed: frozenset[WorkerId], there: tuple[WorkerId, ...]) -> tuple[WorkerId, ...]:
    for worker in sorted(failed - set(there)):
        raise ConfigError(f"--failed {worker}: no such worker, the grid has 0.0 to {there[-1]}")
    return tuple(sorted(failed))


def _failures(
    args: argparse.Namespace, grid: CostedGrid, technique: Technique, profile: Profile | None
) -> tuple[tuple[WorkerId, ...], tuple[Move, ...]]:
    """Returns the places that are empty, and who moved so that it is these."""
    failed = _known(args.failed, regular_placement(grid.pipelines, grid.stages).workers)
    how = Normalisation(args.normalise or Normalisation.MIN_MAX)
    if not failed:
        return _placed(args.failures, grid, technique, how), ()
    if args.normalise is None:
        return failed, ()
    moved, empty = moves(
        grid, failed, assigned(grid, len(failed), technique.rules, how), _state_bytes(profile, grid.stages)
    )
    return empty, moved


def _state_bytes(profile: Profile | None, stages: tuple[LayerRange, ...]) -> tuple[int, ...] | None:
    """What a worker of stage 0, 1, ... must get to hold its layers; None where no profile tells."""
    if profile is None:
        return None
    return tuple(sum(profile.layers[layer].state_bytes for layer in layers.indices) for layers in stages)


def _placed(count: int, grid: CostedGrid, technique: Technique, how: Normalisation) -> tuple[WorkerId, ...]:
    """Places a number of failures where they cost least."""
    num_stages = len(grid.stages)
    most = (grid.pipelines - 1) * num_stages
    if count > most:
        raise InfeasiblePlan(
            f"--failures {count}: a grid of {grid.pipelines}x{num_stages} survives at most {most}, "
            "as every stage has to keep one worker"
        )
    return normalised(grid, count, technique.rules, how)
