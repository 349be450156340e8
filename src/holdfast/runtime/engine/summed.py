"""What every engine that computes with torch does alike: it keeps the state of layers, sums, votes and updates.

How gradients come about is left to those that inherit it: from layers of a pipeline (``stage.py``), or from the loop of
a script (``runtime/loop/stage.py``). Each adds them, layer by layer, by :meth:`SummedStage._add`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from holdfast.core.summing import Contribution, SumSize, Total
from holdfast.core.work import WorkPhase, working
from holdfast.errors import ConfigError, InternalError, ReplicaDiverged
from holdfast.optim.accumulate import Accumulator, Layout, Reduced, check_dtype, present
from holdfast.optim.committed import Committed
from holdfast.optim.digest import LayerState, decode_layer, encode_layer, layer_file, layer_sha256, save_layer
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.loss_scale import LossScaling
from holdfast.optim.running_stats import RunningStats
from holdfast.runtime.engine.model import Tie, find_ties, tie_groups
from holdfast.runtime.engine.stepped import ReducedLayers, SteppedStage
from holdfast.runtime.engine.votes import pack_vote, unpack_vote

__all__ = ["Owned", "SummedStage", "check_untied", "own"]


@dataclass(slots=True, kw_only=True)
class Owned:
    """What is kept of a layer.

    Attributes:
        committed: the layer with its state, and how to take it back.
        stats: its batch-norm statistics.
        parameters: its trainable parameters.
        places: per reduction, the places in ``parameters`` of that reduction's weights, in the message's order.
    """

    committed: Committed
    stats: RunningStats
    parameters: list[nn.Parameter]
    places: dict[ReducedLayers, list[int]]

    @property
    def module(self) -> nn.Module:
        """The layer itself."""
        return self.committed.module


class SummedStage(SteppedStage[Reduced, float]):
    """Keeps, sums and updates layers whose gradients a subclass computes.

    A subclass has ``forward``, ``backward`` and ``_work``, and calls :meth:`_add`. What it keeps of a step besides, it
    drops in ``_forget`` and ``_leave_out``; what of a layer, it hands on in ``_adopt``.

    Args:
        owned: what is kept of each layer that this worker holds or follows, ascending.
        num_layers: of the whole model.
        ties: of the whole model.
        num_microbatches: micro-batches of a step, over all pipelines.
        chunks: in how many chunks they are cut for their sum, see `holdfast.core.sum_order.SumOrder.of`.
        lr_scale: factor on the learning rate, a pure function of the step.
        clip_norm: largest norm of the mean gradient over the whole model; None for no limit.
        device: where sums are made.
        more_recorded: float32 values that a micro-batch records with the last layer, beside its loss and batch-norm.
    """

    _as_is = 1.0  # a factor on the gradients; NaN: the step is omitted

    def __init__(
        self,
        owned: Mapping[int, Owned],
        *,
        num_layers: int,
        ties: Sequence[Tie] = (),
        num_microbatches: int,
        chunks: int | None = None,
        lr_scale: Callable[[int], float],
        clip_norm: float | None = None,
        device: torch.device,
        more_recorded: int = 0,
    ) -> None:
        super().__init__(owned)
        self._owned = dict(owned)
        self.num_layers = num_layers
        self._groups = tie_groups(ties)
        self._num_microbatches, self._chunks = num_microbatches, chunks
        self._lr_scale, self._clip_norm = lr_scale, clip_norm
        self._device, self._more_recorded = device, more_recorded
        touching = [group for group in self._groups if any(layer in self._owned for layer in group)]
        self.reductions: tuple[ReducedLayers, ...] = (*((layer,) for layer in owned), *touching)
        """The reductions that this worker takes part in: own layers ascending, then groups of ties ascending."""
        self._sums = {r: Accumulator(self._layout(r), self._device) for r in self.reductions}

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _add(self, layer: int, microbatch: int, gradients: Sequence[Tensor | None], record: Tensor | None) -> None:
        """Adds what a micro-batch gives for a layer, to sums that are not complete here, and counts it."""
        owned = self._owned[layer]
        scale = owned.committed.loss_scale
        if scale is not None:  # in float32, whose range has room for what becomes small
            gradients = [None if gradient is None else gradient.float() / scale.value for gradient in gradients]
        for reduction, places in owned.places.items():
            if reduction not in self._reduced:
                self._sums[reduction].add(layer, microbatch, [gradients[place] for place in places])
        if record is not None and (layer,) not in self._reduced:
            self._sums[layer,].record(microbatch, record)

    def _leave_out(self, microbatches: frozenset[int]) -> None:
        for reduction, sums in self._sums.items():
            if reduction not in self._reduced:
                sums.leave_out(microbatches)

    def _forget(self) -> None:
        for sums in self._sums.values():
            sums.reset()

    def message(self, reduction: ReducedLayers, dissent: int = 0) -> Contribution:
        """Return this worker's contribution to a reduction, which nobody changes any more. Safe to call again.

        Args:
            reduction: one of `reductions`.
            dissent: 1 if this worker is not ready for the generation that is prepared.
        """
        return self._sums[reduction].message(dissent)

    def message_size(self, reduction: ReducedLayers) -> SumSize:
        """Return how much any owner contributes to a reduction at most."""
        return self._sums[reduction].layout.sum_size

    def accept(self, reduction: ReducedLayers, summed: Total) -> None:
        """Take the sum of all owners' contributions, which may be in the host's memory.

        Raises:
            LedgerError: a micro-batch was not counted exactly once; nothing was accepted.
        """
        here = replace(summed, total=summed.total.to(self._device, non_blocking=True))
        self._reduced[reduction] = self._sums[reduction].decode(here)
        self._sums[reduction].reset()

    def sum_message(self, reduction: ReducedLayers) -> Tensor:
        """Return the sum of a reduction that is complete, for an owner that has not got it: uint8."""
        return self._sums[reduction].layout.pack(self._accepted(reduction))

    def sum_bytes(self, reduction: ReducedLayers) -> int:
        """Return how long such a message is."""
        return self._sums[reduction].layout.packed_bytes

    def take_sum(self, reduction: ReducedLayers, message: Tensor) -> None:
        """Take a sum that another owner has completed, instead of `accept`."""
        self._reduced[reduction] = self._sums[reduction].layout.unpack(message, self._device)
        self._sums[reduction].reset()
        self._dissent_from(reduction)

    def _dissent_from(self, reduction: ReducedLayers) -> None:
        self._reduced[reduction] = replace(self._reduced[reduction], dissent=1)

    def _accepted(self, reduction: ReducedLayers) -> Reduced:
        if reduction not in self._reduced:
            raise InternalError(f"reduction {reduction} was not accepted yet")
        return self._reduced[reduction]

    def counted(self) -> dict[int, frozenset[int]]:
        """Return the micro-batches of this step whose gradients were added here, per own layer."""
        return {layer: self._counted_in((layer,), layer) for layer in self.layers}

    def _added(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Own layers with the micro-batches that are in sums of theirs which are not complete."""
        counted = (
            (
                layer,
                frozenset().union(*(self._counted_in(r, layer) for r in owned.places if r not in self._reduced)),
            )
            for layer, owned in self._owned.items()
        )
        return tuple((layer, tuple(sorted(numbers))) for layer, numbers in counted if numbers)

    def _counted_in(self, reduction: ReducedLayers, layer: int) -> frozenset[int]:
        return frozenset(m for i, m in self._sums[reduction].counted if i == layer)

    def losses(self) -> list[float] | None:
        """Return the losses of the step in the order of micro-batches; None until the last layer's sum is accepted.

        Of micro-batches that were left out there are none.
        """
        reduced = self._reduced.get((self.num_layers - 1,))
        return None if reduced is None else present(reduced.records)[:, 0].tolist()

    # --- the verdict --------------------------------------------------------------------------------------------------

    def vote(self) -> Tensor:
        """Return what the verdict over the step needs: float64 ``[num_layers + groups of ties, 3]``.

        Rows are layers, then groups of ties ascending; rows of reductions that are not this worker's are zero. Column 0
        is 1 if the reduction was not finite, column 1 the squared L2 norm of its mean gradients, column 2 how many
        owners are not ready for the generation that is prepared.

        Raises:
            InternalError: a reduction was not accepted yet.
        """
        rows = torch.zeros(self.num_layers + len(self._groups), 3, dtype=torch.float64)
        for reduction in self.reductions:
            reduced = self._accepted(reduction)
            rows[self._row(reduction), 0] = not reduced.finite
            rows[self._row(reduction), 1] = reduced.squared_norm
            rows[self._row(reduction), 2] = reduced.dissent
        return rows

    @staticmethod
    def pack_vote(vote: Tensor) -> bytes:
        """See `StepEngine.pack_vote`."""
        return pack_vote(vote.numpy())

    @staticmethod
    def unpack_vote(data: bytes) -> Tensor:
        """See `StepEngine.unpack_vote`."""
        return torch.from_numpy(unpack_vote(data))

    @staticmethod
    def merge_votes(one: Tensor, other: Tensor) -> Tensor:
        """Return the vote of two workers: the element-wise maximum, since owners of a layer hold identical bits.

        Raises:
            ReplicaDiverged: two owners of a layer hold different norms.
        """
        differ = ((one != other) & (one != 0) & (other != 0)).any(dim=1)
        if bool(differ.any()):
            raise ReplicaDiverged(
                f"owners disagree on the gradients of vote rows {differ.nonzero().flatten().tolist()}"
            )
        return torch.maximum(one, other)

    def _judge(self, vote: Tensor) -> float:
        if bool(vote[:, 0].any()):
            self.norm = None
            return math.nan
        self.norm = norm = math.sqrt(math.fsum(vote[:, 1].tolist()))
        limit = self._clip_norm
        return limit / norm if limit is not None and norm > limit else 1.0

    @property
    def omitted(self) -> bool:
        """Whether the verdict is to leave this step's update out."""
        return self._verdict is not None and math.isnan(self._verdict)

    def _row(self, reduction: ReducedLayers) -> int:
        return reduction[0] if len(reduction) == 1 else self.num_layers + self._groups.index(reduction)

    # --- updates ------------------------------------------------------------------------------------------------------

    def _update(self, layer: int, verdict: float) -> None:
        owned = self._owned[layer]
        if math.isnan(verdict):
            owned.committed.skip()
            return
        with working(WorkPhase.UPDATE, layer=layer):
            owned.committed.update(
                self._gradients(layer, owned, verdict),
                self._lr_scale(owned.committed.step),
                lambda buffers: owned.stats.fold(buffers, self._stats_records(layer)),
            )

    def _gradients(self, layer: int, owned: Owned, factor: float) -> Mapping[str, Tensor | None]:
        names = owned.committed.trainable
        gradients: dict[str, Tensor | None] = {}
        for reduction, places in owned.places.items():
            for place, gradient in zip(places, self._accepted(reduction).gradients, strict=True):
                gradients[names[place]] = gradient if gradient is None or factor == 1.0 else gradient * factor
        return gradients

    def _stats_records(self, layer: int) -> Tensor:
        return present(self._accepted((layer,)).records)[:, int(layer == self.num_layers - 1) :]

    def _swap(self, layer: int) -> None:
        with working(WorkPhase.UPDATE, layer=layer):  # with ``undo`` the optimizer runs here
            self._owned[layer].committed.swap()

    def _take_back(self, layer: int, to_step: int) -> None:
        """Bitwise with ``shadow``; with ``undo`` within the bounds of `holdfast.optim.undo`."""
        self._owned[layer].committed.take_back(to_step)

    def _adopt(self, layer: int, other: Self) -> None:
        self._owned[layer] = other._owned[layer]

    # --- state --------------------------------------------------------------------------------------------------------

    def _steps(self) -> dict[int, int]:
        return {layer: owned.committed.step for layer, owned in self._owned.items()}

    @property
    def whole(self) -> bool:
        """Whether every own layer is a state that can be saved: False once an exception came in the middle of one."""
        return all(owned.committed.whole for owned in self._owned.values())

    def snapshot(self, layer: int, *, to_file: bool = False) -> Callable[[], bytes]:
        """Pin a copy of a layer's live state; the function returned encodes it, in any thread, at any time.

        Cost: one copy of the layer's weights, buffers and optimizer state.
        """
        pinned = self.export(layer).clone()
        return partial(encode_layer, self._for_file(pinned) if to_file else pinned)

    def _for_file(self, state: LayerState) -> LayerState:
        """A state with what a file says besides it."""
        return state

    def export(self, layer: int) -> LayerState:
        """Return a layer's live state; it shares memory with the stage: use it before the layer's next swap."""
        return self._owned[layer].committed.export()

    def install(self, layer: int, state: LayerState) -> None:
        """Replace a layer's state by one from elsewhere; its tensors are copied. Begin a step afterwards."""
        self._owned[layer].committed.install(state)

    def restore(self, layer: int, data: bytes) -> None:
        """Replace a layer's state by one that `snapshot` encoded. Begin a step afterwards.

        Raises:
            CorruptBlob: the bytes are not a layer's state.
            InternalError: they are another layer's, or of other shapes.
        """
        self.install(layer, decode_layer(data, name=f"state of layer {layer}"))

    def save(self, layer: int, directory: Path) -> Path:
        """Write a layer's live state to its file in a folder and return the file."""
        directory.mkdir(parents=True, exist_ok=True)
        path = layer_file(directory, layer)
        save_layer(path, self.export(layer))
        return path

    def exact(self, layer: int) -> bool:
        """Whether a layer's bits are those of all other exact owners.

        Not if an inverted step is, or may be, in the state: it then equals that of other owners within a tolerance.
        """
        return self._owned[layer].committed.exact

    def layer_digest(self, layer: int) -> str:
        """Return the SHA-256 of a layer's step and whole state: equal on all exact owners."""
        return layer_sha256(self.export(layer))

    def running_stats(self, layer: int) -> RunningStats:
        """Return what keeps the running statistics of a layer apart."""
        return self._owned[layer].stats

    # --- set-up -------------------------------------------------------------------------------------------------------

    def _layout(self, reduction: ReducedLayers) -> Layout:
        layer = next(layer for layer in reduction if layer in self._owned)
        owned = self._owned[layer]
        return Layout(
            layers=reduction,
            shapes=tuple(tuple(owned.parameters[place].shape) for place in owned.places[reduction]),
            num_microbatches=self._num_microbatches,
            record_width=self._record_width(layer) if len(reduction) == 1 else 0,
            chunks=self._chunks,
        )

    def _record_width(self, layer: int) -> int:
        last = layer == self.num_layers - 1
        return self._owned[layer].stats.width + last * (1 + self._more_recorded)


