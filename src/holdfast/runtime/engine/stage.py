"""The compute engine of one worker: forward, the two halves of backward, and the update of the layers it owns.

The layer is the unit of numerics. At every layer boundary the graph is cut, the tensor gets one canonical layout and
the random generator is seeded from (seed, step, micro-batch, layer). So a micro-batch's gradients depend neither on the
worker nor on the layers that happen to be neighbours on it.

The course of a step on one worker::

    stage.begin(step)
    ... stage.forward(...) and stage.backward(...) in the worker's order ...
    for reduction in stage.reductions:
        stage.accept(reduction, sum over owners of stage.message(reduction))
    stage.conclude(merged votes of all workers)      # or: stage.speculate()
    for layer in stage.layers:
        stage.update(layer); stage.swap(layer)
    ...                                                 # the next step begins
    stage.settle(merged votes) or stage.remake_update()    # after speculate() only, and before the next update
"""

from __future__ import annotations

import logging
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor, nn

from holdfast.core.placement import LayerRange
from holdfast.core.progress import Part
from holdfast.core.schedule import OpKind
from holdfast.core.tensorspec import TensorSpec
from holdfast.core.work import WorkPhase, working
from holdfast.data.items import Inputs, first_of, of_each
from holdfast.devices.device import HOST, Device
from holdfast.errors import ConfigError, InternalError
from holdfast.optim.committed import Committed, CommittedLayer
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.loss_scale import LossScaling
from holdfast.optim.shadow import ShadowedLayer
from holdfast.optim.undoable import UndoableLayer
from holdfast.protocol.auditing import Digests
from holdfast.runtime.engine.auditing import SampleInputs, SampleWatch, sample_bytes
from holdfast.runtime.engine.evaluated import EvaluationData, beside_of, run_as_evaluated, scores_of
from holdfast.runtime.engine.model import Loss, Tie, check_loss, check_output
from holdfast.runtime.engine.precision import cast_to
from holdfast.runtime.engine.split_backward import PendingWeights, fused_gradient, input_gradient, weight_gradient
from holdfast.runtime.engine.stepped import BEFORE_ALL, Work, part_of
from holdfast.runtime.engine.summed import Owned, SummedStage, check_untied, own
from holdfast.runtime.tensors import Place, places

__all__ = ["CommitMethod", "Loader", "Stage", "layer_seed"]

CommitMethod: TypeAlias = Literal["shadow", "undo"]
"""How a step can be taken back: from a second copy, or by inverting it."""

Loader: TypeAlias = Callable[[int, int], tuple[Inputs, Tensor]]
"""``load(step, microbatch)``: the inputs and targets of a micro-batch, a pure function of both."""

_log = logging.getLogger(__name__)
_COMMITS: Mapping[CommitMethod, type[CommittedLayer]] = {
    "shadow": ShadowedLayer,
    "undo": UndoableLayer,
}
_ALIGNMENT = 64  # bytes; what torch's own allocations have, and what a matrix product's rounding may depend on


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Return the seed of the random generator for one layer's forward pass: a stable hash of 64 bits.

    >>> layer_seed(0, 1, 2, 3) == layer_seed(0, 1, 2, 3) != layer_seed(0, 1, 3, 2)
    True
    """
    return int.from_bytes(blake2b(struct.pack("<4q", seed, step, microbatch, layer), digest_size=8).digest(), "little")


@dataclass(slots=True)
class _Cell:
    """One layer's forward pass of one micro-batch.

    Attributes:
        input: what the layer was given.
        output: what it returned, with the graph; without it if it is to be run again.
        record: what travels with its gradients.
        context: what the layer was given beside its input; None of one that is given nothing.
        again: the seed of a forward pass that is run again for its backward pass; None if the graph was kept.
    """

    input: Tensor
    output: Tensor
    record: Tensor | None
    context: object | None = None
    again: int | None = None


@dataclass(slots=True)
class _Context:
    """What a micro-batch's forward pass leaves for its backward pass."""

    layers: LayerRange
    cells: list[_Cell]
    logits: Tensor | None = None
    loss: Tensor | None = None

    @property
    def left(self) -> LayerRange:
        """The layers that no backward pass has gone over yet."""
        return LayerRange(self.layers.start, self.layers.start + len(self.cells))


