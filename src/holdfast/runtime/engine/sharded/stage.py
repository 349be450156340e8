"""The compute engine of a stage whose layers are sharded over several GPUs by FSDP2, each layer for itself.

Every rank runs all layers of the stage on its part of each micro-batch's samples. What comes from other workers is
scattered by the leader and what goes to them is gathered there, so for everybody else it is a stage like any other.
Gradients are summed in shards, by FSDP2 over the samples and here over micro-batches, and gathered once per step; the
sums over all owners are scattered again, and each rank updates its shards.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from holdfast.core.placement import LayerRange
from holdfast.core.progress import StepProgress
from holdfast.core.schedule import OpKind
from holdfast.core.summing import Contribution
from holdfast.core.tensorspec import TensorSpec
from holdfast.data.items import first_of
from holdfast.runtime.engine.sharded.checks import part_spec
from holdfast.runtime.engine.sharded.commands import (
    Adopt,
    Backward,
    Command,
    Discard,
    Export,
    Forward,
    GatherSums,
    Install,
    MakeStage,
    Skip,
    Swap,
    TakeBack,
    Update,
)
from holdfast.runtime.engine.sharded.layer import ShardedLayer
from holdfast.runtime.engine.sharded.ranks import Ranks
from holdfast.runtime.engine.sharded.shards import together, whole
from holdfast.runtime.engine.split_backward import PendingWeights
from holdfast.runtime.engine.stage import Stage, _Cell, _Context
from holdfast.runtime.engine.stepped import ReducedLayers
from holdfast.runtime.engine.summed import Owned

__all__ = ["Companion", "ShardedStage"]


class ShardedStage(Stage):
    """One rank of a stage. The leader's is the worker's engine; those of companions do what the leader's tell them.

    I runs the whole backward pass of its layers, and W counts it: FSDP2 knows no halves.

    Args:
        ranks: the processes of the stage.
        number: of this stage among all that these processes have: the same on each.
        outputs: what every layer returns for a whole micro-batch, whose samples are the first dimension.
        samples: of a whole micro-batch.
        options: as for :class:`Stage`; ``numerics`` must be ``fast``, and steps are taken back from copies, whatever
            ``commit`` says.

    Raises:
        ConfigError: a layer cannot be sharded, or the samples of a micro-batch cannot be shared evenly.
    """

    def __init__(
        self, *, ranks: Ranks, number: int, outputs: Sequence[TensorSpec], samples: int, **options: Any
    ) -> None:
        self.ranks, self.number = ranks, number
        self._whole_outputs = tuple(outputs)
        if ranks.leads:
            ranks.tell(MakeStage(stage=number, owned=tuple(options["owned"])))
        parts = [part_spec(index, spec, ranks.size, samples) for index, spec in enumerate(outputs)]
        shards = partial(ShardedLayer, ranks=ranks, stage=number)
        super().__init__(**options | {"outputs": parts, "commit": shards})
        self._gradients_here: dict[int, list[Tensor | None]] = {}
        """Of each own layer, this rank's shards of what its gradients have come to and the leader has not got yet."""

    # --- what the leader is asked -------------------------------------------------------------------------------------

    def forward(
        self,
        step: int,
        microbatch: int,
        activation: Tensor | None,
        layers: LayerRange | None = None,
        *,
        adds: bool = True,
    ) -> Tensor | None:
        """See `Stage.forward`; the activation is that of all samples. There is no forward pass that is not kept."""
        if step != self._step:
            self.begin(step)
        layers = layers or self._all()
        command = Forward(stage=self.number, step=step, microbatch=microbatch, start=layers.start, stop=layers.stop)
        self.ranks.tell(command)
        return self.run_forward(command, activation)

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
        """See `Stage.backward`; the gradients are those of all samples. There is no backward pass that does not add."""
        part = None if layers is None else (layers.start, layers.stop)
        command = Backward(stage=self.number, kind=kind.value, step=step, microbatch=microbatch, layers=part)
        self.ranks.tell(command)
        return self.run_backward(command, gradient)

    def message(self, reduction: ReducedLayers, dissent: int = 0) -> Contribution:
        """See `SummedStage.message`."""
        self.ranks.tell(GatherSums(stage=self.number, reduction=reduction))
        self.gather_sums(reduction)
        return super().message(reduction, dissent)

    def discard(self) -> None:
        """See `SteppedStage.discard`."""
        if self.ranks.leads and not self.ranks.broken:
            self.ranks.tell(Discard(stage=self.number))
        super().discard()

    def progress(self) -> tuple[StepProgress, ...]:
        """See `SteppedStage.progress`: companions would have to know, so a step that is interrupted is run again."""
        return ()

    # --- what every rank does -----------------------------------------------------------------------------------------

    def run_forward(self, command: Forward, activation: Tensor | None = None) -> Tensor | None:
        """Run F on this rank's samples; returns on the leader what goes to the next worker."""
        layers = LayerRange(command.start, command.stop)
        with self.ranks.in_step():
            if command.step != self._step:  # of a companion, who need not ask at which step its layers are
                self.discard()
                self._step = command.step
            if layers.start:
                activation = self._take(activation, self._whole_outputs[layers.start - 1])
            output = super().forward(command.step, command.microbatch, activation, layers)
            return None if output is None else self._give(output)

    def run_backward(self, command: Backward, gradient: Tensor | None = None) -> Tensor | None:
        """Run the backward pass of this rank's samples; returns on the leader the gradient for the worker before."""
        kind, layers = OpKind(command.kind), None if command.layers is None else LayerRange(*command.layers)
        with self.ranks.in_step():
            if kind is not OpKind.W:
                context, part = self._context(kind, command.microbatch, layers)
                if context.loss is None or part.stop < context.layers.stop:
                    gradient = self._take(gradient, self._whole_outputs[part.stop - 1])
            found = super().backward(kind, command.step, command.microbatch, gradient, layers)
            return None if found is None else self._give(found)

    def _take(self, batch: Tensor | None, spec: TensorSpec) -> Tensor:
        """Returns this rank's samples of what the leader has got."""
        return self.ranks.scatter_batch(batch, spec)

    def _give(self, mine: Tensor) -> Tensor | None:
        """Returns on the leader what goes to another worker."""
        return _joined(self.ranks.gather(mine))

    def gather_sums(self, reduction: ReducedLayers) -> None:
        """Give the leader what the gradients of a reduction have come to since it was last asked for."""
        sums = self._sums[reduction]
        for layer in (layer for layer in reduction if layer in self._owned):
            owned, here = self._owned[layer], self._gradients_here.get(layer)
            if here is None:
                continue
            places = [place for place in owned.places[reduction] if here[place] is not None]
            shapes = [owned.parameters[place].shape for place in places]
            parts = [shard for place in places if (shard := here[place]) is not None]
            with self.ranks.in_step():
                messages = self.ranks.gather(together(parts, shapes, self.ranks.size)) if places else None
            for place in places:
                here[place] = None
            if messages is not None:
                found = dict(zip(places, whole(messages, shapes), strict=True))
                sums.add_sums([found.get(place) for place in owned.places[reduction]])

    def sharded(self, layer: int) -> ShardedLayer:
        """Return a layer of this rank."""
        committed = self._owned[layer].committed
        assert isinstance(committed, ShardedLayer), "all layers of a sharded stage are"
        return committed

    # --- how it differs from a stage of one process -------------------------------------------------------------------

    def _seed_of(self, step: int, microbatch: int, layer: int) -> int:
        """Every rank draws other random numbers."""
        seed = super()._seed_of(step, microbatch, layer)
        return int.from_bytes(blake2b(struct.pack("<Qq", seed, self.ranks.rank), digest_size=8).digest(), "little")

    def _samples(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """This rank's."""
        inputs, targets = super()._samples(step, microbatch)
        rank, size = self.ranks.rank, self.ranks.size
        return first_of(inputs).chunk(size)[rank], targets.chunk(size)[rank]

    def _loss_gradient(self, context: _Context, microbatch: int) -> Tensor:
        """Of a part of the mean over all samples."""
        return super()._loss_gradient(context, microbatch) / self.ranks.size

    def _first_half(
        self, index: int, owned: Owned, cell: _Cell, gradient: Tensor
    ) -> tuple[Tensor | None, PendingWeights | list[Tensor | None]]:
        return self._fused(owned, cell, gradient)

    def _fused(self, owned: Owned, cell: _Cell, gradient: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        committed = owned.committed
        assert isinstance(committed, ShardedLayer), "all layers of a sharded stage are"
        if not cell.output.requires_grad:
            return None, [None] * len(committed.trainable)
        torch.autograd.backward([cell.output], [gradient])
        found, cell.input.grad = cell.input.grad, None
        return found, committed.gradient_shards()

    def _add(self, layer: int, microbatch: int, gradients: Sequence[Tensor | None], record: Tensor | None) -> None:
        here = self._gradients_here.setdefault(layer, [None] * len(gradients))
        scale = self._owned[layer].committed.loss_scale
        for place, gradient in enumerate(gradients):
            before = here[place]
            if gradient is not None:
                unscaled = gradient if scale is None else gradient / scale.value
                here[place] = unscaled if before is None else before.add_(unscaled)
        if record is not None:
            record = self.ranks.mean(record)
        if self.ranks.leads:
            super()._add(layer, microbatch, [None] * len(gradients), record)

    def _adopt(self, layer: int, other: Stage) -> None:
        assert isinstance(other, ShardedStage), "a worker has as many ranks for life"
        if self.ranks.leads:
            self.ranks.tell(Adopt(stage=self.number, layer=layer, other=other.number))
        super()._adopt(layer, other)
        self.sharded(layer).stage = self.number

    def _forget(self) -> None:
        super()._forget()
        self._gradients_here = {}


class Companion:
    """A rank that does what the leader of its stage tells it.

    Args:
        ranks: the processes of the stage.
        make: makes this rank's stage, of a number and the layers that it is to have.
        kept: how many stages there are at once: that which computes, and before it those whose layers it may adopt.
    """

    def __init__(self, ranks: Ranks, make: Callable[[int, tuple[int, ...]], ShardedStage], kept: int = 2) -> None:
        self._ranks, self._make, self._kept = ranks, make, kept
        self._stages: dict[int, ShardedStage] = {}

    def follow(self) -> None:
        """Does one thing after another; ends with the process, or with an exception."""
        while True:
            self._do(self._ranks.told())

    def _do(self, command: Command) -> None:
        if isinstance(command, MakeStage):
            self._stages = {
                number: each for number, each in self._stages.items() if number + self._kept > command.stage
            }
            self._stages[command.stage] = self._make(command.stage, command.owned)
            return
        stage = self._stages[command.stage]
        match command:
            case Forward():
                stage.run_forward(command)
            case Backward():
                stage.run_backward(command)
            case GatherSums(reduction=reduction):
                stage.gather_sums(reduction)
            case Discard():
                stage.discard()
            case Adopt(layer=layer, other=other):
                stage._adopt(layer, self._stages[other])
            case Update(layer=layer):
                stage.sharded(layer).update_shard(command, None)
            case Skip(layer=layer):
                stage.sharded(layer).skip_shard()
            case Swap(layer=layer):
                stage.sharded(layer).swap_shard()
            case TakeBack(layer=layer, to_step=to_step):
                stage.sharded(layer).take_shard_back(to_step)
            case Export(layer=layer):
                stage.sharded(layer).gather_state()
            case Install(layer=layer):
                stage.sharded(layer).install_shard()


def _joined(parts: list[Tensor] | None) -> Tensor | None:
    return None if parts is None else torch.cat(parts)
