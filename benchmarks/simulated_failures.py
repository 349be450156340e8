"""What a step costs in which ``holdfast.SimulatedFailure`` fails, in processor time, of a script by itself.

The convnet of ``examples/ddp_digits.py`` is trained alone, once as it is (the baseline) and once with each way to
recover from the failure of some of the workers in one step. Each run is a process of its own, the ways take turns.
Where a failure is simulated a bucket ends where it strikes, in every step: what that costs is beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from typing import Any

from measure import Countdown, Recorder, interval, print_table, progress, ratio_interval, verdict

BASELINE, LOSSY_FORWARD, ROLLBACK = "baseline", "lossy-forward", "rollback"
TARGETS = {LOSSY_FORWARD: 1.05, ROLLBACK: 2.0}
SIDES = (BASELINE, *TARGETS)
_WARM = 4
_RUN_S = 4.0
_LEAST_S = 0.020


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    recorder = Recorder("simulated_failures", vars(options))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "sklearn.datasets", "holdfast.runtime.loop.session"])
    countdown = Countdown(len(SIDES) * options.repetitions, _RUN_S)
    countdown.announce()
    with ProcessPoolExecutor(max_workers=1, mp_context=context, max_tasks_per_child=1) as processes:
        for repetition in range(options.repetitions):
            first = repetition % len(SIDES)
            for side in (*SIDES[first:], *SIDES[:first]):
                recorder.begin()
                row = recorder.add(side=side, repetition=repetition, **_measured(processes, side, options))
                countdown.next(f"{side}: {_brief(row)}")
    summary = _summarise(recorder.rows)
    _show(summary)
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="that are simulated")
    parser.add_argument("--casualties", type=int, default=2, help="of lossy-forward; of rollback it is all workers")
    parser.add_argument("--percent", type=int, default=50, help="of the gradients that are summed before the failure")
    parser.add_argument("--width", type=int, default=16, help="channels of the convnet")
    parser.add_argument("--microbatches", type=int, default=16, help="of a step")
    parser.add_argument("--size", type=int, default=32, help="samples of a micro-batch")
    parser.add_argument("--steps", type=int, default=24, help="of a run; the failure is in the middle of them")
    parser.add_argument("--repetitions", type=int, default=40, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="2 repetitions")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 2
    return options


def _measured(processes: ProcessPoolExecutor, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a run in a process of its own."""
    try:
        steps = processes.submit(train_side, side, options).result(options.limit_s)
    except (TimeoutError, BrokenProcessPool) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    fails = options.steps // 2
    others = [*steps[_WARM:fails], *steps[fails + 1 :]]
    return {"error": None, "steps_s": steps, "step_s": steps[fails], "other_s": statistics.median(others)}


def train_side(side: str, options: argparse.Namespace) -> list[float]:
    """Trains alone; returns the processor seconds of each step. To be called once in a process."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import TensorDataset

    import holdfast

    hf = holdfast.session()
    digits, width = load_digits(), options.width
    images = torch.tensor(digits.images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(width * 64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    if side != BASELINE:
        optimizer = holdfast.SimulatedFailure(
            optimizer,
            step=options.steps // 2,
            workers=options.workers,
            casualties=options.casualties if side == LOSSY_FORWARD else None,
            progress=options.percent,
            recovery=side,
        )
    model, _ = hf.prepare(model, optimizer)
    ends = [time.process_time()]
    for step in hf.steps(data, microbatches=options.microbatches, size=options.size, steps=options.steps):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        ends.append(time.process_time())
    return [after - before for before, after in pairwise(ends)]


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    return f"step {row['step_s'] * 1000:.1f} ms, others {row['other_s'] * 1000:.1f} ms"


def _summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = {(row["side"], row["repetition"]): row for row in rows if not row["error"]}
    summary: dict[str, Any] = {}
    for side in SIDES:
        mine = [row for (name, _), row in good.items() if name == side]
        pairs = [(good[side, n], good[BASELINE, n]) for name, n in good if name == side and (BASELINE, n) in good]
        summary[side] = {
            "runs": len(mine),
            "failed": sum(row["side"] == side for row in rows) - len(mine),
            "target": TARGETS.get(side),
            "step_s": interval([row["step_s"] for row in mine]),
            "other_s": interval([row["other_s"] for row in mine]),
            "step / baseline": ratio_interval([(row["step_s"], base["other_s"]) for row, base in pairs]),
            "step / others": ratio_interval([(row["step_s"], row["other_s"]) for row in mine]),
            "others / baseline": ratio_interval([(row["other_s"], base["other_s"]) for row, base in pairs]),
        }
    return summary


def _show(summary: dict[str, Any]) -> None:
    header = ["side", "runs (failed)", "that step, ms", "other steps, ms", "by the baseline's", "target", "verdict"]
    rows = [
        [
            side,
            f"{found['runs']} ({found['failed']})",
            *(found[name].show(1000) for name in ("step_s", "other_s")),
            found["step / baseline"].show(1, 3),
            "-" if found["target"] is None else f"<= {found['target']}",
            "-" if found["target"] is None else verdict(found["step / baseline"], found["target"]),
            found["step / others"].show(1, 3),
            "-" if found["target"] is None else verdict(found["step / others"], found["target"]),
            found["others / baseline"].show(1, 3),
        ]
        for side, found in summary.items()
    ]
    title = "processor time of the step that fails: median [95 % interval]"
    print_table(title, [*header, "by its other steps", "verdict", "these by the baseline's"], rows)
    least = summary[BASELINE]["other_s"].median
    if least is not None and least < _LEAST_S:
        progress(
            f"a step takes {least * 1000:.1f} ms, less than {_LEAST_S * 1000:.0f}: too little to tell; give --width"
        )


if __name__ == "__main__":
    raise SystemExit(main())
