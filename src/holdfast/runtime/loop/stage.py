"""The compute engine of a worker whose operations are run by the loop of a user's script.

Its layers are the buckets of the model. One forward pass over any of them, and the backward pass over them, is one
*item*: the loop is given the number of a micro-batch, and gives back its gradients, all at once. They are added to the
sums of a bucket when the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.placement import LayerRange
from holdfast.core.progress import Progress
from holdfast.core.schedule import OpKind
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import InternalError
from holdfast.optim.accumulate import Numerics, Reduced, present
from holdfast.optim.committed import Committed
from holdfast.optim.digest import LayerState, layer_file, save_layer, tensors_sha256
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.live import LiveLayer
from holdfast.optim.running_stats import RunningStats
from holdfast.runtime.engine.stage import Stage, _Cell, _Context, _Owned
from holdfast.runtime.engine.stepped import ReducedLayers
from holdfast.runtime.loop.prepared import Failing, Prepared
from holdfast.runtime.loop.turns import Item, RunsItems

__all__ = ["HANDED_ON", "Gradients", "LoopStage"]

HANDED_ON = TensorSpec(shape=(1,), dtype="float32")
"""What buckets hand on, as plans want it: nothing that means anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What came of an item.

    Attributes:
        of: per bucket, the gradients of its trained parameters, scaled as the loss was; None where there is none.
        loss: float32, of one element.
        stats: those of batch-norm; None if there are none.
        logged: float32, the sum of each name's values, and behind all sums how many there were of each.
    """

    of: tuple[tuple[Tensor | None, ...], ...]
    loss: Tensor
    stats: Tensor | None = None
    logged: Tensor | None = None

    @property
    def digest(self) -> str:
        """A digest of all bits."""
        flat = {f"{i}.{j}": each for i, row in enumerate(self.of) for j, each in enumerate(row) if each is not None}
        return tensors_sha256({**flat, "loss": self.loss})


class LoopStage(Stage):
    """Computes by having a loop run items.

    Layers only ever go forward, as the loop may look at them between any two steps. So the sums of the last step are
    kept until those of the next are there: whoever lacks one is given it.

    Args:
        prepared: what is trained.
        turns: by which the loop is reached.
        owned: the buckets that are held or followed: all or none.
        numerics: ``exact`` or ``fast``.
        num_microbatches: items of a step, over all workers.
        logs: names of what is logged of items.
        watch: called with each item that was run, and what came of it.
    """

    def __init__(
        self,
        *,
        prepared: Prepared,
        turns: RunsItems,
        owned: Sequence[int],
        numerics: Numerics,
        num_microbatches: int,
        logs: tuple[str, ...] = (),
        watch: Callable[[Item, Gradients], None] = lambda item, found: None,
    ) -> None:
        self._prepared, self._turns, self._logs, self._seen = prepared, turns, logs, watch
        self._items: dict[int, list[tuple[Tensor | None, ...]]] = {}  # what is not added yet, by micro-batch
        self._records: dict[int, Tensor] = {}
        self._last: tuple[int, dict[ReducedLayers, Reduced]] = (-1, {})
        self._failing: Failing | None = None  # in this step
        self._failed = False
        super().__init__(
            layers=[prepared.buckets[index] for index in owned],
            owned=owned,
            num_layers=len(prepared.buckets),
            ties=(),
            loss=_runs_nothing,
            optimizer=_makes_nothing,
            lr_scale=lambda step: 1.0,
            numerics=numerics,
            seed=0,
            num_microbatches=num_microbatches,
            load=_runs_nothing,
            clip_norm=prepared.clip_norm,
            commit="live",
            scaling=prepared.scaling,
            outputs=[HANDED_ON] * len(prepared.buckets),
        )
        self.returns = True

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Start a step; see `SteppedStage.begin`. One that fails has fewer contributions to its later sums."""
        super().begin(step)
        failure = self._prepared.failing
        self._failing = failure if failure is not None and failure.step == step and not self._failed else None
        self._leave_out(frozenset())

    def count_back(self) -> None:
        """Count the step that was just made as none: it is made again, and does not fail."""
        self._failed = True
        for owned in self._owned.values():
            _live(owned).count_back()

    def forward(
        self,
        step: int,
        microbatch: int,
        activation: Tensor | None,
        layers: LayerRange | None = None,
        *,
        adds: bool = True,
    ) -> Tensor | None:
        """Have the loop run an item, unless its gradients are here already; see `Stage.forward`."""
        if step != self._step:
            self.begin(step)
        layers = layers or self._all()
        if adds:
            if microbatch not in self._items:
                self._run_item(step, microbatch)
            here = torch.empty(0)
            cells = [_Cell(here, here, None) for _ in layers.indices]
            self._contexts[microbatch][layers.start] = _Context(layers, cells)
        return torch.zeros(HANDED_ON.shape) if layers.stop < self.num_layers else None

    def _run_item(self, step: int, microbatch: int) -> None:
        ahead = [layer for layer, owned in self._owned.items() if _live(owned).ahead]
        if ahead:
            raise InternalError(f"item {microbatch} of step {step} on weights that have made this step already")
        scale = self._owned[self.num_layers - 1].committed.loss_scale
        shown = step - sum(each < step for each in self.repeated)
        item = Item(step=step, shown=shown, number=microbatch, loss_scale=None if scale is None else scale.value)
        found: Gradients = self._turns.run(item)
        self._seen(item, found)
        self._items[microbatch] = list(found.of)
        parts = (found.loss, found.stats, found.logged)
        self._records[microbatch] = torch.cat([part for part in parts if part is not None])

    def backward(
        self,
        kind: OpKind,
        step: int,
        microbatch: int,
        gradient: Tensor | None,
        layers: LayerRange | None = None,
        *,
        adds: bool = True,
    ) -> Tensor | None:
        """Add the gradients of an item to the sums of buckets; see `Stage.backward`."""
        if step != self._step:
            raise InternalError(f"{kind} of step {step} while step {self._step} is running")
        if kind is not OpKind.B:
            raise InternalError(f"{kind}: the backward pass of a loop has no halves")
        context, part = self._context(kind, microbatch, layers)
        if part.start == context.layers.start:
            del self._contexts[microbatch][part.start]
        for index in reversed(part.indices):
            context.cells.pop()
            gradients, self._items[microbatch][index] = self._items[microbatch][index], ()
            if adds and not self._is_absent(index, microbatch):
                record = self._records[microbatch] if index == self.num_layers - 1 else None
                self._add(index, self._owned[index], microbatch, gradients, record)
        return torch.zeros(HANDED_ON.shape) if part.start else None

    def accept(self, reduction: ReducedLayers, reduced: Tensor) -> None:
        """Take a sum; nobody asks for the one of the step before any more. See `Stage.accept`."""
        super().accept(reduction, reduced)
        self._taken(reduction)

    def take_sum(self, reduction: ReducedLayers, message: Tensor) -> None:
        """Take a sum that another owner has completed; see `Stage.take_sum`."""
        super().take_sum(reduction, message)
        self._taken(reduction)

    def _taken(self, reduction: ReducedLayers) -> None:
        step, sums = self._last
        if step != self._step:
            sums.pop(reduction, None)
        if self._logs and reduction == (self.num_layers - 1,) and self._step is not None:
            sums_of, times = (
                present(self._reduced[reduction].records)[:, -2 * len(self._logs) :].double().sum(0).chunk(2)
            )
            means = zip(self._logs, (sums_of / times).tolist(), strict=True)  # of nothing it is not a number
            self._prepared.logged[self._step] = dict(means)

    def _record_width(self, layer: int) -> int:
        return super()._record_width(layer) + (2 * len(self._logs) if layer == self.num_layers - 1 else 0)

    def _swap(self, layer: int) -> None:
        again, step = _live(self._owned[layer]).ahead, self._owned[layer].committed.step
        super()._swap(layer)
        if layer == self.layers[-1]:
            self._last = (step, dict(self._reduced))
            repeats = step in self.repeated or (self._failing is not None and self._failing.replays)
            if not again and not repeats:
                self._prepared.advance()

    def _forget(self) -> None:
        super()._forget()
        self._items.clear()
        self._records.clear()

    # --- a step that is interrupted -----------------------------------------------------------------------------------

    def progress(self) -> tuple[Progress, ...]:
        """Return what is kept of the steps that somebody may not have ended; see `SteppedStage.progress`."""
        found, (step, sums) = super().progress(), self._last
        if sums and all(each.step != step for each in found):
            found = (Progress(step=step, complete=tuple(sorted(sums))), *found)
        return found

    def resume(self, step: int, standing: Iterable[ReducedLayers], left_out: Iterable[int] = ()) -> None:
        """Go on with a step; whoever has ended it hands over its sums. See `SteppedStage.resume`."""
        last, sums = self._last
        if last == step != self._step:
            self.discard()
            self._step, self._reduced = step, {layers: replace(each) for layers, each in sums.items()}
        super().resume(step, standing, left_out)

    def _leave_out(self, microbatches: frozenset[int]) -> None:
        super()._leave_out(microbatches)
        for number in microbatches:
            self._items.pop(number, None)
            self._records.pop(number, None)
        failing = self._failing
        for (layer,), sums in self._sums.items():
            if failing is not None and layer in failing.layers and (layer,) not in self._reduced:
                sums.leave_out(microbatches | failing.microbatches)

    def _is_absent(self, layer: int, microbatch: int) -> bool:
        failing = self._failing
        return failing is not None and layer in failing.layers and microbatch in failing.microbatches

    # --- state --------------------------------------------------------------------------------------------------------

    def export(self, layer: int) -> LayerState:
        """Return a bucket's live state; with the last one goes all that is of no bucket. See `Stage.export`.

        Raises:
            InternalError: its weights are those of a later step than it counts.
        """
        if _live(self._owned[layer]).ahead:
            raise InternalError(f"bucket {layer} is ahead of the step that it counts, and has no state of that")
        state = super().export(layer)
        return replace(state, extra=self._prepared.tell()) if layer == self.num_layers - 1 else state

    def save(self, layer: int, directory: Path) -> Path:
        """Write a bucket's live state, also where a job ends in the middle of a step; see `Stage.save`."""
        live = _live(self._owned[layer])
        if not live.ahead:
            return super().save(layer, directory)
        path = layer_file(directory, layer)
        save_layer(path, replace(live.export(), step=live.step + 1))
        return path

    def install(self, layer: int, state: LayerState) -> None:
        """Replace a bucket's state; see `Stage.install`."""
        super().install(layer, state)
        self._last = (-1, {})
        if state.extra:
            self._prepared.take(state.extra)

    def _own(
        self, index: int, module: nn.Module, optimizer: OptimizerFactory, commit: Callable[..., Committed]
    ) -> _Owned:
        return super()._own(index, module, self._prepared.factory_of(index), commit)

    def _stats_of(self, index: int, module: nn.Module) -> RunningStats:
        last = len(self._prepared.buckets) - 1
        return RunningStats(index, self._prepared.model if index == last else module)

    @property
    def stats(self) -> RunningStats:
        """The batch-norm statistics of the model."""
        return self._owned[self.num_layers - 1].stats


def _live(owned: _Owned) -> LiveLayer:
    assert isinstance(owned.committed, LiveLayer), "buckets go forward only"
    return owned.committed


def _runs_nothing(*args: Any) -> Any:
    raise InternalError("a loop runs its model, its data and its loss by itself")


def _makes_nothing(parameters: list[nn.Parameter]) -> Any:
    raise InternalError("each bucket has an optimizer of its own")
