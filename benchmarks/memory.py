"""What a guarantee costs in memory: bytes per parameter that a worker holds at its peak, beyond the process itself.

A GPT on a grid of 2 x 2 with AdamW. Each worker's peak (``VmHWM``, which the kernel keeps) over its own parameters,
less the peak of the same worker of a model of next to no size; the largest over the workers counts. Plain torch holds
16: parameters, gradients and two moments in float32.

With ``--step-log`` instead: what keeping what was handed on in a step costs, in a job of large boundaries, run by turns
with ``resilience.step_log`` and without; next to what the planner says that each worker keeps at most.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from holdfast import Job, train
from holdfast.config.load import parse_job
from holdfast.control.messages import Progress
from holdfast.core.ids import WorkerId
from holdfast.errors import HoldfastError
from holdfast.planning.remainder import logged_bytes
from holdfast.runtime.engine.modules import build_model
from holdfast.runtime.engine.probing import probe
from holdfast.runtime.node.signals import Interrupted
from holdfast.settings.planning import healthy_plan, stages_of
from holdfast.telemetry.events import WorkerReady, read_events
from measure import Recorder, interval, print_table, progress, time_limit

PLAIN = 16.0
TARGETS = {("exact", "shadow"): 36.0, ("exact", "undo"): 26.0, ("fast", "shadow"): 36.0, ("fast", "undo"): 26.0}
_SMALL = 16  # the width of the model whose workers are taken for the process itself


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed or a target was missed."""
    options = _options()
    if options.step_log:
        return _compare_step_logs(options)
    recorder = Recorder("memory", vars(options))
    for numerics, commit in product(("exact", "fast"), ("shadow", "undo")):
        recorder.begin()
        jobs = [_job(options, numerics, commit, width) for width in (options.width, _SMALL)]
        full, bare = (_measure(job, options.limit_s) for job in jobs)
        target = TARGETS[numerics, commit]
        row = recorder.add(numerics=numerics, taken_back=commit, target=target, **_row(jobs[0], full, bare))
        progress(f"{numerics}, {commit}: {row['error'] or round(row['bytes_per_parameter'], 1)}")
    _show(recorder.rows)
    recorder.write([{key: row[key] for key in _KEYS} for row in recorder.rows])
    return int(any(row["error"] or row["bytes_per_parameter"] > row["target"] for row in recorder.rows))


_KEYS = ("numerics", "taken_back", "bytes_per_parameter", "target", "peak_mib", "error")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="blocks of the GPT")
    parser.add_argument("--width", type=int, default=768, help="its width: 768 makes 85 million parameters")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run")
    parser.add_argument("--step-log", action="store_true", help="measure the step log instead")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each side, with --step-log")
    parser.add_argument("--limit-s", type=float, default=280.0, help="a run longer than this has failed")
    return parser.parse_args()


def _job(options: argparse.Namespace, numerics: str, commit: str, width: int) -> Job:
    return parse_job(
        {
            "name": "memory",
            "model": {
                "kind": "gpt",
                "layers": options.layers,
                "width": width,
                "heads": width // min(width, 64),
                "context": 32,
                "dropout": 0,
            },
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {"pipelines": 2, "stages": 2, "microbatches": 2, "microbatch_size": 1},
            "train": {"steps": options.steps, "numerics": numerics},
            "optimizer": {"kind": "adamw"},
            "resilience": {"commit": commit},
            "control": {"hang_s": 20},  # time is not what is measured here
        }
    )


def _compare_step_logs(options: argparse.Namespace) -> int:
    """Runs with the step log and without, by turns; returns 1 if a run failed."""
    recorder = Recorder("memory_step_log", vars(options))
    for repetition in range(options.repetitions):
        for kept in (True, False) if repetition % 2 else (False, True):
            recorder.begin()
            found = _measure(_job_of_large_boundaries(options, kept), options.limit_s)
            recorder.add(repetition=repetition, step_log=kept, error=found.get("error"), peaks=found.get("peaks"))
            progress(f"run {repetition + 1}/{options.repetitions}, step log {kept}: {found.get('error') or 'done'}")
    at_most = handed_on_bytes(_job_of_large_boundaries(options, kept=True))
    summary = [_step_log_of(str(worker), most, recorder.rows) for worker, most in at_most.items()]
    header = ["worker", "without", "with", "more", "kept at most, by the plan"]
    cells = [[row["worker"], *(row[key].show(2**-20, 1) for key in _SIDES), _mib(row["at_most"])] for row in summary]
    print_table("Peak memory of a worker in MiB: median [95 % interval]", header, cells)
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows))


