"""The compute engine of a worker whose operations are run by the loop of a user's script.

Its layers are the buckets of the model. One forward pass over any of them, and the backward pass over them, is one
*item*: the loop is given the number of a micro-batch, and gives back its gradients, all at once. They are added to the
sums of a bucket when the plan says so.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.core.ids import Interval
from holdfast.core.instructions import Compute
from holdfast.core.placement import LayerRange
from holdfast.core.progress import Part, StepProgress
from holdfast.core.schedule import OpKind
from holdfast.core.summing import Total
from holdfast.core.tensorspec import TensorSpec
from holdfast.devices.device import HOST, Device
from holdfast.errors import ConfigError, InternalError, StepVoid
from holdfast.optim.accumulate import Reduced, check_dtype, present
from holdfast.optim.digest import LayerState, layer_file, save_layer, tensors_sha256
from holdfast.optim.live import LiveLayer
from holdfast.optim.running_stats import RunningStats
from holdfast.runtime.engine.stepped import ReducedLayers, Work, part_of
from holdfast.runtime.engine.summed import Owned, SummedStage, own
from holdfast.runtime.loop.prepared import Failing, Prepared, ToldState
from holdfast.runtime.loop.turns import Item, RunsItems
from holdfast.runtime.tensors import denormals_kept

__all__ = ["HANDED_ON", "LAST", "UNWEIGHTED", "VOID", "Gradients", "LoopStage"]

_NOTHING = nullcontext()
HANDED_ON = TensorSpec(shape=(1,), dtype="float32")
"""What buckets hand on, as plans want it: nothing that means anything."""
LAST, VOID = 1, 2
"""Marks of items whose script has stopped its loop: in this step, or before it. 0: it has not."""
UNWEIGHTED = -1.0
"""The weight of an item that counts as much as all others; one that was skipped has none (NaN)."""
_MARKS = 2
_APART = "apart"
"""Of what a file says about the state of the last bucket: which of its other tensors belong on the device."""
_MARK = "stream"
"""Of what a file says about the state of the last bucket: from where the data can be read on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What came of an item.

    Attributes:
        of: per bucket, the gradients of its trained parameters, scaled as the loss was; None where there is none.
        loss: float32, of one element.
        stats: those of batch-norm; None if there are none.
        logged: float32, the sum of each name's values, and behind all sums how many there were of each.
        weight: by which the gradients are multiplied; or UNWEIGHTED.
        stops: 0, LAST or VOID.
    """

    of: tuple[tuple[Tensor | None, ...], ...]
    loss: Tensor
    stats: Tensor | None = None
    logged: Tensor | None = None
    weight: float = UNWEIGHTED
    stops: int = 0

    @property
    def marks(self) -> Tensor:
        """What of an item is neither loss nor statistics nor logged: float32."""
        return torch.tensor([self.weight, self.stops], dtype=torch.float32, device="cpu")

    @property
    def digest(self) -> str:
        """A digest of all bits."""
        flat = {f"{i}.{j}": each for i, row in enumerate(self.of) for j, each in enumerate(row) if each is not None}
        return tensors_sha256({**flat, "loss": self.loss})


@dataclass(slots=True, kw_only=True)
class _ItemSample:
    """An item that two workers run, and what came of it here."""

    step: int
    number: int
    runs: bool = False
    digest: str = ""

    def lacks(self, step: int) -> bool:
        """Whether it is of this step, and was not run here."""
        return self.step == step and not self.digest


class LoopStage(SummedStage):
    """Computes by having a loop run items.

    Layers only ever go forward, as the loop may look at them between any two steps. So the sums of the last step are
    kept until those of the next are there: whoever lacks one is given it.

    Args:
        prepared: what is trained.
        turns: by which the loop is reached.
        owned: the buckets that are held or followed: all or none.
        num_microbatches: items of a step, over all workers.
        chunks: in how many chunks they are cut for their sum, see `holdfast.core.sum_order.SumOrder.of`.
        logs: names of what is logged of items.
        watch: called with each item that was run, and what came of it.
        loading: entered while the data of an item are loaded, by the loop.
        device: where the model is.
    """

    at_a_stretch = True

    def __init__(
        self,
        *,
        prepared: Prepared,
        turns: RunsItems,
        owned: Sequence[int],
        num_microbatches: int,
        chunks: int | None = None,
        logs: tuple[str, ...] = (),
        watch: Callable[[Item, Gradients], None] = lambda item, found: None,
        loading: AbstractContextManager[None] = _NOTHING,
        device: Device = HOST,
    ) -> None:
        self.loading, self._on = loading, device
        self._prepared, self._turns, self._logs, self._seen = prepared, turns, logs, watch
        self._passes = defaultdict[int, dict[int, LayerRange]](dict)  # per micro-batch, what is left, by first layer
        self._items: dict[int, list[tuple[Tensor | None, ...]]] = {}  # what is not added yet, by micro-batch
        self._records: dict[int, Tensor] = {}
        self._last: tuple[int, dict[ReducedLayers, Reduced]] = (-1, {})
        self._failing: Failing | None = None  # in this step
        self._failed = False
        self._shares: Tensor | None = None
        self._sample: _ItemSample | None = None
        last = len(prepared.buckets) - 1  # no two have a parameter in common: each is in the first that uses it
        super().__init__(
            {
                index: own(
                    index,
                    prepared.buckets[index],
                    LiveLayer,
                    prepared.factory_of(index),
                    device=device.torch,
                    scaling=prepared.scaling,
                    normed=prepared.model if index == last else None,
                    check=_check_type,
                )
                for index in owned
            },
            num_layers=last + 1,
            num_microbatches=num_microbatches,
            chunks=chunks,
            lr_scale=lambda step: 1.0,
            clip_norm=prepared.clip_norm,
            device=device.torch,
            more_recorded=2 * len(logs) + _MARKS,
        )
        self.ends = prepared.ends

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, step: int, counted: tuple[Interval, ...] | None = None) -> None:
        """Start a step; see `SteppedStage.begin`. One that fails has fewer contributions to its later sums."""
        failure = self._prepared.failing
        self._failing = failure if failure is not None and failure.step == step and not self._failed else None
        super().begin(step, counted)

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
        """Have the loop run an item, unless its gradients are here already; see `StepEngine.forward`."""
        if step != self._step:
            self.begin(step)
        layers = layers or self._all()
        if adds:
            if microbatch not in self._items:
                self._run_items(step, (microbatch,), lambda: True)
            self._passes[microbatch][layers.start] = layers
        return _handed_on() if layers.stop < self.num_layers else None

    def run(self, step: int, computes: Sequence[Compute], ran: Callable[[Compute], bool]) -> None:
        """Run operations while the loop runs their items, each of which is added as soon as it is there.

        See `StepEngine.run`; ``ran`` is called in the loop's thread.
        """
        if step != self._step:
            self.begin(step)
        left = deque(computes)

        def go_on() -> bool:
            """Runs whatever needs no other item."""
            while left and (left[0].op.kind is OpKind.B or left[0].op.microbatch.number in self._items):
                compute = left.popleft()
                number, layers = compute.op.microbatch.number, compute.layers
                if compute.op.kind is OpKind.B:
                    self.backward(OpKind.B, step, number, None, layers)
                else:
                    self.forward(step, number, None, layers)
                if not ran(compute):
                    return False
            return bool(left)

        if go_on():
            numbers = [each.op.microbatch.number for each in left if each.op.kind is OpKind.F]
            self._run_items(step, numbers, go_on)

    def _run_items(self, step: int, numbers: Sequence[int], then: Callable[[], bool]) -> None:
        """Has the loop run items, keeps what came of each, and goes on as long as ``then`` says so."""
        ahead = [layer for layer, owned in self._owned.items() if _live(owned).ahead]
        if ahead:
            raise InternalError(f"items {numbers} of step {step} on weights that have made this step already")
        sample = self._sample
        if sample is not None and not sample.lacks(step):
            sample = None
        before = [] if sample is None or not sample.runs or sample.number == numbers[0] else [sample.number]

        def take(item: Item, found: Gradients) -> bool:
            self._seen(item, found)
            if sample is not None and sample.number == item.number and not sample.digest:
                sample.digest = found.digest
            if before:  # this is added to nothing
                before.clear()
                return True
            self._items[item.number] = [tuple(map(_summed, row)) for row in found.of]
            parts = (found.loss, found.stats, found.logged, found.marks)
            self._on.check_stream()
            self._records[item.number] = torch.cat([self._on.brought(part) for part in parts if part is not None])
            self._on.keep_pace()
            with denormals_kept():
                return then()

        shown, scale = self._shown(step), self.loss_scale
        items = [Item(step=step, shown=shown, number=number, loss_scale=scale) for number in (*before, *numbers)]
        self._turns.run(items, take)

    def _shown(self, step: int) -> int:
        """A step as the loop counts."""
        return step - sum(each < step for each in self.repeated)

    def sample_item(self, step: int, number: int, *, runs: bool) -> None:
        """Keep a digest of an item; ``runs``: before any item of ours, whoever else runs it. It is added to no sum.

        Not where the model is compiled, which may have other bits in each process.
        """
        if self._prepared.compiled:
            return
        if self._sample is None or (self._sample.step, self._sample.number) != (step, number):
            self._sample = _ItemSample(step=step, number=number)
        self._sample.runs = runs

    def sampled_item(self, step: int) -> tuple[tuple[int, str], ...]:
        """Return what came of the item that was sampled in a step; see `sample_item`."""
        sample = self._sample
        return ((-1, sample.digest),) if sample is not None and sample.step == step and sample.digest else ()

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
        """Add the gradients of an item to the sums of buckets; see `StepEngine.backward`."""
        if step != self._step:
            raise InternalError(f"{kind} of step {step} while step {self._step} is running")
        if kind is not OpKind.B:
            raise InternalError(f"{kind}: the backward pass of a loop has no halves")
        passes = self._passes[microbatch]
        start, part = part_of(f"{kind} of micro-batch {microbatch}", "forward pass", passes, layers)
        del passes[start]
        if start < part.start:
            passes[start] = LayerRange(start, part.start)
        for index in reversed(part.indices):
            gradients, self._items[microbatch][index] = self._items[microbatch][index], ()
            if adds and not self._is_absent(index, microbatch):
                record = self._records[microbatch] if index == self.num_layers - 1 else None
                self._add(index, microbatch, gradients, record)
        return _handed_on() if part.start else None

    def accept(self, reduction: ReducedLayers, summed: Total) -> None:
        """Take a sum; nobody asks for the one of the step before any more. See `SummedStage.accept`."""
        super().accept(reduction, summed)
        self._taken(reduction)

    def take_sum(self, reduction: ReducedLayers, message: Tensor) -> None:
        """Take a sum that another owner has completed; see `SummedStage.take_sum`."""
        super().take_sum(reduction, message)
        self._taken(reduction)

    def _taken(self, reduction: ReducedLayers) -> None:
        step, sums = self._last
        if step != self._step:
            sums.pop(reduction, None)
        if self._logs and reduction == (self.num_layers - 1,) and self._step is not None:
            logged = self._records_of_step[:, -_MARKS - 2 * len(self._logs) : -_MARKS]
            sums_of, times = logged.double().sum(0).chunk(2)
            found = zip(sums_of.tolist(), map(int, times.tolist()), strict=True)
            self._prepared.logged[self._step] = dict(zip(self._logs, found, strict=True))

    @property
    def _records_of_step(self) -> Tensor:
        """What all items have told beside their gradients: float32, a row for each that counts."""
        return present(self._accepted((self.num_layers - 1,)).records)

    # --- what items count, and whether there are more -----------------------------------------------------------------

    def conclude(self, vote: Any) -> None:
        """Settle the verdict, and whether the loop ends: all items have told by now. See `SteppedStage.conclude`.

        Raises:
            StepVoid: the loop was stopped before this step.
            ConfigError: some items have weights and others have none.
        """
        step, marks = self._step, self._records_of_step[:, -_MARKS:]
        assert step is not None, "a step that is settled has begun"
        stops = int(marks[:, 1].max()) if len(marks) else 0
        if stops:
            self.ends = self._prepared.ends = step + (stops == LAST)
        if stops == VOID:
            raise StepVoid(step)
        self._shares = _shares(step, marks[:, 0])
        super().conclude(vote)

    def _judge(self, vote: Tensor) -> float:
        if self._shares is None:
            return super()._judge(vote)
        weighs = len(self._shares) / float(self._shares.sum() or 1.0)  # of the mean, to divide by the weights instead
        scaled = vote.clone()
        scaled[:, 1] *= weighs * weighs
        return super()._judge(scaled) * weighs

    def _gradients(self, layer: int, owned: Owned, factor: float) -> Mapping[str, Tensor | None]:
        if self._shares is None:
            return super()._gradients(layer, owned, factor)
        means = super()._gradients(layer, owned, 1.0).items()
        return {name: None if mean is None else (mean.double() * factor).to(mean.dtype) for name, mean in means}

    def losses(self) -> list[float] | None:
        """Return the losses of the step, by their weights; see `SummedStage.losses`."""
        losses = super().losses()
        if losses is None or self._shares is None or len(losses) != len(self._shares):
            return losses
        shares = (self._shares * (len(losses) / float(self._shares.sum() or 1.0))).tolist()
        return [loss * share for loss, share in zip(losses, shares, strict=True)]

    def _swap(self, layer: int) -> None:
        again, step = _live(self._owned[layer]).ahead, self._owned[layer].committed.step
        super()._swap(layer)
        if layer == self.layers[-1]:
            self._last = (step, dict(self._reduced))
            repeats = step in self.repeated or (self._failing is not None and self._failing.replays)
            if not again:
                self._prepared.advance(counts=not repeats)

    def _forget(self) -> None:
        super()._forget()
        self._passes.clear()
        self._items.clear()
        self._records.clear()

    def _work(self) -> Work:
        passes = ((number, left) for number, found in self._passes.items() for left in found.values())
        return Work(contexts=tuple(sorted(Part(*each) for each in passes)), counted=self._added())

    # --- a step that is interrupted -----------------------------------------------------------------------------------

    def progress(self) -> tuple[StepProgress, ...]:
        """Return what is kept of the steps that somebody may not have ended; see `SteppedStage.progress`."""
        found, (step, sums) = super().progress(), self._last
        if sums and all(each.step != step for each in found):
            found = (StepProgress(step=step, complete=tuple(sorted(sums))), *found)
        return found

    def resume(self, step: int, standing: Iterable[ReducedLayers], counted: tuple[Interval, ...] | None = None) -> None:
        """Go on with a step; whoever has ended it hands over its sums. See `SteppedStage.resume`."""
        last, sums = self._last
        if last == step != self._step:
            self.discard()
            self._step, self._reduced = step, {layers: replace(each) for layers, each in sums.items()}
        super().resume(step, standing, counted)

    def _leave_out(self, microbatches: frozenset[int]) -> None:
        super()._leave_out(microbatches)
        for number in microbatches:
            self._passes.pop(number, None)
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

    @property
    def ahead(self) -> bool:  # type: ignore[override]
        """Whether the weights are those of the next step already; see `SteppedStage.ahead`."""
        return any(_live(owned).ahead for owned in self._owned.values())

    def export(self, layer: int) -> LayerState:
        """Return a bucket's live state; with the last one goes all that is of no bucket. See `SummedStage.export`.

        Raises:
            InternalError: its weights are those of a later step than it counts.
        """
        if _live(self._owned[layer]).ahead:
            raise InternalError(f"bucket {layer} is ahead of the step that it counts, and has no state of that")
        state = super().export(layer)
        return self._with_told(state)

    def save(self, layer: int, directory: Path) -> Path:
        """Write a bucket's live state, also where a job ends in the middle of a step; see `SummedStage.save`."""
        live = _live(self._owned[layer])
        if not live.ahead:
            return super().save(layer, directory)
        path = layer_file(directory, layer)
        save_layer(path, self._with_told(replace(live.export(), step=live.step + 1)))
        return path

    def _with_told(self, state: LayerState) -> LayerState:
        if state.layer < self.num_layers - 1:
            return state
        told = self._prepared.tell()
        about = {**self._prepared.about, _APART: list(told.apart)} if told.apart else self._prepared.about
        return replace(state, extra=told.text, extra_tensors=told.tensors, about=about)

    def _for_file(self, state: LayerState) -> LayerState:
        """From where data can be read on; not what several owners give alike, as each has marks of its own."""
        mark = self.mark_of(state.step) if state.layer == self.num_layers - 1 else None
        return state if mark is None else replace(state, about={**state.about, _MARK: mark})

    def mark_of(self, step: int) -> dict[str, Any] | None:
        """Return from where the data of a step and those behind it can be read, in the form of JSON; None: unknown."""
        streamed = self._prepared.streamed
        return None if streamed is None else streamed.hint(self._shown(step) * self._num_microbatches)

    def learn_mark(self, told: Mapping[str, Any]) -> None:
        """Take what `mark_of` of another worker, or run, has returned."""
        if self._prepared.streamed is not None:
            self._prepared.streamed.stream.learn(told)

    def install(self, layer: int, state: LayerState) -> None:
        """Replace a bucket's state; see `SummedStage.install`."""
        super().install(layer, replace(state, optimizer={}) if self._prepared.begins_anew(layer) else state)
        self._last = (-1, {})
        if state.extra:
            self._prepared.take(ToldState(state.extra, state.extra_tensors, state.about.get(_APART)))
        if _MARK in state.about:
            self.learn_mark(state.about[_MARK])

    def put_back(self) -> None:
        """Take what the script has put in the place of a tensor's ``data`` between two steps."""
        for owned in self._owned.values():
            _live(owned).put_back()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """What updates each bucket that has anything to train."""
        found = (_live(owned).optimizer for owned in self._owned.values())
        return tuple(each for each in found if each is not None)

    @property
    def loss_scale(self) -> float | None:
        """What the losses of the step that begins are multiplied by; None: they are not."""
        scale = self._owned[self.num_layers - 1].committed.loss_scale
        return None if scale is None else scale.value

    @property
    def stats(self) -> RunningStats:
        """The batch-norm statistics of the model."""
        return self.running_stats(self.num_layers - 1)


