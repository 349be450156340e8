"""What it costs to be able to take a step back: by undo, and by a snapshot of the state; per optimizer.

Three questions: how long it takes to go back, and what is kept for it (a snapshot is taken every step, an undo only
when it is needed); and what readiness to undo adds to a healthy step of the GPT that the other benchmarks train. Times
are CPU seconds of the one compute thread. Undo and snapshot take turns, so that the machine's noise hits both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.models import gpt
from holdfast.optim.committed import CommittedLayer, copied, copied_entry
from holdfast.optim.factory import OptimizerFactory, make_optimizer
from holdfast.optim.undoable import UndoableLayer
from holdfast.runtime.engine.model import Model
from holdfast.runtime.engine.stage import CommitMethod, Stage
from measure import Interval, Recorder, interval, print_table, progress, ratio_interval, time_limit

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": make_optimizer("sgd", lr=0.01),
    "sgd, momentum": make_optimizer("sgd", lr=0.01, momentum=0.9),
    "adam": make_optimizer("adam", lr=1e-3),
    "adamw": make_optimizer("adamw", lr=1e-3, weight_decay=0.01),
    "lamb": make_optimizer("lamb", lr=1e-3, weight_decay=0.01),
    "adamw, beta1 = 0": make_optimizer("adamw", lr=1e-3, betas=(0.0, 0.999)),
}
READY = ("sgd, momentum", "adamw", "lamb")
COMMITS: tuple[CommitMethod, ...] = ("undo", "shadow")
TARGET = 0.005  # of the CPU time of a step


def main() -> int:
    """Runs the benchmark; returns 1 if readiness costs more than its target."""
    options = _options()
    torch.set_num_threads(1)
    recorder = Recorder("undo_cost", vars(options))
    with time_limit(options.limit_s):
        for name, factory in OPTIMIZERS.items():
            recorder.begin()
            recorder.add(part="going back", optimizer=name, **going_back(factory, options))
            progress(f"{name}: going back measured")
        for name in READY:
            recorder.begin()
            recorder.add(part="readiness", optimizer=name, **readiness(OPTIMIZERS[name], options))
            progress(f"{name}: readiness measured")
    parts = {part: [row for row in recorder.rows if row["part"] == part] for part in ("going back", "readiness")}
    going = {row["optimizer"]: _going_back_summary(row) for row in parts["going back"]}
    ready = {row["optimizer"]: _readiness_summary(row) for row in parts["readiness"]}
    _show(going, ready)
    recorder.write({"going back": going, "readiness": ready, "target": TARGET})
    return int(any(found["undo"]["share"]["low"] > TARGET for found in ready.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--parameters", type=int, default=4_000_000, help="float32, in four tensors, to go back over")
    parser.add_argument("--repetitions", type=int, default=15, help="of every measurement")
    parser.add_argument("--microbatches", type=int, default=6, help="of a step of the GPT")
    parser.add_argument("--steps", type=int, default=5, help="of the GPT")
    parser.add_argument("--quick", action="store_true", help="3 repetitions with 400,000 parameters, 2 steps")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.parameters, options.repetitions, options.steps = 400_000, 3, 2
    return options


def going_back(factory: OptimizerFactory, options: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds and bytes of a step taken back by undo, and by a snapshot into memory that is there already."""
    layer = _layer(factory, options.parameters)
    source = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(p.shape, generator=source) for name, p in layer.module.named_parameters()}
    _advance(layer, gradients)
    snapshot = _Snapshot(layer)
    times: dict[str, list[float]] = {"undo": [], "snapshot": [], "restore": [], "optimizer step": []}
    for _ in range(options.repetitions):
        times["snapshot"].append(_cpu(snapshot.take))
        times["optimizer step"].append(_cpu(lambda: _advance(layer, gradients)))
        update = layer._update
        assert update is not None
        held = _bytes((*update.buffers, *update.gradients, *(v for kept in update.kept for v in kept.values())))
        times["undo"].append(_cpu(lambda: layer.take_back(layer.step - 1)))
        times["restore"].append(_cpu(snapshot.restore))
    gradient_bytes = _bytes(gradients.values())
    return {
        "seconds": times,
        "bytes": {"snapshot": snapshot.size, "gradient": gradient_bytes, "copies": held - gradient_bytes},
    }


def _layer(factory: OptimizerFactory, parameters: int) -> UndoableLayer:
    side = int((parameters // 4) ** 0.5)
    return UndoableLayer(0, nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(4))), factory)


def _advance(layer: UndoableLayer, gradients: dict[str, Tensor]) -> None:
    layer.update(gradients, 1.0)
    layer.swap()


class _Snapshot:
    """A copy of all weights and optimizer entries, as CheckFreq and Elastic Horovod keep one."""

    def __init__(self, layer: UndoableLayer) -> None:
        self._live = layer._live
        self._weights = copied(self._live.weights, [])
        self._entries = [
            {key: copied_entry(value) for key, value in entries.items()} for entries in self._live.optimizer
        ]
        self.size = _bytes((*self._weights, *(v for entries in self._entries for v in entries.values())))

    def take(self) -> None:
        copied(self._live.weights, self._weights)
        _copy_entries(self._live.optimizer, self._entries)

    def restore(self) -> None:
        copied(self._weights, self._live.weights)
        _copy_entries(self._entries, self._live.optimizer)


