"""What a lost stage of a pipeline without replicas costs: everybody goes back to the checkpoint, or it is replayed.

As in SWIFT, section 7.1: a checkpoint at step 20, a failure in step 30. A worker is killed by its process id, by a
thread that knows nothing but the log of events; a spare takes its place. Compute is emulated, everything else is real.

With ``--models`` compute is real, too, of small models on the same kind of pipeline; a run without a failure says how
long a step takes, and in which bits all must end.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from holdfast import Job, Summary
from holdfast.config.load import parse_job
from holdfast.core.ids import WorkerId
from holdfast.core.profile import Profile, costs_from_profile
from holdfast.schedule.evaluate import evaluate
from holdfast.settings.planning import healthy_plan
from holdfast.telemetry.events import Agreed, Replaying, read_events
from measure import Recorder, interval, print_table, progress
from measured_run import measured_run, op_profile, step_lengths
from remainder import Killer, struck

_OP_MS = 5.0
WAYS = ("checkpoint", "replay", "parallel")
_ADAMW = {"kind": "adamw", "lr": 1e-3}
MODELS = {
    "gpt": {
        "model": {"kind": "gpt", "layers": 4, "width": 128, "heads": 4, "context": 64},
        "data": {"kind": "text", "path": "stdlib"},
        "optimizer": _ADAMW,
    },
    "bert": {
        "model": {"kind": "bert", "layers": 4, "width": 128, "heads": 4, "context": 64},
        "data": {"kind": "text", "path": "stdlib"},
        "optimizer": _ADAMW,
    },
    "vit": {
        "model": {"kind": "vit", "layers": 4, "width": 128, "heads": 4, "patch": 1},
        "data": {"kind": "digits"},
        "optimizer": _ADAMW,
    },
}
"""What ``--models`` trains: each a part of a job file."""


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    if options.models:
        return _replay_models(options)
    recorder = Recorder("replays" if options.op_ms == _OP_MS else f"replays_{options.op_ms:g}ms", vars(options))
    cells = list(product(options.microbatches, WAYS))
    for repetition in range(options.repetitions):
        for microbatches, way in cells:
            recorder.begin()
            found = measure(microbatches, way, options)
            row = recorder.add(microbatches=microbatches, way=way, repetition=repetition, **found)
            told = row["error"] or f"{row['recovery_s']:.2f} s to be back at step {options.kill_step}"
            progress(f"{microbatches} micro-batches, {way}: {told}")
    summary = [_summary(microbatches, options, recorder.rows) for microbatches in options.microbatches]
    _show(summary)
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[32, 16])
    parser.add_argument("--op-ms", type=float, default=_OP_MS, help="length of every emulated F, I and W")
    parser.add_argument("--checkpoint-step", type=int, default=20)
    parser.add_argument("--kill-step", type=int, default=30)
    parser.add_argument("--stage", type=int, default=8, help="whose worker is killed")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=240.0, help="a run longer than this has failed")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[], help="train these instead")
    parser.add_argument("--model-stages", type=int, default=3, help="with --models; its middle one is killed")
    parser.add_argument("--model-microbatches", type=int, default=6, help="with --models")
    return parser.parse_args()


def _replay_models(options: argparse.Namespace) -> int:
    """Trains real models with one kill, each way in turn; returns 1 if any run failed."""
    recorder = Recorder("replays_models", vars(options))
    options.stages, options.stage = options.model_stages, options.model_stages // 2
    for repetition, name in product(range(options.repetitions), options.models):
        recorder.begin()
        usual = _healthy(name, options)
        recorder.add(model=name, way="healthy", repetition=repetition, **usual)
        progress(f"{name}, healthy: {usual['error'] or usual['step_s']} s per step")
        for way in () if usual["error"] else WAYS:
            recorder.begin()
            job = _model_job(name, way, options)
            row = recorder.add(
                model=name, way=way, repetition=repetition, **_struck(job, way, usual["step_s"], options)
            )
            told = row["error"] or f"{row['recovery_s']:.2f} s to be back at step {options.kill_step}"
            progress(f"{name}, {way}: {told}")
    rows = [row for row in recorder.rows if not row["error"]]
    summary = [_model_summary(name, options, [row for row in rows if row["model"] == name]) for name in options.models]
    _show(summary, "model")
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows) or not all(row["same_weights"] for row in summary))


def _healthy(name: str, options: argparse.Namespace) -> dict[str, Any]:
    def row(summary: Summary) -> dict[str, Any]:
        lengths = [seconds for step, seconds in step_lengths(summary).items() if step < options.kill_step]
        return {"error": None, "step_s": median(lengths), "weights_sha256": summary.weights_sha256}

    return measured_run(_model_job(name, "replay", options), row, limit_s=options.limit_s)


def _model_summary(name: str, options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    usual = interval([row["step_s"] for row in rows if row["way"] == "healthy"])
    struck = [row for row in rows if row["way"] != "healthy"]
    bubbles = (options.stages - 1) / (options.model_microbatches + options.stages - 1)
    compared = _compared(struck, bubbles)
    return {"model": name, "step_s": usual, **compared, "same_weights": len({r["weights_sha256"] for r in rows}) == 1}


def measure(microbatches: int, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains once with one kill; returns the row, with ``error`` set and no numbers if the run failed."""
    job = _job(microbatches, way, options)
    profile = op_profile(options.stages, options.stages, options.op_ms / 1000)
    step_s = evaluate(healthy_plan(job, options.stages), costs_from_profile(profile)).makespan
    return _struck(job, way, step_s, options, profile)