_SIDES = ("without", "with", "more")


def _job_of_large_boundaries(options: argparse.Namespace, kept: bool) -> Job:
    return parse_job(
        {
            "name": "memory-step-log",
            "model": {"kind": "gpt", "layers": 4, "width": 256, "heads": 4, "context": 256, "dropout": 0},
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {"pipelines": 2, "stages": 3, "microbatches": 12, "microbatch_size": 4},
            "train": {"steps": options.steps},
            "resilience": {"step_log": kept},
            "control": {"hang_s": 20},
        }
    )


def handed_on_bytes(job: Job) -> dict[WorkerId, int]:
    """Returns how much each worker hands on to others in a step, in bytes: what it keeps of one at most."""
    sizes = probe(job).sizes
    assert sizes is not None, "of jobs that compute it is known"
    return logged_bytes(healthy_plan(job, len(sizes.boundary_bytes)), sizes.boundary_bytes)


def _step_log_of(worker: str, at_most: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One worker's peaks in bytes, and by how much they differ, run by run."""
    peaks = {
        kept: {row["repetition"]: row["peaks"][worker] for row in rows if row["step_log"] is kept and row["peaks"]}
        for kept in (False, True)
    }
    both = peaks[False].keys() & peaks[True].keys()
    return {
        "worker": worker,
        "without": interval(list(peaks[False].values())),
        "with": interval(list(peaks[True].values())),
        "more": interval([peaks[True][each] - peaks[False][each] for each in sorted(both)]),
        "at_most": at_most,
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def _measure(job: Job, limit_s: float) -> dict[str, Any]:
    """Each worker's peak after the last step, in bytes, by name; or only ``error``."""
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-memory-") as folder:
        run = Path(folder) / "run"

        def on_progress(_: Progress) -> None:
            for _, event in read_events(run / "events.jsonl"):
                if isinstance(event, WorkerReady):
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError, StopIteration):  # it has ended
                        peaks[event.worker] = _peak(event.pid)

        try:
            with time_limit(limit_s):
                train(job, run_dir=run, on_progress=on_progress)
        except (HoldfastError, Interrupted, TimeoutError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"peaks": peaks}


def _peak(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _parameters(job: Job) -> list[int]:
    """How many parameters each stage has."""
    layers = [sum(each.numel() for each in layer.parameters()) for layer in build_model(job).layers]
    return [sum(layers[index] for index in stage.indices) for stage in stages_of(job, len(layers))[0]]


def _row(job: Job, full: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
    if error := full.get("error") or bare.get("error"):
        return {"bytes_per_parameter": None, "peak_mib": None, "error": error}
    own = _parameters(job)
    found = {
        worker: (peak - bare["peaks"][worker]) / own[WorkerId.parse(worker).stage]
        for worker, peak in full["peaks"].items()
    }
    worst = max(found, key=lambda worker: found[worker])
    return {"bytes_per_parameter": found[worst], "peak_mib": full["peaks"][worst] / 2**20, "error": None}


def _show(rows: list[dict[str, Any]]) -> None:
    cells = [
        [
            row["numerics"],
            row["taken_back"],
            "-" if row["error"] else f"{row['bytes_per_parameter']:.1f}",
            f"{row['target']:.0f}",
            "-" if row["error"] else f"{row['peak_mib']:.0f}",
            row["error"] or "",
        ]
        for row in rows
    ]
    header = ["numerics", "taken back by", "bytes per parameter", "target", "peak of that worker, MiB", ""]
    print_table(f"Peak memory of a worker beyond the process itself; plain torch holds {PLAIN:.0f}", header, cells)


if __name__ == "__main__":
    raise SystemExit(main())
