"""What it costs that a script is tried and watched: the probe's trial, the guard around an item, and comparing.

In this process, of two models: one whose item takes 50 ms and that has 144 parameters, and a small CNN. The trial costs
the time from the end of the first item, which runs anyway, to its own end; the guard the processor time of its calls
around an item. Comparing costs a part of the time of steps, by which N is chosen.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.devices.device import HOST
from holdfast.runtime.loop.guarding import Guard
from holdfast.runtime.loop.hosting import Loop
from holdfast.runtime.loop.session import Session
from holdfast.runtime.loop.stage import LoopStage
from holdfast.runtime.loop.trying import ItemTrial
from holdfast.runtime.loop.turns import LoopAbandoned, Turns
from measure import Recorder, interval, print_table, progress, verdict

ITEM_S = 0.05
TRIAL_TARGET_S, GUARD_TARGET = 1.0, 0.005
MODELS: dict[str, Callable[[], nn.Module]] = {
    "144 parameters, item 50 ms": lambda: nn.Sequential(*(nn.Linear(160, 160) for _ in range(72))),
    "CNN": lambda: nn.Sequential(
        nn.Unflatten(1, (10, 4, 4)), nn.Conv2d(10, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 160)
    ),
}


class Timed:
    """Carries a loop through its trial, and keeps when its parts were over."""

    def __init__(self) -> None:
        """Nothing was run yet."""
        self.worker, self.untried, self.per_gradient, self.deadline = "0.0", True, False, float("inf")
        self.device = HOST
        self.behind: list[float] = []
        self.over = 0.0
        self.trial: ItemTrial | None = None

    def is_first(self) -> bool:
        """Nobody is."""
        return False

    def ended(self) -> None:
        """It is not asked whether it was left."""

    def begin(self, loop: Loop, turns: Turns) -> Callable[[], LoopStage]:
        """Tries the loop in a thread."""
        trial = self.trial = ItemTrial(loop, turns, HOST)
        threading.Thread(target=self._try, args=(trial, turns), daemon=True).start()
        return lambda: trial.stage

    def _try(self, trial: ItemTrial, turns: Turns) -> None:
        torch.set_num_threads(1)
        trial()
        self.over = time.perf_counter()
        turns.end(finished=False)


def measure(make: Callable[[], nn.Module], item_s: float) -> dict[str, Any]:
    """Returns the costs of one model, in seconds."""
    torch.set_num_threads(1)
    by = Timed()
    session = Session(by, 0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    session.prepare(model, optimizer)
    x = torch.randn(64, 160)
    try:
        for step in session.steps(TensorDataset(x, x), microbatches=8, size=8, steps=100):
            for given, wanted in step:
                begun = time.perf_counter()
                step.backward((model(given) - wanted).square().mean())
                time.sleep(max(0.0, item_s - (time.perf_counter() - begun)))
                by.behind.append(time.perf_counter())
    except LoopAbandoned:
        pass
    assert by.trial is not None, "the loop was tried"
    again_s, digest_s = by.trial.seconds()
    return {
        "trial_s": by.over - by.behind[0],
        "item_s": again_s,
        "digest_s": digest_s,
        "guard_s": guard_seconds(by.trial),
    }


def guard_seconds(trial: ItemTrial) -> float:
    """Returns the processor time of a guard's calls around one item."""
    guard, times = Guard(trial.loop.prepared), 500
    for parameter in trial.loop.prepared.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    begun = time.thread_time()
    for _ in range(times):
        guard.begin(frozenset())
        guard.check_gradients()
        guard.note_gradients()
        guard.check()
    return (time.thread_time() - begun) / times


def main() -> int:
    """Runs the benchmark; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=12, help="trials of each model")
    parser.add_argument("--quick", action="store_true", help="2 trials of each")
    options = parser.parse_args()
    recorder = Recorder("script_checks", vars(options))
    for repetition in range(2 if options.quick else options.repetitions):
        for name, make in MODELS.items():
            recorder.begin()
            recorder.add(model=name, repetition=repetition, **measure(make, ITEM_S if "50 ms" in name else 0.0))
        progress(f"trial {repetition + 1} of each")
    lines, missed = [], False
    for name in MODELS:
        rows = [row for row in recorder.rows if row["model"] == name]
        trial, guard = interval([row["trial_s"] for row in rows]), interval([row["guard_s"] for row in rows])
        item_s = statistics.median(row["item_s"] for row in rows)
        digest_s = statistics.median(row["digest_s"] for row in rows)
        lines.append(
            [name, f"{item_s * 1e3:.1f}", f"{trial.median:.3f} s", f"{guard.median * 1e3:.3f}", f"{digest_s * 1e3:.1f}"]
        )
        if "50 ms" in name:
            share = interval([row["guard_s"] / row["item_s"] for row in rows])
            lines[-1] += [verdict(trial, TRIAL_TARGET_S), verdict(share, GUARD_TARGET)]
            missed = trial.median > TRIAL_TARGET_S or share.median > GUARD_TARGET
    header = [
        "model",
        "item, ms",
        "trial behind the first item",
        "guard, ms an item",
        "digest of all state, ms",
        "",
        "",
    ]
    print_table("What trying and watching a script costs", header, [[*line, "", ""][:7] for line in lines])
    recorder.write({"lines": lines})
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
