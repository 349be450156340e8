"""Trains a GPT twice: once a worker is killed in mid-step, once nothing fails. Both end with the same bits.

Run it with ``make demo``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from holdfast import Fault, Job, Summary, load_job, train
from holdfast.cli.train import ProgressLine
from holdfast.runtime.node.signals import Interrupted

FAULT = "kill:1.2@5:backward"


def main() -> int:
    """Runs both and prints what happened; returns 0 only if the bits are equal."""
    job = load_job(Path(__file__).with_name("gpt.yaml"))
    grid = job.grid
    print(
        f"A GPT of {job.model.layers} blocks on {grid.pipelines} pipelines x {grid.stages} stages: "  # type: ignore[union-attr]
        f"{grid.pipelines * grid.stages} worker processes, {job.train.steps} steps of {job.samples_per_step} samples."
    )
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        print(f"\nFirst run: worker 1.2 gets SIGKILL in the middle of its backward pass of step 5 ({FAULT}).")
        struck = _run(job, Path(folder, "struck"), Fault.parse(FAULT))
        print("\nSecond run: the same job, nothing fails.")
        healthy = _run(job, Path(folder, "healthy"))
    print("\n" + _compare(struck, healthy))
    return 0 if _equal(struck, healthy) else 1


def _run(job: Job, run_dir: Path, *faults: Fault) -> Summary:
    line = ProgressLine(job, quiet=False)
    try:
        return train(job, run_dir=run_dir, faults=faults, on_event=line.tell, on_progress=line.show)
    finally:
        line.end()


def _equal(struck: Summary, healthy: Summary) -> bool:
    hashes = struck.weights_sha256 is not None and struck.weights_sha256 == healthy.weights_sha256
    return hashes and struck.state_sha256 == healthy.state_sha256 and not struck.unfired


def _compare(struck: Summary, healthy: Summary) -> str:
    (failure,) = struck.report.failures
    ms = {
        "detected": failure.detected_s,
        "agreed on generation and step": failure.agreed_s,
        "connections rebuilt": failure.rebuilt_s,
        "next step committed": failure.resumed_s,
    }
    lines = ["What happened after the kill:"]
    lines += [f"  {1000 * (seconds or 0):7.0f} ms  {name}" for name, seconds in ms.items()]
    lines += [
        f"  {failure.recomputed_microbatches:7d} (layer, micro-batch) pairs of the interrupted step run again",
        f"  {struck.processes_restarted:7d} processes restarted",
        "",
        f"{'':14}{'killed':>24}{'nothing failed':>24}",
        f"{'steps':14}{struck.steps:24d}{healthy.steps:24d}",
        f"{'loss':14}{struck.final_loss:24.12f}{healthy.final_loss:24.12f}",
        "weights_sha256",
        f"  killed          {struck.weights_sha256}",
        f"  nothing failed  {healthy.weights_sha256}",
        "",
        "The weights and the optimizer's state are bitwise equal."
        if _equal(struck, healthy)
        else "NOT EQUAL: this is a bug in Holdfast, please report it.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Interrupted:
        sys.exit("interrupted: every process is ended")