def _handed_on() -> Tensor:
    return torch.zeros(HANDED_ON.shape, dtype=torch.float32, device="cpu")  # whatever the script's defaults are


def _shares(step: int, weights: Tensor) -> Tensor | None:
    """The weights of a step's items: float64, 0 for one that was skipped; None if they have none.

    Raises:
        ConfigError: some have, and others have none.
    """
    skipped, unweighted = weights.isnan(), weights < 0
    if bool((skipped | unweighted).all()):
        return None
    if bool(unweighted.any()):
        raise ConfigError(
            f"step {step}: step.backward(loss, weight=) was given a weight in {int((weights >= 0).sum())} items, and "
            f"none in {int(unweighted.sum())}; expected one in each, or in none"
        )
    return weights.double().nan_to_num(0.0)


def _summed(gradient: Tensor | None) -> Tensor | None:
    """A gradient as it is added up: float64 with float32's accuracy."""
    return gradient.float() if gradient is not None and gradient.dtype == torch.float64 else gradient


def _live(owned: Owned) -> LiveLayer:
    assert isinstance(owned.committed, LiveLayer), "buckets go forward only"
    return owned.committed


def _check_type(name: str, dtype: torch.dtype) -> None:
    if dtype != torch.float64:  # which is summed as float32
        check_dtype(name, dtype)