def own(
    layer: int,
    module: nn.Module,
    commit: Callable[..., Committed],
    optimizer: OptimizerFactory,
    *,
    device: torch.device,
    ties: Sequence[Tie] = (),
    scaling: LossScaling | None = None,
    normed: nn.Module | None = None,
    check: Callable[[str, torch.dtype], None] = check_dtype,
) -> Owned:
    """Return what is to be kept of a layer, which is taken over: its tensors are replaced.

    Args:
        layer: its index.
        module: the layer.
        commit: makes what its steps are taken back by.
        optimizer: makes its optimizer.
        device: where it is to be.
        ties: of the whole model.
        scaling: how the scale of the loss changes; None to scale no loss.
        normed: the module whose batch-norm statistics are kept with it; None: its own.
        check: called with what each parameter is, for people, and its type.

    Raises:
        ConfigError: a parameter's type is not supported, or it cannot be taken back in this way.
    """
    module.to(device)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    for name in names:
        check(f"{name} of layer {layer}", module.get_parameter(name).dtype)
    uses = {dict(tie.places)[layer]: tie for tie in ties if layer in tie.layers}
    later = [name for name, tie in uses.items() if tie.layers[0] != layer]
    committed = commit(layer, module, optimizer, tied=later, scaling=scaling)
    stats = RunningStats(layer, module if normed is None else normed)
    places: dict[ReducedLayers, list[int]] = {(layer,): [i for i, name in enumerate(names) if name not in uses]}
    for name, tie in uses.items():  # in the order of the ties, as on every other owner
        places.setdefault(tie.layers, []).extend([names.index(name)] if name in names else [])
    return Owned(
        committed=committed,
        stats=stats,
        parameters=[module.get_parameter(name) for name in names],
        places=places,
    )


def check_untied(layers: Sequence[nn.Module]) -> None:
    """Check that no two layers share a parameter.

    Raises:
        ConfigError: some do.
    """
    if ties := find_ties(layers):
        raise ConfigError(f"layers still share parameters (untie them first): {ties[0].places}")
