"""What a loss costs the step that it interrupts: what was lost is run again, or the whole step; compute is emulated.

A worker is killed by its process id, a given share of a step after the commit of the one before, by a thread that knows
nothing but the log of events. Everything but the compute is real.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from holdfast import Job, Summary, train
from holdfast.config.load import parse_job
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile, costs_from_profile
from holdfast.errors import HoldfastError
from holdfast.planning.remainder import plan_remainder, progress_at
from holdfast.schedule.builders import adaptive_plan
from holdfast.schedule.evaluate import evaluate
from holdfast.settings.planning import healthy_plan
from holdfast.telemetry.events import Agreed, StepOps, WorkerReady, read_events
from measure import Recorder, interval, print_table, progress, time_limit
from measured_run import op_profile

TARGET_S, WITHIN = 0.120, 0.05
_LAYERS = 12
_MOMENT_S = 0.001


@dataclass(slots=True, kw_only=True)
class Killer:
    """Kills one worker's process, so long after the commit of a step.

    Attributes:
        run_dir: of the job.
        worker: whose process.
        step: behind whose commit.
        delay_s: how long behind it.
        workers: how many there are.
        killed_at: when it was done; None before.
        begun_at: when the step behind began: the last commit of ``step``.
    """

    run_dir: Path
    worker: WorkerId
    step: int
    delay_s: float
    workers: int
    killed_at: float | None = None
    begun_at: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Waits, and kills."""
        while not self.over.is_set():
            told = read_events(self.run_dir / "events.jsonl") if (self.run_dir / "events.jsonl").exists() else []
            done = [at for at, event in told if isinstance(event, StepOps) and event.step == self.step]
            if len(done) == self.workers:
                pids = {event.worker: event.pid for _, event in told if isinstance(event, WorkerReady)}
                self.begun_at = max(done)
                time.sleep(max(0.0, self.begun_at + self.delay_s - time.monotonic()))
                self.killed_at = time.monotonic()
                os.kill(pids[str(self.worker)], signal.SIGKILL)
                return
            self.over.wait(_MOMENT_S)


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    recorder = Recorder("remainder", vars(options))
    cells = list(product(range(options.stages), options.shares))
    for repetition in range(options.repetitions):
        for stage, share in cells:
            for whole in (False, True) if repetition < options.whole else (False,):
                recorder.begin()
                row = recorder.add(
                    stage=stage,
                    share=share,
                    whole=whole,
                    repetition=repetition,
                    **measure(stage, share, whole, options),
                )
                progress(f"stage {stage} at {share:.0%}, {'whole' if whole else 'kept'}: {_brief(row)}")
    summary = [_summary(stage, share, recorder.rows) for stage, share in cells]
    _show(summary)
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=3)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=6, help="per pipeline")
    parser.add_argument("--op-ms", type=float, default=50.0, help="length of every emulated F, I and W")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.5, 0.9], help="of the step, at the kill")
    parser.add_argument("--repetitions", type=int, default=10, help="runs per stage and share")
    parser.add_argument("--whole", type=int, default=2, help="of these, how many also with the whole step run again")
    parser.add_argument("--kill-step", type=int, default=3, help="the step in which the worker is killed")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a run longer than this has failed")
    return parser.parse_args()


