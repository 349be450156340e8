"""One layer whose parameters, and what its optimizer keeps, are sharded over the ranks of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from holdfast.errors import InternalError
from holdfast.optim.committed import Fold
from holdfast.optim.digest import LayerState, decode_layer, encode_layer
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.loss_scale import LossScale, LossScaling
from holdfast.optim.shadow import ShadowedLayer
from holdfast.runtime.engine.sharded.checks import check_layer
from holdfast.runtime.engine.sharded.commands import Export, Install, Skip, Swap, TakeBack, Update
from holdfast.runtime.engine.sharded.ranks import Ranks
from holdfast.runtime.engine.sharded.shards import message_length, part_of, scattered, taken_apart, together, whole

__all__ = ["ShardedLayer"]


class ShardedLayer:
    """A layer in shards, committed as a :class:`ShadowedLayer` is; its state goes in and out whole.

    Each rank has a shard of every parameter, and a shadowed layer over these. FSDP2 has the same shards in memory of
    its own, into which the live ones are copied when they change: so what is taken back is bitwise what it was.

    On the leader every method has the companions do the same first.

    Args:
        layer: index of the layer.
        module: the layer, which FSDP2 takes over.
        factory: makes the optimizer over one rank's shards; its update of an element must depend on that alone.
        tied: names of parameters whose first use is in an earlier layer.
        scaling: how the scale of the loss changes; None to scale no loss.
        ranks: of the stage.
        stage: the number of the stage that has it.

    Raises:
        ConfigError: the layer cannot be sharded.
    """

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        factory: OptimizerFactory,
        *,
        tied: Sequence[str] = (),
        scaling: LossScaling | None = None,
        ranks: Ranks,
        stage: int,
    ) -> None:
        check_layer(layer, module)
        self.layer, self.module, self.stage = layer, module, stage
        self._ranks, self._tied = ranks, tuple(tied)
        kept = module.state_dict().keys()
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept}
        rounded = any(parameter.dtype != torch.float32 for parameter in module.parameters())
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if rounded else None)
        fully_shard(module, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
        fsdp = cast(FSDPModule, module)
        fsdp.set_force_sum_reduction_for_comms(True)  # Gloo has no other
        fsdp.set_gradient_divide_factor(1.0)  # what is summed is parts of one mean already
        self._sharded = {name: cast(DTensor, parameter) for name, parameter in module.named_parameters()}
        self._shard = ShadowedLayer(layer, _Shards(self._sharded), factory, tied=tied, scaling=scaling)

    def rate(self, lr_scale: float) -> float | None:
        """See `CommittedLayer.rate`."""
        return self._shard.rate(lr_scale)

    # --- what a committed layer is asked ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """See `CommittedLayer.step`."""
        return self._shard.step

    @property
    def loss_scale(self) -> LossScale | None:
        """See `CommittedLayer.loss_scale`; all ranks have the same."""
        return self._shard.loss_scale

    @property
    def trainable(self) -> tuple[str, ...]:
        """See `CommittedLayer.trainable`."""
        return self._shard.trainable

    @property
    def exact(self) -> bool:
        """See `CommittedLayer.exact`."""
        return self._shard.exact

    @property
    def whole(self) -> bool:
        """Whether its state can be gathered: not once an exception has ended what all ranks did together."""
        return self._shard.whole and not self._ranks.broken

    def update(self, gradients: Mapping[str, Tensor | None], lr_scale: float, fold: Fold | None = None) -> None:
        """See `CommittedLayer.update`; the gradients are whole, and ``fold`` has no buffers to change."""
        given = [gradients.get(name) for name in self.trainable]
        command = Update(
            stage=self.stage,
            layer=self.layer,
            lr_scale=lr_scale,
            present=tuple(each is not None for each in given),
        )
        self._ranks.tell(command)
        self.update_shard(command, [each for each in given if each is not None])

    def skip(self) -> None:
        """See `CommittedLayer.skip`."""
        self._ranks.tell(Skip(stage=self.stage, layer=self.layer))
        self.skip_shard()

    def swap(self) -> None:
        """See `CommittedLayer.swap`."""
        self._ranks.tell(Swap(stage=self.stage, layer=self.layer))
        self.swap_shard()

    def take_back(self, to_step: int) -> None:
        """See `CommittedLayer.take_back`."""
        self._ranks.tell(TakeBack(stage=self.stage, layer=self.layer, to_step=to_step))
        self.take_shard_back(to_step)

    def export(self) -> LayerState:
        """Return the live state, whole, in memory of its own."""
        self._ranks.tell(Export(stage=self.stage, layer=self.layer))
        return self.gather_state()

    def install(self, state: LayerState) -> None:
        """See `CommittedLayer.install`."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._sharded.items()}
        if state.layer != self.layer or {name: tuple(v.shape) for name, v in state.parameters.items()} != shapes:
            raise InternalError(f"the state of layer {state.layer} does not fit layer {self.layer}")
        self._ranks.tell(Install(stage=self.stage, layer=self.layer))
        self._ranks.send_bytes(encode_layer(state))
        self.install_shard(state)

    # --- what every rank does -----------------------------------------------------------------------------------------

    def update_shard(self, command: Update, gradients: Sequence[Tensor] | None) -> None:
        """Make the next state of this rank's shards; the leader has the gradients, companions None."""
        names = [name for name, there in zip(self.trainable, command.present, strict=True) if there]
        shapes = [self._sharded[name].shape for name in names]
        with self._ranks.in_step():
            size, rank = self._ranks.size, self._ranks.rank
            messages = None if gradients is None else scattered(gradients, size)
            mine = self._ranks.scatter(messages, (message_length(shapes, size),), torch.float32)
            shards = dict(zip(names, taken_apart(mine, shapes, rank, size), strict=True))
            self._shard.update(shards, command.lr_scale)

    def skip_shard(self) -> None:
        """Prepare an unchanged next state of this rank's shards."""
        self._shard.skip()

    def swap_shard(self) -> None:
        """Make the next state of this rank's shards live."""
        self._shard.swap()
        self._show()

    def take_shard_back(self, to_step: int) -> None:
        """Return this rank's shards to a step."""
        self._shard.take_back(to_step)
        self._show()

    def gather_state(self) -> LayerState:
        """Return the live state: whole on the leader, of no meaning on companions."""
        mine = self._shard.export()
        pairs = [
            (name, key, value)
            for name, entries in mine.optimizer.items()
            for key, value in entries.items()
            if isinstance(value, Tensor) and value.dim()
        ]
        shapes = [self._sharded[name].shape for name in (*mine.parameters, *(name for name, _, _ in pairs))]
        parts = [*mine.parameters.values(), *(value for _, _, value in pairs)]
        with self._ranks.in_step():
            messages = self._ranks.gather(together(parts, shapes, self._ranks.size)) if parts else []
        if messages is None:
            return mine
        found = iter(each.to(part.dtype) for each, part in zip(whole(messages, shapes), parts, strict=True))
        parameters = {name: next(found) for name in mine.parameters}
        optimizer: dict[str, dict[str, Any]] = {name: dict(entries) for name, entries in mine.optimizer.items()}
        for name, key, _ in pairs:
            optimizer[name][key] = next(found)
        buffers = {name: buffer.detach() for name, buffer in self._buffers.items()}
        return replace(mine, parameters=parameters, optimizer=optimizer, buffers=buffers)

    def install_shard(self, state: LayerState | None = None) -> None:
        """Replace this rank's shards by those of a state, which companions are given as bytes."""
        with self._ranks.in_step():
            if state is None:
                state = decode_layer(self._ranks.receive_bytes(), name=f"state of layer {self.layer}")
            for name, buffer in self._buffers.items():
                buffer.data.copy_(state.buffers[name])
            self._shard.install(
                replace(
                    state,
                    parameters={name: self._part(value) for name, value in state.parameters.items()},
                    optimizer={
                        name: {key: self._part(value) for key, value in entries.items()}
                        for name, entries in state.optimizer.items()
                    },
                    buffers={},
                )
            )
            self._show()

    def gradient_shards(self) -> list[Tensor | None]:
        """Take this rank's shards of the gradients that the last backward pass left: float32, to be added up."""
        found: list[Tensor | None] = []
        for name in self.trainable:
            gradient = self._sharded[name].grad
            found.append(None if gradient is None else cast(DTensor, gradient).to_local().float())
            self._sharded[name].grad = None
        return found

    def _part(self, value: Any) -> Any:
        return (
            part_of(value, self._ranks.rank, self._ranks.size) if isinstance(value, Tensor) and value.dim() else value
        )

    def _show(self) -> None:
        """Lets FSDP2 run with what is live: it may not have what it gathered of something else."""
        cast(FSDPModule, self.module).reshard()
        live = self._shard.export().parameters
        with torch.no_grad():
            for name, parameter in self._sharded.items():
                sharded: Any = parameter  # torch says that detaching one gives a plain tensor
                sharded.to_local().copy_(live[name])


class _Shards(nn.Module):
    """One rank's shards of a layer's parameters (DTensors), under the names that these have there."""

    def __init__(self, sharded: Mapping[str, Any]) -> None:
        super().__init__()
        for name, parameter in sharded.items():  # a name with a dot is no attribute, but it may be a parameter's
            own = nn.Parameter(parameter.detach().to_local().clone(), requires_grad=parameter.requires_grad)
            self._parameters[name] = own
