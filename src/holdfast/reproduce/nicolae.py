"""Nicolae et al.'s table and figures, by the formulas of :mod:`holdfast.recovery.overhead`."""

from __future__ import annotations

from holdfast.recovery.overhead import DataParallel, per_failure
from holdfast.reproduce.facts import facts
from holdfast.reproduce.found import Constant, Found, Item, Origin, Row

__all__ = ["ITEMS"]

_RESNET, _NT3 = "ResNet-50", "CANDLE-NT3"
_BYTES = {_RESNET: 91 << 20, _NT3: 600 << 20}
"""Of their weights; the table has them the wrong way round."""
_SWAPPED = Constant(
    name="sizes of the models",
    value="91 MiB (ResNet-50), 600 MiB (CANDLE-NT3)",
    origin=Origin.PRINTED,
    why="in the table sizes and layers stand under the other model each; they count for nothing here",
)


def _model(name: str) -> DataParallel:
    known = facts("nicolae")["table1"]
    epoch, workers = known["Mini-batches/epoch"][name], facts("nicolae")["workers"]
    return DataParallel(
        minibatch_s=known["Avg mini-batch s"][name],
        minibatches_per_epoch=epoch,
        minibatches=epoch * known["No epochs"][name],
        workers=workers,
        microbatches=workers,
        state_bytes=_BYTES[name],
        checkpoint_s=known["Checkpoint overhead s"][name],
        restart_s=known["Restart overhead s"][name],
        init_s=known["Init overhead s"][name],
    )


def figure2(processes: int) -> Found:
    """What is run again after going back to the last epoch's checkpoint, in each scenario."""
    rows = []
    for name, scenarios in facts("nicolae")["scenarios"].items():
        model = _model(name)
        for number, (at, _) in enumerate(scenarios, 1):
            since = at % model.minibatches_per_epoch
            cost = per_failure("checkpoint-restart", model, since)
            rows.append(
                Row(
                    what=f"{name}, scenario {number}: mini-batch {at}, run again",
                    printed=None,
                    ours=cost.replay_s,
                    unit="s",
                )
            )
    return Found(
        rows=tuple(rows),
        constants=(_SWAPPED,),
        says=(
            "Figure 2c has bars without numbers. Of CANDLE-NT3 the third scenario's epoch is printed as 8, and is 9 "
            "by 55 mini-batches each; 1,120 samples in batches of 20 are 56.",
            "2a and 2b are accuracies of models that are not trained here: `holdfast study` does the same "
            "experiment with its own ([study](study.md)).",
        ),
    )


def figure3(processes: int) -> Found:
    """By how much a mini-batch is slower in which somebody is lost, and what is saved against checkpoints."""
    known = facts("nicolae")
    rows = []
    for name in (_RESNET, _NT3):
        model = _model(name)
        again = {row: per_failure(row, model).replay_s for row in ("rollback", "lossy-forward")}
        longest = per_failure("checkpoint-restart", model, model.minibatches_per_epoch).replay_s
        rows += [
            Row(
                what=f"{name}: the mini-batch, with immediate rollback",
                printed=known["slower_ir"],
                ours=1 + again["rollback"] / model.minibatch_s,
                unit="x",
            ),
            Row(
                what=f"{name}: the mini-batch, with lossy forward",
                printed=known["slower_lf"],
                ours=1 + again["lossy-forward"] / model.minibatch_s,
                unit="x",
            ),
            Row(
                what=f"{name}: an epoch that is run again, by one mini-batch",
                printed=known["up_to_times"] if name == _RESNET else None,
                ours=longest / again["rollback"],
                unit="x",
            ),
        ]
        for row in ("checkpoint-restart", "rollback", "lossy-forward"):
            cost = per_failure(row, model)
            rows.append(Row(what=f"{name}: a failure on average, {row}", printed=None, ours=cost.seconds, unit="s"))
    return Found(
        rows=tuple(rows),
        constants=(_SWAPPED, Constant(name="detection, and giving state", value="0 s", origin=Origin.PRINTED)),
        says=(
            "The figures have bars, the text says almost 2 x, close to 1 x, and up to 400 x. What the same costs in "
            "processes here is in [benchmarks](benchmarks.md) and [study](study.md).",
        ),
    )


ITEMS = (
    Item(name="nicolae/figure2", title="what going back to an epoch's checkpoint costs", find=figure2),
    Item(name="nicolae/figure3", title="what a failure costs (and figure 4)", find=figure3),
)
"""What can be had of it, in the paper's order."""