def _copy_entries(source: list[dict[str, Any]], into: list[dict[str, Any]]) -> None:
    for entries, target in zip(source, into, strict=True):
        for key, value in entries.items():
            target[key] = copied_entry(value, target.get(key))


def _bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def _cpu(act: Callable[[], Any]) -> float:
    start = time.thread_time()
    act()
    return time.thread_time() - start


def readiness(factory: OptimizerFactory, options: argparse.Namespace) -> dict[str, Any]:
    """Per way to commit, CPU seconds of whole steps, and of all in their commits that is not the optimizer itself.

    That is an upper bound: it holds what any training does around its optimizer, such as binding gradients.
    """
    clocks = {commit: _Clock(_stage(factory, options.microbatches, commit)) for commit in COMMITS}
    for step in range(options.steps + 1):
        for clock in clocks.values():
            clock.step(step, options.microbatches)
    return {commit: {"step_s": clock.steps[1:], "extra_s": clock.extra[1:]} for commit, clock in clocks.items()}


class _Clock:
    """Times the steps of a stage; the first one, which makes the optimizer's state, is not for use."""

    def __init__(self, stage: Stage) -> None:
        self.steps: list[float] = []
        self.extra: list[float] = []
        self._stage, self._optimizer_s = stage, 0.0
        for owned in stage._owned.values():
            assert isinstance(owned.committed, CommittedLayer), "of a stage of one process"
            optimizer = owned.committed._optimizer
            if optimizer is not None:
                optimizer.step = self._timed(optimizer.step)

    def _timed(self, act: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            self._optimizer_s += _cpu(act)

        return run

    def step(self, step: int, microbatches: int) -> None:
        """One step."""
        self._optimizer_s = 0.0
        run = _cpu(lambda: _run(self._stage, step, microbatches))
        commit = _cpu(lambda: _commit(self._stage))
        self.steps.append(run + commit)
        self.extra.append(commit - self._optimizer_s)


def _stage(factory: OptimizerFactory, microbatches: int, commit: CommitMethod) -> Stage:
    model = Model.build(gpt.build(layers=8, width=128, heads=4, context=128, dropout=0.0), gpt.loss)
    window = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))
    return Stage(
        layers=model.layers,
        owned=range(len(model.layers)),
        ties=model.ties,
        loss=model.loss,
        optimizer=factory,
        lr_scale=lambda _: 1.0,
        seed=0,
        num_microbatches=microbatches,
        load=lambda *_: (window[:, :-1].contiguous(), window[:, 1:].contiguous()),
        commit=commit,
    )


def _run(stage: Stage, step: int, microbatches: int) -> None:
    for microbatch in range(microbatches):
        stage.forward(step, microbatch, None)
        stage.backward(OpKind.B, step, microbatch, None)
    for reduction in stage.reductions:
        stage.accept(reduction, add_up([stage.message(reduction)]))
    stage.conclude(stage.vote())


def _commit(stage: Stage) -> None:
    for layer in stage.layers:
        stage.update(layer)
        stage.swap(layer)


def _going_back_summary(row: dict[str, Any]) -> dict[str, Any]:
    seconds = row["seconds"]
    pairs = list(zip(seconds["undo"], seconds["restore"], strict=True))
    return {
        "seconds": {name: interval(values).to_json() for name, values in seconds.items()},
        "undo / restore": ratio_interval(pairs).to_json(),
        "bytes": row["bytes"],
    }


def _readiness_summary(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for commit in COMMITS:
        steps, extra = row[commit]["step_s"], row[commit]["extra_s"]
        share = ratio_interval(list(zip(extra, steps, strict=True))).to_json()
        found[commit] = {
            "step_s": interval(steps).to_json(),
            "extra_s": interval(extra).to_json(),
            "share": share,
        }
    return found


def _show(going: dict[str, Any], ready: dict[str, Any]) -> None:
    rows = [
        [
            name,
            *(Interval(**found["seconds"][key]).show(1000, 1) for key in ("undo", "snapshot", "restore")),
            Interval(**found["seconds"]["optimizer step"]).show(1000, 1),
            *(f"{found['bytes'][key] / 1e6:.1f}" for key in ("gradient", "copies", "snapshot")),
        ]
        for name, found in going.items()
    ]
    header = ["optimizer", "undo, ms", "snapshot taken, ms", "restored, ms", "optimizer step, ms"]
    sizes = ["undo keeps: gradient, MB", "copies, MB", "snapshot, MB"]
    print_table("Going back: CPU time, median [95 % interval], and what is kept for it", [*header, *sizes], rows)
    rows = [
        [
            name,
            commit,
            Interval(**found[commit]["step_s"]).show(1000, 0),
            Interval(**found[commit]["extra_s"]).show(1000, 2),
            Interval(**found[commit]["share"]).show(100, 2),
        ]
        for name, found in ready.items()
        for commit in COMMITS
    ]
    header = ["optimizer", "commit", "step, ms CPU", "commit without optimizer, ms", "share of the step, %"]
    print_table(f"Readiness in a healthy step (target for undo: {TARGET:.1%})", header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
