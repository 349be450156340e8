"""What a healthy step costs: Holdfast as it is by default, with exact numerics, next to torch's own pipeline schedules.

Same grid, layers, data, micro-batches and optimizer, no dropout, one compute thread per worker. The sides take turns
within one invocation, so that the noise of the machine hits all of them; each must reach the same losses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.config.profiles import save_profile
from holdfast.errors import HoldfastError
from holdfast.profiling.profiler import measure_profile
from holdfast.runtime.node.signals import Interrupted
from holdfast.settings.planning import healthy_plan, profile_of
from measure import Interval, Recorder, interval, print_table, progress, ratio_interval, time_limit, verdict
from measured_run import CpuWindow, watched_run
from torch_pipelines import SCHEDULES, BaselineFailed, run_baseline

OURS = "exact"
SIDES = (*SCHEDULES, OURS)
TARGETS = {"step_s": 0.97, "cpu_s": 1.03}
"""Next to the best of torch's schedules."""
_LOSS_TOLERANCE = 1e-3
_HEADER_BYTES = 64
_ITERATIONS = 30
"""Of the profiler."""
_TIMES = {"step_s": "wall", "cpu_s": "CPU"}


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed or the sides did not compute the same."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
        if options.profiled:
            options.profile = str(Path(folder) / "profile.json")
            save_profile(measure_profile(_job(options), iterations=_ITERATIONS), options.profile)
        return _compare(options)