def _struck(
    job: Job, way: str, step_s: float, options: argparse.Namespace, profile: Profile | None = None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
        killer = Killer(
            run_dir=Path(folder) / "run",
            worker=WorkerId(0, options.stage),
            step=options.kill_step - 1,
            delay_s=step_s / 2,
            workers=options.stages,
        )
        summary = struck(job, profile, killer, options.limit_s)
        return {"error": summary} if isinstance(summary, str) else _row(summary, killer, way, step_s, options)


def _job(microbatches: int, way: str, options: argparse.Namespace) -> Job:
    model = {"kind": "gpt", "layers": options.stages - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0}
    return parse_job(
        {
            "name": "replays",
            "model": model,
            "data": {"kind": "text", "path": __file__},
            "grid": {"pipelines": 1, "stages": options.stages, "microbatches": microbatches},
            **_recovery(way, options),
        }
    )


def _model_job(name: str, way: str, options: argparse.Namespace) -> Job:
    grid = {"pipelines": 1, "stages": options.stages, "microbatches": options.model_microbatches, "microbatch_size": 4}
    return parse_job({"name": name, **MODELS[name], "grid": grid, **_recovery(way, options)})


def _recovery(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """How a job recovers, and for how long it trains."""
    return {
        "train": {"steps": options.kill_step + 2, "technique": "1f1b"},
        "resilience": {"spares": 1},
        "checkpoint": {"every": options.checkpoint_step},
        "logging": {
            "use": "off" if way == "checkpoint" else "on",
            "helpers": options.stages - 1 if way == "parallel" else 0,
        },
    }


def _row(summary: Summary, killer: Killer, way: str, step_s: float, options: argparse.Namespace) -> dict[str, Any]:
    events = read_events(killer.run_dir / "events.jsonl")
    agreed = [(at, event) for at, event in events if isinstance(event, Agreed) and event.generation > 1]
    replays = [event for _, event in events if isinstance(event, Replaying)]
    if killer.killed_at is None or len(agreed) != 1 or bool(replays) == (way == "checkpoint"):
        return {"error": f"{len(agreed)} agreement(s), {len(replays)} replay(s)"}
    commits = {step: at for step, at in summary.report.commits if at > killer.killed_at}
    first, (agreed_at, last) = options.checkpoint_step, agreed[0]
    expected = first if way == "checkpoint" else options.kill_step
    if last.step != expected:
        return {"error": f"all went on from step {last.step}, not from {expected}"}
    back_at = commits[options.kill_step - 1] if way == "checkpoint" else agreed_at
    return {
        "error": None,
        "planned_step_s": step_s,
        "recovery_s": back_at - killer.killed_at,
        "to_commit_s": commits[options.kill_step] - killer.killed_at,
        "weights_sha256": summary.weights_sha256,
    }


def _summary(microbatches: int, options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    fine = [row for row in rows if row["microbatches"] == microbatches and not row["error"]]
    bubbles = (options.stages - 1) / (microbatches + options.stages - 1)
    return {"microbatches": microbatches, **_compared(fine, bubbles)}


def _compared(fine: list[dict[str, Any]], bubbles: float) -> dict[str, Any]:
    times = {way: interval([row["recovery_s"] for row in fine if row["way"] == way]) for way in WAYS}
    base = times["checkpoint"].median
    return {
        "runs": len(fine),
        **{f"{way}_s": times[way] for way in WAYS},
        "bound": bubbles,
        **{f"{way}_saves": _saved(times[way].median, base) for way in WAYS[1:]},
        "same_weights": len({row["weights_sha256"] for row in fine}) == 1,
    }


def _saved(seconds: float | None, base: float | None) -> float | None:
    return None if seconds is None or not base else 1 - seconds / base


def _show(summary: list[dict[str, Any]], of: str = "microbatches") -> None:
    header = [
        "micro-batches" if of == "microbatches" else of,
        *(f"{way}, s" for way in WAYS),
        "bubbles",
        "replay saves",
        "parallel saves",
        "same bits",
    ]
    rows = [
        [
            str(row[of]),
            *(row[f"{way}_s"].show(1, 2) for way in WAYS),
            f"{row['bound']:.1%}",
            *("-" if row[f"{way}_saves"] is None else f"{row[f'{way}_saves']:.1%}" for way in WAYS[1:]),
            "yes" if row["same_weights"] else "NO",
        ]
        for row in summary
    ]
    print_table("seconds until all are back at the step of the failure: median and 95 % interval", header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