@dataclass(slots=True)
class _Half:
    """One layer's I, waiting for W."""

    layer: int
    pending: PendingWeights | list[Tensor | None]
    record: Tensor | None


@dataclass(slots=True)
class _Halves:
    """What I leaves of a pass for W: halves, by ascending layers."""

    left: list[_Half]

    @property
    def layers(self) -> LayerRange:
        """Those that W has not gone over yet."""
        return LayerRange(self.left[0].layer, self.left[-1].layer + 1)


@dataclass(slots=True)
class _Known:
    """What is known of how a layer runs.

    Attributes:
        watched: places of parameters and buffers, which no forward pass may change.
        modules: where modules have others that have any of these, and which.
        split_works: whether split and fused backward were found equal; None before the first I.
    """

    watched: list[Place]
    modules: list[tuple[Mapping[str, nn.Module | None], str, nn.Module]]
    split_works: bool | None = None


class Stage(SummedStage):
    """Computes the operations of one worker over the layers that it has.

    Args:
        layers: the untied layers of the whole model, or, with ``num_layers``, those of ``owned`` only. The stage takes
            them over: it replaces their tensors.
        owned: the layers that this worker holds or follows, ascending.
        ties: all ties of the model.
        loss: the loss of one micro-batch; needed by owners of the last layer.
        optimizer: makes one layer's optimizer.
        lr_scale: factor on the learning rate, a pure function of the step.
        seed: seed of the job.
        num_microbatches: micro-batches of a step, over all pipelines.
        chunks: in how many chunks they are cut for their sum, see `holdfast.core.sum_order.SumOrder.of`.
        load: the samples of a micro-batch.
        clip_norm: largest norm of the mean gradient over the whole model; None for no limit.
        commit: how a step can be taken back; or what makes a layer that is taken back bitwise.
        scaling: how the scale of the loss changes; None to scale no loss.
        num_layers: layers of the model, where ``layers`` are those of the range only.
        device: where to compute.
        checkpointed: layers of the model that keep only their input and are run again for their backward pass. The
            second pass is the same code under the same seed, so the gradients have the same bits.
        note: takes what a person should know of a fall-back.
        outputs: what every layer of the model returns, for any micro-batch; empty: it is not known.
        evaluation: the data that the job is evaluated by; None: it is not.
        precision: of what autocast makes each layer's operations, and those of the loss; None: as they are written.

    Raises:
        ConfigError: layers share a parameter that was not untied, or a parameter's type is not supported.
        NotUndoable: ``commit`` is ``undo`` and the optimizer's steps have no inverse.
    """

    def __init__(
        self,
        *,
        layers: Sequence[nn.Module],
        owned: Sequence[int],
        ties: Sequence[Tie],
        loss: Loss,
        optimizer: OptimizerFactory,
        lr_scale: Callable[[int], float],
        seed: int,
        num_microbatches: int,
        chunks: int | None = None,
        load: Loader,
        clip_norm: float | None = None,
        commit: CommitMethod | Callable[..., Committed] = "shadow",
        scaling: LossScaling | None = None,
        num_layers: int | None = None,
        device: Device = HOST,
        checkpointed: frozenset[int] = frozenset(),
        note: Callable[[str], None] = _log.warning,
        outputs: Sequence[TensorSpec] = (),
        evaluation: EvaluationData | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        own_layers = layers if num_layers is not None else [layers[index] for index in owned]
        if len(own_layers) != len(owned):
            raise InternalError(f"{len(own_layers)} layers were given for {len(owned)}")
        check_untied(own_layers)
        commits = commit if callable(commit) else _COMMITS[commit]
        super().__init__(
            {
                index: own(index, module, commits, optimizer, device=device.torch, ties=ties, scaling=scaling)
                for index, module in zip(owned, own_layers, strict=True)
            },
            num_layers=len(layers) if num_layers is None else num_layers,
            ties=ties,
            num_microbatches=num_microbatches,
            chunks=chunks,
            lr_scale=lr_scale,
            clip_norm=clip_norm,
            device=device.torch,
        )
        self._on = device
        self._loss, self._load, self._seed = loss, load, seed
        self._checkpointed, self._note = checkpointed, note
        self._outputs = dict(enumerate(outputs))
        self._known = {index: _known_of(each) for index, each in self._owned.items()}
        self.returns = commit != "undo"
        self._contexts = defaultdict[int, dict[int, _Context]](dict)  # per micro-batch, by first layer
        self._halves = defaultdict[int, dict[int, _Halves]](dict)
        self._loaded: tuple[int, int, tuple[Inputs, Tensor]] | None = None
        self._evaluation, self._precision = evaluation, precision
        self._loaded_to_evaluate: tuple[int, tuple[Inputs, Tensor]] | None = None
        self._watch: SampleWatch | None = None  # of this step; whoever owns the sample may ask for it

    # --- a step -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        step: int,
        microbatch: int,
        activation: Tensor | None,
        layers: LayerRange | None = None,
        *,
        adds: bool = True,
    ) -> Tensor | None:
        """Run layers on a micro-batch (F).

        Args:
            step: the step; another one than before begins it.
            microbatch: global number.
            activation: what the layer before returned, handed over for good; None for layer 0.
            layers: which of those that are held; None: all, which are one range.
            adds: whether a backward pass will go over it; else nothing of it is kept.

        Returns:
            The activation for the next layer, without a graph; None from the last one, with which goes the loss.

        Raises:
            ConfigError: a layer does not return one tensor or changes a buffer; the loss is not a scalar.
            WorkFailed: the data, a layer or the loss raised.

        After failure: nothing is kept of this micro-batch; safe to repeat.
        """
        if step != self._step:
            self.begin(step)
        layers = layers or self._all()
        current = activation if layers.start else first_of(self._samples(step, microbatch)[0])
        if current is None:
            raise InternalError(f"forward of micro-batch {microbatch} on layers {layers} got no activation")
        current = self._on.brought(current)
        cells = []
        for index in layers.indices:
            owned = self._owned[index]
            source = _cut(current, wants_gradient=index > 0)
            seed, version = self._seed_of(step, microbatch, index), source._version
            with working(WorkPhase.FORWARD, layer=index, microbatch=microbatch):
                cell = self._run_layer(index, owned, source, seed, self._beside(owned, step, microbatch))
            cells.append(_without_graph(index, cell, seed, version) if index in self._checkpointed else cell)
            current = cell.output
        context = _Context(layers, cells)
        if adds:
            self._contexts[microbatch][layers.start] = context
        if layers.stop == self.num_layers:
            self._run_loss(context, step, microbatch)
        if adds and self._watches(microbatch, layers):
            self._tell_forward(self._watched, context, step)
        self._on.keep_pace()
        return _canonical(current.detach()) if layers.stop < self.num_layers else None

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
        """Run the backward pass of a micro-batch, or one half of it, over the layers of a forward pass.

        B and W add the gradients to the sums that are not complete here, and count the micro-batch in the ledger.

        Args:
            kind: B, I or W.
            step: the step of the forward pass.
            microbatch: global number.
            gradient: for what the forward pass returned, or of a later part, what the one before it did; None for the
                last layer and for W.
            layers: the part to run: the last of those that are left of a pass. None: all that are left of the only one.
            adds: of B, whether it adds and counts at all.

        Returns:
            The gradient for what the first of the layers was given; None for layer 0 and for W.

        Raises:
            InternalError: there is no forward pass (for W: no I) of this micro-batch to go back over, or the part is
                not the last of what is left of it.
            WorkFailed: a layer's backward pass raised.

        After failure: the micro-batch must be discarded and run again from its forward pass.
        """
        if step != self._step:
            raise InternalError(f"{kind} of step {step} while step {self._step} is running")
        if kind is OpKind.W:
            self._run_weights(microbatch, layers)
            self._on.keep_pace()
            return None
        if kind not in (OpKind.B, OpKind.I):
            raise InternalError(f"{kind} is not a backward operation")
        context, part = self._context(kind, microbatch, layers)
        if part.start == context.layers.start:
            del self._contexts[microbatch][part.start]
        if context.loss is not None and part.stop == context.layers.stop:
            gradient = self._loss_gradient(context, microbatch)
        if gradient is None:
            raise InternalError(f"{kind} of micro-batch {microbatch} on layers {part} got no gradient")
        return self._run_cells(kind, microbatch, context, part, self._on.brought(gradient), adds=adds)

    def _context(self, kind: OpKind, microbatch: int, layers: LayerRange | None) -> tuple[_Context, LayerRange]:
        """Returns the pass that is gone back over, and which part of it."""
        passes = self._contexts[microbatch]
        left = {start: context.left for start, context in passes.items()}
        start, part = part_of(f"{kind} of micro-batch {microbatch}", "forward pass", left, layers)
        return passes[start], part

    def _leave_out(self, microbatches: frozenset[int]) -> None:
        super()._leave_out(microbatches)
        for number in microbatches:
            self._contexts.pop(number, None)
            self._halves.pop(number, None)

    def _work(self) -> Work:
        contexts = ((m, each.left) for m, passes in self._contexts.items() for each in passes.values())
        halves = ((m, each.layers) for m, passes in self._halves.items() for each in passes.values())
        return Work(
            contexts=tuple(sorted(Part(*each) for each in contexts)),
            halves=tuple(sorted(Part(*each) for each in halves)),
            counted=self._added(),
        )

    def _forget(self) -> None:
        super()._forget()
        self._contexts.clear()
        self._halves.clear()
        self._loaded = self._watch = None

    def _adopt(self, layer: int, other: Self) -> None:
        super()._adopt(layer, other)
        self._known[layer] = other._known[layer]

    # --- forward ------------------------------------------------------------------------------------------------------

    def _seed_of(self, step: int, microbatch: int, layer: int) -> int:
        """Returns the seed of the random generator for a layer's forward pass; the loss is the one after the last."""
        return layer_seed(self._seed, step, microbatch, layer)

    def _samples(self, step: int, microbatch: int) -> tuple[Inputs, Tensor]:
        if self._loaded is None or self._loaded[:2] != (step, microbatch):
            with working(WorkPhase.LOADING, microbatch=microbatch):
                loaded = self._load(step, microbatch)
            self._loaded = (step, microbatch, self._brought(loaded))
        return self._loaded[2]

    def _brought(self, loaded: tuple[Inputs, Tensor]) -> tuple[Inputs, Tensor]:
        """Returns inputs and targets in the device's memory."""
        return of_each(self._on.brought, loaded[0]), self._on.brought(loaded[1])

    def _beside(self, owned: Owned, step: int, microbatch: int) -> object | None:
        """Returns what a layer is given beside its input; before it is seeded: loading may draw random numbers."""
        return beside_of(owned.module, lambda: self._samples(step, microbatch)[0], self._cast())

    def _run_layer(self, index: int, owned: Owned, source: Tensor, seed: int, beside: object | None) -> _Cell:
        self._on.seed(seed)
        given = (source,) if beside is None else (source, beside)
        marks = [_mark(place.tensor) for place in self._known[index].watched]
        if owned.stats.width:
            with owned.stats.apart(), self._cast():
                output = owned.module(*given)
                record: Tensor | None = owned.stats.taken()
        else:
            with self._cast():
                output, record = owned.module(*given), None
        if marks:
            _check_watched(index, owned.module, self._known[index], marks)
        return _Cell(source, check_output(index, owned.module, output, self._outputs.get(index)), record, beside)

    def rate(self, step: int) -> float | None:
        """See `Engine.rate`."""
        rates = (owned.committed.rate(self._lr_scale(step)) for owned in self._owned.values())
        return next((rate for rate in rates if rate is not None), None)

    def _cast(self) -> AbstractContextManager[object]:
        """Within it operations are of the job's precision."""
        return cast_to(self._precision, self._device)

    def _run_loss(self, context: _Context, step: int, microbatch: int) -> None:
        last = context.cells[-1]
        context.logits = _cut(last.output, wants_gradient=True)
        target = self._samples(step, microbatch)[1]  # before the seed: loading may draw random numbers, too
        self._on.seed(self._seed_of(step, microbatch, self.num_layers))
        with working(WorkPhase.LOSS, microbatch=microbatch), self._cast():
            context.loss = check_loss(self._loss(context.logits, target))
        value = context.loss.detach().float().reshape(1)
        last.record = value if last.record is None else torch.cat([value, last.record])

    # --- backward -----------------------------------------------------------------------------------------------------

    def _loss_gradient(self, context: _Context, microbatch: int) -> Tensor:
        """Returns the gradient of the loss, which may be scaled, for what the last layer returned."""
        assert context.loss is not None, "only who has the last layer begins with the loss"
        assert context.logits is not None, "the loss is of something"
        scale = self._owned[self.num_layers - 1].committed.loss_scale
        loss = context.loss if scale is None else context.loss.float() * scale.value
        with working(WorkPhase.BACKWARD, microbatch=microbatch):  # of the loss, which is no layer
            (start,) = torch.autograd.grad(loss, [context.logits])
        return start

    def _run_cells(
        self, kind: OpKind, microbatch: int, context: _Context, part: LayerRange, gradient: Tensor, *, adds: bool
    ) -> Tensor | None:
        halves: list[_Half] = []
        for index in reversed(part.indices):
            cell = context.cells.pop()
            owned = self._owned[index]
            with working(WorkPhase.BACKWARD, layer=index, microbatch=microbatch):
                if cell.again is not None:
                    output = self._run_layer(index, owned, cell.input, cell.again, cell.context).output
                    cell = replace(cell, output=output, again=None)
                with owned.stats.apart() if owned.stats.width else nullcontext():
                    if kind is OpKind.B:
                        found, weights = self._fused(owned, cell, _canonical(gradient))
                        if adds:
                            self._add(index, microbatch, weights, cell.record)
                    else:
                        found, pending = self._first_half(index, owned, cell, _canonical(gradient))
                        halves.append(_Half(index, pending, cell.record))
            if self._watches(microbatch, index) and (adds or kind is OpKind.I):
                self._watched.backward(_canonical(gradient), found)
            gradient = torch.zeros_like(cell.input) if found is None and index > 0 else found  # type: ignore[assignment]
        if kind is OpKind.I:
            self._halves[microbatch][part.start] = _Halves(halves[::-1])
        self._on.keep_pace()
        return _canonical(gradient) if part.start else None

    def _first_half(
        self, index: int, owned: Owned, cell: _Cell, gradient: Tensor
    ) -> tuple[Tensor | None, PendingWeights | list[Tensor | None]]:
        """Run I. A layer's first one is compared with the fused pass, which is used from then on if they differ."""
        known = self._known[index]
        if known.split_works:
            return input_gradient(cell.output, cell.input, owned.parameters, gradient)
        if known.split_works is None:
            found, pending = input_gradient(cell.output, cell.input, owned.parameters, gradient)
            weights = weight_gradient(pending)
            fused = self._fused(owned, cell, gradient)
            known.split_works = _identical([found, *weights], [fused[0], *fused[1]])
            if not known.split_works:
                self._note(f"layer {index}: split backward differs from fused; its W is done within I")
            return fused
        return self._fused(owned, cell, gradient)

    def _fused(self, owned: Owned, cell: _Cell, gradient: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run B of one layer; returns the gradients for its input and for its parameters."""
        return fused_gradient(cell.output, cell.input, owned.parameters, gradient)

    def _run_weights(self, microbatch: int, layers: LayerRange | None) -> None:
        passes = self._halves[microbatch]
        left = {start: each.layers for start, each in passes.items()}
        start, part = part_of(f"W of micro-batch {microbatch}", "I", left, layers)
        halves = passes[start].left
        if part == left[start]:
            del passes[start]
        for _ in part.indices:
            half = halves.pop()  # so that each layer's graph goes as soon as it was used
            index, owned, pending = half.layer, self._owned[half.layer], half.pending
            with (
                working(WorkPhase.BACKWARD, layer=index, microbatch=microbatch),
                owned.stats.apart() if owned.stats.width else nullcontext(),
            ):
                weights = weight_gradient(pending) if isinstance(pending, PendingWeights) else pending
            self._add(index, microbatch, weights, half.record)

    def _add(self, layer: int, microbatch: int, gradients: Sequence[Tensor | None], record: Tensor | None) -> None:
        if self._watches(microbatch, layer):
            self._watched.weights(gradients)
        super()._add(layer, microbatch, gradients, record)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, number: int, value: Tensor | None, layers: LayerRange) -> Tensor | dict[str, float]:
        """Run layers on a micro-batch that the job is evaluated by; see `Engine.evaluate`.

        Args:
            number: of the micro-batch.
            value: what the layer before returned; None for layer 0.
            layers: some that are held.

        Returns:
            What the next layer takes; from the last one the scores, by their names.
        """
        current = first_of(self._to_evaluate(number)[0]).clone() if value is None else self._on.brought(value)
        for index in layers.indices:
            module = self._owned[index].module
            with working(WorkPhase.EVALUATION, layer=index, microbatch=number):
                beside = beside_of(module, lambda: self._to_evaluate(number)[0], self._cast(), evaluated=True)
                self._on.seed(layer_seed(self._seed, BEFORE_ALL, number, index))
                with self._cast():
                    output = run_as_evaluated(index, module, _canonical(current), beside)
            current = check_output(index, module, output, self._outputs.get(index))
        self._on.keep_pace()
        if layers.stop < self.num_layers:
            return _canonical(current)
        assert self._evaluation is not None, "else nothing is evaluated"
        target = self._to_evaluate(number)[1]  # before the seed: loading may draw random numbers, too
        self._on.seed(layer_seed(self._seed, BEFORE_ALL, number, self.num_layers))
        with working(WorkPhase.EVALUATION, microbatch=number), self._cast():
            return scores_of(self._loss, self._evaluation.metrics, current, target, self._on)

    def _to_evaluate(self, number: int) -> tuple[Inputs, Tensor]:
        assert self._evaluation is not None, "else nothing is evaluated"
        if self._loaded_to_evaluate is None or self._loaded_to_evaluate[0] != number:
            self._loaded_to_evaluate = number, self._brought(self._evaluation.load(number))
        return self._loaded_to_evaluate[1]

    # --- audit --------------------------------------------------------------------------------------------------------

    def watch(self, layer: int, microbatch: int) -> None:
        """Keep, in this step, what is computed of a layer and micro-batch, and of what."""
        self._watch = self._watch_of(layer, microbatch)

    def audit_message(self, times: int) -> Tensor:
        """Return that for another owner: uint8. It was computed once; for more digests it is computed again.

        Raises:
            InternalError: the sample was not run, or not to its end.
        """
        watch = self._watched
        if watch.message is None:
            again = [self._recompute(watch.layer, watch.microbatch, watch.given) for _ in range(times - 1)]
            watch.message = watch.given.pack([watch.digests, *again])
        return watch.message

    def audit_bytes(self, layer: int) -> int:
        """Return how long such a message of a layer is."""
        return sample_bytes(self._given_specs(layer))

    def audit(
        self, layer: int, microbatch: int, message: Tensor, times: int
    ) -> tuple[tuple[Digests, ...], tuple[Digests, ...]]:
        """Compute a sample ``times`` times, adding to no sum; return the digests of its runner, and ours.

        Raises:
            WorkFailed: the data, the layer or the loss raised.
        """
        given, theirs = SampleInputs.unpack(message, self._given_specs(layer), times, self._device)
        return theirs, tuple(self._recompute(layer, microbatch, given) for _ in range(times))

    def _recompute(self, layer: int, microbatch: int, given: SampleInputs) -> Digests:
        """Runs one layer forward and back, as in this step, from what it was given; loads its samples anew."""
        step, owned, watch = self._step, self._owned[layer], self._watch_of(layer, microbatch)
        if step is None:
            raise InternalError(f"layer {layer} is to be computed a second time, and no step is running")
        self._loaded = None
        source = first_of(self._samples(step, microbatch)[0]) if given.input is None else given.input
        with working(WorkPhase.FORWARD, layer=layer, microbatch=microbatch):
            seed, beside = self._seed_of(step, microbatch, layer), self._beside(owned, step, microbatch)
            cell = self._run_layer(layer, owned, _cut(source, wants_gradient=layer > 0), seed, beside)
        context = _Context(LayerRange(layer, layer + 1), [cell])
        if watch.last:
            self._run_loss(context, step, microbatch)
        self._tell_forward(watch, context, step)
        start = self._loss_gradient(context, microbatch) if given.gradient is None else given.gradient
        with (
            working(WorkPhase.BACKWARD, layer=layer, microbatch=microbatch),
            owned.stats.apart() if owned.stats.width else nullcontext(),
        ):
            found, weights = self._fused(owned, cell, _canonical(start))
        watch.backward(_canonical(start), found)
        watch.weights(weights)
        return watch.digests

    def _watch_of(self, layer: int, microbatch: int) -> SampleWatch:
        return SampleWatch(layer, microbatch, first=layer == 0, last=layer == self.num_layers - 1)

    def _given_specs(self, layer: int) -> tuple[TensorSpec | None, TensorSpec | None]:
        last = layer == self.num_layers - 1
        return self._outputs[layer - 1] if layer else None, None if last else self._outputs[layer]

    @property
    def _watched(self) -> SampleWatch:
        if self._watch is None:
            raise InternalError("no sample is watched in this step")
        return self._watch

    def _watches(self, microbatch: int, layers: LayerRange | int) -> bool:
        watch = self._watch
        if watch is None or watch.microbatch != microbatch:
            return False
        return watch.layer == layers if isinstance(layers, int) else watch.layer in layers

    def _tell_forward(self, watch: SampleWatch, context: _Context, step: int) -> None:
        cell = context.cells[watch.layer - context.layers.start]
        target = self._samples(step, watch.microbatch)[1] if watch.last else None
        watch.forward(cell.input, cell.output, cell.record, target)


def _known_of(owned: Owned) -> _Known:
    watched = [each for each in places(owned.module) if each.name not in owned.stats.buffer_names]
    children = [(m._modules, name, child) for m in owned.module.modules() for name, child in m.named_children()]
    return _Known(watched, [each for each in children if next(places(each[2]), None) is not None])


def _mark(tensor: Tensor) -> tuple[int, int]:
    """What changes with whatever is done to a tensor."""
    return tensor._version, tensor.data_ptr()


def _check_watched(index: int, module: nn.Module, known: _Known, marks: Sequence[tuple[int, int]]) -> None:
    if any(there.get(name) is not child for there, name, child in known.modules):
        raise ConfigError(
            f"layer {index} ({type(module).__name__}) replaces a module of its own in the forward pass, one that has "
            "parameters or buffers; expected the same ones in all passes"
        )
    for place, mark in zip(known.watched, marks, strict=True):
        name, tensor = place.name, place.tensor
        if place.now is not tensor or _mark(tensor) != mark:
            what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ConfigError(
                f"layer {index} ({type(module).__name__}) changes its {what} {name!r} in the forward pass; only"
                " batch-norm's running statistics may change, because the order of micro-batches is not fixed"
            )


def _without_graph(index: int, cell: _Cell, seed: int, version: int) -> _Cell:
    """Returns a cell that keeps only what is needed to run the layer again; ``version``: of its input before it ran."""
    if cell.input._version != version:
        raise ConfigError(f"layer {index} changes its input in place; leave it out of model.checkpoint_activations")
    return replace(cell, output=cell.output.detach(), again=seed)


def _identical(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=True)
    )


def _cut(tensor: Tensor, *, wants_gradient: bool) -> Tensor:
    leaf = _canonical(tensor.detach())
    return leaf.requires_grad_() if wants_gradient else leaf


def _canonical(tensor: Tensor) -> Tensor:
    """Return the tensor in the one layout that a received message has too: dense, row-major, aligned."""
    if tensor.stride() == _strides(tensor.shape) and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))