def measure(stage: int, share: float, whole: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Trains once with one kill; returns the row, with ``error`` set and no numbers if the run failed."""
    job, profile = _job(whole, options), op_profile(_LAYERS, options.stages, options.op_ms / 1000)
    plan, victim = healthy_plan(job, _LAYERS), WorkerId(options.pipelines // 2, stage)
    step_s = evaluate(plan, costs_from_profile(profile)).makespan
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
        killer = Killer(
            run_dir=Path(folder) / "run",
            worker=victim,
            step=options.kill_step - 1,
            delay_s=share * step_s,
            workers=len(plan.workers),
        )
        summary = struck(job, profile, killer, options.limit_s)
        return {"error": summary} if isinstance(summary, str) else _row(summary, killer, plan, profile)


def struck(job: Job, profile: Profile | None, killer: Killer, limit_s: float) -> Summary | str:
    """Trains beside a killer, with emulated compute if there is a profile; returns how it went, or why it failed."""
    thread = threading.Thread(target=killer.run, daemon=True)
    thread.start()
    try:
        with time_limit(limit_s):
            return train(job, run_dir=killer.run_dir, emulate=profile)
    except (HoldfastError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        killer.over.set()
        thread.join()


def _job(whole: bool, options: argparse.Namespace) -> Job:
    tree = {
        "name": "remainder",
        "model": {"kind": "gpt", "layers": _LAYERS - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0},
        "data": {"kind": "text", "path": __file__},
        "grid": {"pipelines": options.pipelines, "stages": options.stages, "microbatches": options.microbatches},
        "train": {"steps": options.kill_step + 2, "technique": "1f1b"},
        "resilience": {"step_log": not whole},
    }
    return parse_job(tree)


def _row(summary: Summary, killer: Killer, plan: Plan, profile: Profile) -> dict[str, Any]:
    if killer.killed_at is None or len(summary.report.failures) != 1:
        return {"error": f"{len(summary.report.failures)} failures instead of one"}
    costs = costs_from_profile(profile)
    elapsed_s = killer.killed_at - killer.begun_at
    left = adaptive_plan(plan, {killer.worker})
    rest = plan_remainder(left, progress_at(plan, costs, elapsed_s, 0, {killer.worker}), costs=costs)
    step_s, commits = evaluate(plan, costs).makespan, dict(summary.report.commits)
    usual_s = statistics.median(commits[b] - commits[a] for a, b in pairwise(range(killer.step + 1)))
    extra_s = commits[killer.step + 1] - commits[killer.step] - usual_s
    (agreed,) = [
        e for _, e in read_events(killer.run_dir / "events.jsonl") if isinstance(e, Agreed) and e.generation > 1
    ]
    return {
        "error": None,
        "elapsed_s": elapsed_s,
        "planned_step_s": step_s,
        "usual_step_s": usual_s,
        "extra_s": extra_s,
        "predicted_s": elapsed_s + rest.lasts - step_s,
        "beyond_s": extra_s - (elapsed_s + rest.lasts - step_s),
        "goes_on": agreed.goes_on,
        "again": agreed.recomputed_microbatches,
        "redone": len(agreed.redone),
        "regenerated": len(agreed.regenerated),
        "failure": summary.report.failures_json()[0],
    }


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    return (
        f"extra {row['extra_s'] * 1000:.0f} ms, predicted {row['predicted_s'] * 1000:.0f} ms, "
        f"{row['again']} pairs run again"
    )


def _summary(stage: int, share: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    cell = [row for row in rows if (row["stage"], row["share"]) == (stage, share) and not row["error"]]
    kept, whole = ([row for row in cell if row["whole"] == flag] for flag in (False, True))
    beyond, step_s = interval([row["beyond_s"] for row in kept]), kept[0]["planned_step_s"] if kept else 0.0
    return {
        "stage": stage,
        "share": share,
        "runs": len(kept),
        "extra_s": interval([row["extra_s"] for row in kept]),
        "predicted_s": interval([row["predicted_s"] for row in kept]),
        "beyond_s": beyond,
        "whole_extra_s": interval([row["extra_s"] for row in whole]),
        "again": interval([row["again"] for row in kept]),
        "whole_again": interval([row["again"] for row in whole]),
        "target_met": beyond.median is not None and beyond.median <= TARGET_S + WITHIN * step_s,
    }


def _show(summary: list[dict[str, Any]]) -> None:
    header = [
        "stage",
        "at",
        "runs",
        "extra",
        "predicted",
        "beyond",
        "<= 120 ms",
        "extra, whole",
        "pairs again",
        "whole",
    ]
    rows = [
        [
            str(row["stage"]),
            f"{row['share']:.0%}",
            str(row["runs"]),
            *(row[name].show(1000, 0) for name in ("extra_s", "predicted_s", "beyond_s")),
            "yes" if row["target_met"] else "NO",
            row["whole_extra_s"].show(1000, 0),
            row["again"].show(1, 0),
            row["whole_again"].show(1, 0),
        ]
        for row in summary
    ]
    print_table("one more step than usual, in ms: median and 95 % interval", header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