def _compare(options: argparse.Namespace) -> int:
    kind = "_profiled" if options.profiled else ""
    recorder = Recorder(f"healthy_step_{options.grid}{kind}", vars(options))
    order = random.Random(0)
    for repetition in range(options.repetitions):
        for side in order.sample(SIDES, k=len(SIDES)):
            recorder.begin()
            row = recorder.add(side=side, repetition=repetition, **measure(side, options))
            progress(f"run {repetition + 1}/{options.repetitions} {side}: {_brief(row)}")
    summary = summarise(recorder.rows, bytes_per_step(options))
    _show(summary)
    recorder.write(summary)
    return int(bool(summary["problems"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--grid", default="2x2", help="pipelines x stages, at least two stages; or 3x4")
    parser.add_argument("--microbatches", type=int, default=6, help="per pipeline")
    parser.add_argument("--microbatch-size", type=int, default=4, help="samples")
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks")
    parser.add_argument("--width", type=int, default=128, help="of the residual stream")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--context", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed in a run")
    parser.add_argument("--repetitions", type=int, default=10, help="runs of each side")
    parser.add_argument("--profiled", action="store_true", help="Holdfast has a profile, which chooses its technique")
    parser.add_argument("--quick", action="store_true", help="2 repetitions of 5 steps")
    parser.add_argument("--limit-s", type=float, default=600.0, help="a run longer than this has failed")
    options = parser.parse_args()
    options.profile = None
    if options.quick:
        options.repetitions, options.steps = 2, 5
    return options


def _job(options: argparse.Namespace, profile: str | None = None) -> Job:
    pipelines, stages = map(int, options.grid.split("x"))
    return parse_job(
        {
            "name": "healthy-step",
            "model": {
                "kind": "gpt",
                "layers": options.layers,
                "width": options.width,
                "heads": options.heads,
                "context": options.context,
                "dropout": 0,
            },
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {
                "pipelines": pipelines,
                "stages": stages,
                "microbatches": options.microbatches,
                "microbatch_size": options.microbatch_size,
            },
            "optimizer": {"kind": "adamw", "lr": 3e-4},
            # One step more than is timed, so that the end of the job lies outside the window.
            "train": {"steps": options.warmup + options.steps + 1, "profile": profile},
        }
    )


def measure(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one side once; returns the row, with ``error`` set and no numbers if the run failed."""
    window = CpuWindow(first=options.warmup - 1, last=options.warmup + options.steps - 1)
    job = _job(options, options.profile if side == OURS else None)
    run: Callable[[Job, CpuWindow], tuple[list[float], list[float]]]
    run = _run_holdfast if side == OURS else partial(_run_baseline, side)
    try:
        with time_limit(options.limit_s):
            ends, losses = run(job, window)
        workers, others = window.per_step()
    except (HoldfastError, BaselineFailed, Interrupted, TimeoutError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    timed = [after - before for before, after in pairwise(ends[window.first : window.last + 1])]
    return {
        "error": None,
        "step_s": statistics.median(timed),
        "cpu_s": workers,
        "control_cpu_s": others,
        "steps_s": timed,
        "losses": losses,
    }


def _run_baseline(schedule: str, job: Job, window: CpuWindow) -> tuple[list[float], list[float]]:
    run = run_baseline(job, schedule=schedule, on_step=window.on_step)
    return list(run.ends), list(run.losses)


def _run_holdfast(job: Job, window: CpuWindow) -> tuple[list[float], list[float]]:
    """Returns when each step was committed, and the losses."""
    summary, losses = watched_run(job, window)
    return [time for _, time in summary.report.commits], losses


def bytes_per_step(options: argparse.Namespace) -> dict[str, dict[str, dict[str, int]]]:
    """Computes, from the plan and the stages themselves, what every worker sends in a step.

    Returns:
        Per side and worker, bytes: ``point_to_point`` with headers; ``messages`` handed to reductions; ``all_reduce``
        what a ring then sends for them, ``2 (n - 1) / n`` times as much among n workers; ``sent`` in all.
    """
    return {SCHEDULES[0]: _baseline_bytes(_job(options)), OURS: _holdfast_bytes(_job(options, options.profile))}


def _holdfast_bytes(job: Job) -> dict[str, dict[str, int]]:
    from holdfast.config.laying_out import sums_of
    from holdfast.core.instructions import Reduce, Send
    from holdfast.core.lower import lower
    from holdfast.runtime.engine.build import build_stage
    from holdfast.runtime.engine.probing import probe
    from holdfast.runtime.tensors import num_bytes

    assert job.model.__struct_config__.tag == "gpt"
    layers = job.model.layers + 2  # type: ignore[union-attr]
    plan = healthy_plan(job, layers, profile_of(job, layers))
    probed, found = probe(job), {}
    for worker in plan.workers:
        parts = build_stage(job, plan, worker, probed.boundaries)
        program = next(program for program in lower(plan, probed.ties) if program.worker == worker)
        point, messages, ring = 0, 0, 0.0
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                spec = parts.boundaries[instruction.boundary - 1] if instruction.boundary else parts.vote
                point += num_bytes(spec) + _HEADER_BYTES
            elif isinstance(instruction, Reduce):
                of_each = parts.stage.message_size(instruction.reduction.layers)
                size = of_each.header + sums_of(job) * of_each.part
                messages += size
                ring += _ring(size, len(instruction.reduction.workers))
        found[str(worker)] = _traffic(point, messages, ring)
    return found


def _baseline_bytes(job: Job) -> dict[str, dict[str, int]]:
    from holdfast.runtime.engine.modules import build_model
    from holdfast.runtime.engine.probing import probe
    from holdfast.runtime.tensors import num_bytes

    grid, model = job.grid, build_model(job)
    plan = healthy_plan(job, len(model.layers))
    shared = model.layers[0].get_parameter("token.weight").nbytes
    probed, found = probe(job), {}
    for worker in plan.workers:
        owned = plan.placement.layers_of(worker)
        own = sum(p.nbytes for index in owned for p in model.layers[index].parameters())
        at_end = worker.stage in (0, grid.stages - 1)
        cuts = [at - 1 for at in (owned[0], owned[-1] + 1) if 0 < at < len(model.layers)]
        outgoing = [num_bytes(probed.boundaries[cut]) for cut in cuts]
        ring = _ring(own - shared * at_end, grid.pipelines) + _ring(shared * at_end, 2 * grid.pipelines)
        found[str(worker)] = _traffic(grid.microbatches * sum(outgoing), own, ring)
    return found


def _ring(size: int, members: int) -> float:
    return 2 * (members - 1) / members * size


def _traffic(point: int, messages: int, ring: float) -> dict[str, int]:
    return {"point_to_point": point, "messages": messages, "all_reduce": round(ring), "sent": round(point + ring)}


def summarise(rows: list[dict[str, Any]], sent: dict[str, dict[str, dict[str, int]]]) -> dict[str, Any]:
    """Returns medians, ratios and bytes, and whatever went wrong."""
    good = {
        side: {row["repetition"]: row for row in rows if row["side"] == side and not row["error"]} for side in SIDES
    }
    return {
        "problems": [f"{row['side']} {row['repetition']}: {row['error']}" for row in rows if row["error"]]
        + _different_losses(good),
        "sides": {
            side: {
                metric: interval([row[metric] for row in good[side].values()]).to_json()
                for metric in ("step_s", "cpu_s", "control_cpu_s")
            }
            for side in SIDES
        },
        "ratios": [
            _ratio(good[OURS], good[schedule], f"{OURS} / {schedule}", metric, TARGETS[metric])
            for metric in TARGETS
            for schedule in SCHEDULES
        ],
        "bytes": sent,
    }


def _different_losses(good: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Every run trains the same model on the same samples: the losses may differ by rounding only."""
    runs = [(side, row["losses"]) for side in SIDES for row in good[side].values()]
    if not runs:
        return []
    first, reference = runs[0]
    return [
        f"{side} reaches other losses than {first}: {losses} and {reference}"
        for side, losses in runs[1:]
        if len(losses) != len(reference)
        or any(abs(a - b) > _LOSS_TOLERANCE * abs(b) for a, b in zip(losses, reference, strict=True))
    ]


def _ratio(
    over: dict[int, dict[str, Any]], under: dict[int, dict[str, Any]], name: str, metric: str, target: float
) -> dict[str, Any]:
    both = sorted(over.keys() & under.keys())
    found = ratio_interval([(over[n][metric], under[n][metric]) for n in both])
    return {"ratio": name, "metric": metric, "target": target, "verdict": verdict(found, target), **found.to_json()}


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    return f"step {row['step_s']:.3f} s, CPU {row['cpu_s']:.3f} s (control {row['control_cpu_s']:.3f} s)"


def _show(summary: dict[str, Any]) -> None:
    sides = [
        [side, *(_interval(found[metric]).show(1000, 0) for metric in ("step_s", "cpu_s", "control_cpu_s"))]
        for side, found in summary["sides"].items()
    ]
    header = ["side", "wall ms per step", "CPU ms per step, all workers", "CPU ms per step, agent and coordinator"]
    print_table("Healthy step: median [95 % interval]", header, sides)
    ratios = [
        [row["ratio"], _TIMES[row["metric"]], _interval(row).show(1, 3), str(row["target"]), row["verdict"]]
        for row in summary["ratios"]
    ]
    print_table("Ratios of medians", ["ratio", "time", "ratio [95 %]", "target", "verdict"], ratios)
    kinds = ("point_to_point", "messages", "all_reduce", "sent")
    sizes = [
        [worker, side, *(f"{traffic[kind] / 1024:.0f}" for kind in kinds)]
        for worker in summary["bytes"][OURS]
        for side, of in summary["bytes"].items()
        for traffic in [of[worker]]
    ]
    print_table("KiB that a worker sends per step (computed)", ["worker", "side", *kinds], sizes)
    for problem in summary["problems"]:
        print(f"PROBLEM {problem}")


def _interval(found: dict[str, Any]) -> Interval:
    return Interval(**{key: found[key] for key in ("median", "low", "high", "count")})


if __name__ == "__main__":
    raise SystemExit(main())
