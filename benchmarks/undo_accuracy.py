"""Does it matter to a model that one update in mid-training was undone? As SWIFT's figure 12, on handwritten digits.

Per optimizer and seed three runs of the same training: *plain*; *undone*, in which half-way a step is committed, taken
back by inverting it, and made again; and *nudged*, in which half-way every weight is moved by up to one rounding, as a
yardstick for what the last bits do to any training. Steps, samples and seeds are the same.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.data.digits import Digits
from holdfast.data.sampler import load_microbatch
from holdfast.models import convnet
from holdfast.optim.factory import make_optimizer
from holdfast.runtime.engine.stage import Loader, Stage
from measure import Interval, Recorder, interval, print_table, progress, time_limit

SIDES = ("plain", "undone", "nudged")
OPTIMIZERS = {
    "momentum": make_optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": make_optimizer("adamw", lr=3e-3, weight_decay=0.01),
    "lamb": make_optimizer("lamb", lr=1e-2, weight_decay=0.01),
}
TRAINED = 1437  # of 1797 samples; the others are for validation


def main() -> int:
    """Runs the benchmark; returns 0."""
    options = _options()
    torch.set_num_threads(1)
    recorder = Recorder("undo_accuracy", vars(options))
    with time_limit(options.limit_s):
        for seed in range(options.seeds):
            for name in OPTIMIZERS:
                recorder.begin()
                row = recorder.add(optimizer=name, seed=seed, **compare(name, seed, options))
                progress(f"{name}, seed {seed}: {[round(row[side]['accuracy'], 4) for side in SIDES]}")
    summary = {name: summarise([row for row in recorder.rows if row["optimizer"] == name]) for name in OPTIMIZERS}
    _show(summary)
    recorder.write(summary)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each side and optimizer")
    parser.add_argument("--steps", type=int, default=100, help="of a run")
    parser.add_argument("--microbatches", type=int, default=2, help="per step")
    parser.add_argument("--microbatch-size", type=int, default=48, help="samples")
    parser.add_argument("--width", type=int, default=6, help="channels of the stem")
    parser.add_argument("--quick", action="store_true", help="2 seeds of 16 steps")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 2, 16
    return options


def compare(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the three sides; each row says how well it does and how far its weights are from those of *plain*."""
    found = {side: _Run(name, seed, options) for side in SIDES}
    for side, run in found.items():
        run.train(side)
    plain = found["plain"].weights()
    return {
        side: {
            "accuracy": run.accuracy(),
            "loss": run.validation_loss(),
            "distance": float((run.weights() - plain).norm() / plain.norm()),
            "distance_after_undo": run.distance,
        }
        for side, run in found.items()
    }


class _Run:
    """One training of the digits convnet on one stage."""

    def __init__(self, name: str, seed: int, options: argparse.Namespace) -> None:
        self._options, self._seed, self.distance = options, seed, 0.0
        self._layers = convnet.build(width=options.width, seed=seed)
        digits = Digits()
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).tolist()
        held = [digits[index] for index in order[TRAINED:]]
        self._images, self._labels = (torch.stack(column) for column in zip(*held, strict=True))
        self._stage = Stage(
            layers=self._layers,
            owned=range(len(self._layers)),
            ties=(),
            loss=convnet.loss,
            optimizer=OPTIMIZERS[name],
            lr_scale=lambda _: 1.0,
            seed=seed,
            num_microbatches=options.microbatches,
            load=self._loader(Subset(digits, order[:TRAINED])),
            commit="undo",
        )

    def _loader(self, data: Subset[tuple[Tensor, Tensor]]) -> Loader:
        sizes = {"num_microbatches": self._options.microbatches, "microbatch_size": self._options.microbatch_size}
        load = partial(load_microbatch, data, seed=self._seed, **sizes)
        return lambda step, microbatch: load(step=step, microbatch=microbatch)

    def train(self, side: str) -> None:
        """All steps; half-way the one thing that sets the side apart."""
        half = self._options.steps // 2
        for step in range(self._options.steps):
            if step == half and side == "undone":
                before = self.weights()
                self._step(step)
                self._stage.take_back(step)
                self.distance = float((self.weights() - before).norm() / before.norm())
            if step == half and side == "nudged":
                self._nudge()
            self._step(step)

    def _step(self, step: int) -> None:
        for microbatch in range(self._options.microbatches):
            self._stage.forward(step, microbatch, None)
            self._stage.backward(OpKind.B, step, microbatch, None)
        for reduction in self._stage.reductions:
            self._stage.accept(reduction, add_up([self._stage.message(reduction)]))
        self._stage.conclude(self._stage.vote())
        for layer in self._stage.layers:
            self._stage.update(layer)
            self._stage.swap(layer)

    def _nudge(self) -> None:
        source = torch.Generator().manual_seed(self._seed)
        for parameter in self._parameters():
            share = torch.rand(parameter.shape, generator=source) * 2 - 1
            parameter.data.mul_(1 + share * 2.0**-23)

    def _parameters(self) -> list[nn.Parameter]:
        return list(chain.from_iterable(layer.parameters() for layer in self._layers))

    def weights(self) -> Tensor:
        """All weights in one row, float64."""
        return torch.cat([parameter.detach().double().flatten() for parameter in self._parameters()])

    @torch.no_grad()
    def _logits(self) -> Tensor:
        model = nn.Sequential(*self._layers).eval()
        logits: Tensor = model(self._images)
        model.train()
        return logits

    def accuracy(self) -> float:
        """Share of the validation samples that are told right."""
        return float((self._logits().argmax(1) == self._labels).double().mean())

    def validation_loss(self) -> float:
        """Mean loss over the validation samples."""
        return float(convnet.loss(self._logits(), self._labels))


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians per side, and the differences from *plain*, seed by seed."""
    sides = {
        side: {key: interval([row[side][key] for row in rows]).to_json() for key in rows[0][side]} for side in SIDES
    }
    differences = {
        f"{side} - plain": {
            key: interval([row[side][key] - row["plain"][key] for row in rows]).to_json()
            for key in ("accuracy", "loss")
        }
        for side in SIDES[1:]
    }
    return {"sides": sides, "differences": differences}


def _show(summary: dict[str, Any]) -> None:
    rows = [
        [
            name,
            side,
            Interval(**found["accuracy"]).show(100, 2),
            Interval(**found["loss"]).show(1, 4),
            f"{found['distance_after_undo']['median']:.1e}",
            f"{found['distance']['median']:.1e}",
        ]
        for name, of in summary.items()
        for side, found in of["sides"].items()
    ]
    header = [
        "optimizer",
        "run",
        "validation accuracy, %",
        "validation loss",
        "weights off by, after undo",
        "at the end",
    ]
    print_table("One update undone in mid-training: median [95 % interval] over seeds", header, rows)
    rows = [
        [name, which, Interval(**found["accuracy"]).show(100, 2), Interval(**found["loss"]).show(1, 6)]
        for name, of in summary.items()
        for which, found in of["differences"].items()
    ]
    print_table("Difference, seed by seed", ["optimizer", "runs", "accuracy, points", "loss"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
