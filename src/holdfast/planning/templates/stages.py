"""What a stage takes: contiguous layers on some GPUs of one node, in seconds and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from holdfast.core.placement import LayerRange
from holdfast.core.profile import Costs, GpuProfile, LayerProfile, Profile
from holdfast.core.schedule import OpKind

__all__ = ["StageTable", "stage_table", "table_of", "with_recomputation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """What layers take, of which stages are made.

    Attributes:
        layer_s: ``layer_s[d - 1][l]`` is how long F and B of layer l take on d GPUs, in seconds.
        state_bytes: what a layer takes all the time: parameters, gradients and optimizer state.
        held_bytes: what a micro-batch holds in a layer from its F to its B.
        recomputed_bytes: what B of a layer takes besides, while it runs.
        memory_bytes: memory of one GPU; None: no limit. The GPUs of a stage share all of this evenly.
    """

    layer_s: tuple[tuple[float, ...], ...]
    state_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    recomputed_bytes: tuple[int, ...]
    memory_bytes: int | None = None

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return len(self.state_bytes)

    @property
    def gpus_per_node(self) -> int:
        """The most GPUs that a stage can have."""
        return len(self.layer_s)

    def seconds(self, layers: LayerRange, gpus: int) -> float:
        """Returns how long F and B of one micro-batch take a stage."""
        return math.fsum(self.layer_s[gpus - 1][layers.start : layers.stop])

    def most_held(self, layers: LayerRange, gpus: int) -> float:
        """Returns how many micro-batches a stage can hold; 0 if not even its layers fit, infinite without limit."""
        if self.memory_bytes is None:
            return math.inf
        part = slice(layers.start, layers.stop)
        room = gpus * self.memory_bytes - sum(self.state_bytes[part]) - max(self.recomputed_bytes[part])
        held = sum(self.held_bytes[part])
        if room < 0:
            return 0
        return room // held if held else math.inf


def table_of(costs: Costs) -> StageTable:
    """Returns what stages of one GPU take by costs, in their units of time, and no memory."""
    layer_s = tuple(map(sum, zip(costs.forward, costs.input, costs.weight, strict=True)))
    nothing = (0,) * costs.num_layers
    return StageTable(layer_s=(layer_s,), state_bytes=nothing, held_bytes=nothing, recomputed_bytes=nothing)


def stage_table(
    profile: Profile, gpus_per_node: int, *, memory_bytes: float | None = None, copies: int = 1, sums: int = 1
) -> StageTable:
    """Returns what stages take by a profile.

    Args:
        profile: what was measured; its ``by_gpus`` must have the times on 2, 3, ... ``gpus_per_node`` GPUs.
        gpus_per_node: GPUs of a node, at least 1.
        memory_bytes: memory of one GPU; None: no limit.
        copies: how often parameters and optimizer state are held: twice where a job keeps a shadow.
        sums: memory for sums of gradients, in sizes of the parameters: see `holdfast.core.sum_order.most_held`.

    Raises:
        ConfigError: the profile lacks times on so many GPUs; names the first layer and number.
    """
    return StageTable(
        layer_s=tuple(
            tuple(_seconds(layer.on(gpus)) for layer in profile.layers) for gpus in range(1, gpus_per_node + 1)
        ),
        state_bytes=tuple(copies * layer.state_bytes + sums * layer.parameter_bytes for layer in profile.layers),
        held_bytes=tuple(layer.held_after_forward_bytes for layer in profile.layers),
        recomputed_bytes=tuple(
            max(0, layer.held_after_input_bytes - layer.held_after_forward_bytes) for layer in profile.layers
        ),
        memory_bytes=None if memory_bytes is None else math.floor(memory_bytes),
    )


def _seconds(layer: LayerProfile) -> float:
    return layer.seconds_of(OpKind.F) + layer.seconds_of(OpKind.B)


def with_recomputation(profile: Profile) -> Profile:
    """Returns the profile of the same model if every layer keeps its input only and its backward pass runs it again.

    That is activation checkpointing, layer by layer. A profile that was measured with it needs no such change.
    """
    inputs = (0, *(layer.boundary_bytes for layer in profile.layers[:-1]))
    return replace(
        profile, layers=tuple(_recomputed(layer, size) for layer, size in zip(profile.layers, inputs, strict=True))
    )


def _recomputed(layer: LayerProfile, input_bytes: int) -> LayerProfile:
    def longer(times: GpuProfile) -> GpuProfile:
        return replace(times, backward_input_s=times.backward_input_s + times.forward_s)

    return replace(
        layer,
        backward_input_s=layer.backward_input_s + layer.forward_s,
        backward_s=None if layer.backward_s is None else layer.backward_s + layer.forward_s,
        held_after_forward_bytes=min(input_bytes, layer.held_after_forward_bytes),
        held_after_input_bytes=max(layer.held_after_forward_bytes, layer.held_after_input_bytes),
        by_gpus={gpus: longer(times) for gpus, times in layer.by_gpus.items()},
    )
