"""Double-buffered layers: an update is made on a copy, goes live by swapping pointers, can be taken back bitwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import ConfigError, InternalError
from holdfast.optim.digest import LayerState, Number
from holdfast.optim.factory import OptimizerFactory

__all__ = ["ShadowedLayer"]


@dataclass(slots=True)
class _Version:
    """One of a layer's two states.

    Attributes:
        step: updates made so far; None while its content means nothing.
        weights: the trainable parameters.
        buffers: the persistent buffers.
        optimizer: per trainable parameter, the optimizer's entries.
    """

    step: int | None
    weights: list[Tensor]
    buffers: list[Tensor]
    optimizer: list[dict[str, Any]] = field(default_factory=list)


class ShadowedLayer:
    """A layer whose parameters, buffers and optimizer state exist twice.

    `update` writes the next state into the spare copy, `swap` exchanges the two, `take_back` exchanges them again. The
    parameters' and buffers' objects stay the same; only what they point to changes. The spare copy is made at the first
    update.

    Between any two calls the layer is whole: either at the old step or at the new one. An interrupted update may be
    repeated, and `take_back` is safe at any point.

    Args:
        layer: index of the layer.
        module: the layer; its tensors are made contiguous copies of their own. Frozen parameters exist once.
        factory: makes the optimizer over the trainable parameters.
        tied: names of parameters whose first use is in an earlier layer.
        step: updates made so far.

    Raises:
        ConfigError: the optimizer's parameter groups are not what this class can keep twice.
    """

    def __init__(
        self, layer: int, module: nn.Module, factory: OptimizerFactory, *, tied: Sequence[str] = (), step: int = 0
    ) -> None:
        self.layer = layer
        self.module = module
        self._tied = tuple(tied)
        self._parameters = dict(module.named_parameters())
        self._trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        kept = module.state_dict().keys()
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept}
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._live = _Version(
            step=step,
            weights=[p.data for p in self._trainable.values()],
            buffers=[b.data for b in self._buffers.values()],
            optimizer=[{} for _ in self._trainable],
        )
        self._spare = _Version(step=None, weights=[], buffers=[])
        self._shadow = [nn.Parameter(p.detach(), requires_grad=True) for p in self._trainable.values()]
        self._optimizer: Optimizer | None = factory(list(self._shadow)) if self._shadow else None
        self._settings = self._group_settings()

    @property
    def step(self) -> int:
        """Updates made so far to what is live."""
        if self._live.step is None:
            raise InternalError(f"layer {self.layer}: the live state has no step")
        return self._live.step

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that are trained, in registration order."""
        return tuple(self._trainable)

    @property
    def updated(self) -> bool:
        """Whether the next state is ready to be swapped in."""
        return self._spare.step == self.step + 1

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        lr_scale: float,
        fold: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        """Make the next state on the spare copy by one optimizer step.

        Args:
            gradients: per trainable parameter; None (or absent) leaves the parameter and its state untouched.
            lr_scale: factor on every learning rate of the optimizer.
            fold: changes the next state's buffers in place, given by name.

        Raises:
            ConfigError: the optimizer keeps state in its parameter groups, which would not be taken back.

        After failure: what is live is untouched; safe to repeat. The state before the live one is lost.
        """
        self._copy_live()
        if fold is not None:
            fold(dict(zip(self._buffers, self._spare.buffers, strict=True)))
        if self._optimizer is not None:
            self._run_optimizer(self._optimizer, gradients, lr_scale)
        self._spare.step = self.step + 1

    def skip(self) -> None:
        """Make the next state an unchanged copy: the step counts, nothing else changes.

        After failure: as `update`.
        """
        self._copy_live()
        self._spare.step = self.step + 1

    def swap(self) -> None:
        """Make the next state live and keep the one before.

        Raises:
            InternalError: no next state is ready.
        """
        if not self.updated:
            raise InternalError(f"layer {self.layer} at step {self.step}: swap without an update")
        self._exchange()

    def take_back(self, to_step: int) -> None:
        """Return to a step: bitwise, at most one step back. Does nothing but drop a prepared update if already there.

        Args:
            to_step: the step wanted, the live one or the one before.

        Raises:
            InternalError: that state is not kept.
        """
        if self.step == to_step + 1 and self._spare.step == to_step:
            self._exchange()
        if self.step != to_step:
            raise InternalError(f"layer {self.layer} is at step {self.step} and cannot be taken back to {to_step}")
        if self._spare.step is not None and self._spare.step > to_step:
            self._spare.step = None
        self._bind()

    def export(self) -> LayerState:
        """Return the live state. It shares memory with the layer: use it before the next update but one."""
        pairs = zip(self._trainable, self._live.optimizer, strict=True)
        entries = {name: {key: value for key, value in entry.items() if value is not None} for name, entry in pairs}
        return LayerState(
            layer=self.layer,
            step=self.step,
            parameters={name: p.detach() for name, p in self._parameters.items()},
            buffers={name: b.detach() for name, b in self._buffers.items()},
            optimizer={name: entry for name, entry in entries.items() if entry},
            tied=self._tied,
        )

    def install(self, state: LayerState) -> None:
        """Replace everything by a state from elsewhere. There is nothing to take back to afterwards.

        Args:
            state: of the same layer; its tensors are copied.

        Raises:
            InternalError: it belongs to another layer or has other names or shapes.
        """
        mine = self.export()
        if state.layer != self.layer or _shapes(state) != _shapes(mine):
            raise InternalError(f"the state of layer {state.layer} does not fit layer {self.layer}")
        self._spare.step = None
        for name, value in (*state.parameters.items(), *state.buffers.items()):
            target = self._parameters.get(name, self._buffers.get(name))
            if target is not None:
                target.data.copy_(value)
        weights = [p.data for p in self._trainable.values()]
        device = weights[0].device if weights else torch.device("cpu")
        self._live = _Version(
            step=state.step,
            weights=weights,
            buffers=[b.data for b in self._buffers.values()],
            optimizer=[_placed(state.optimizer.get(name, {}), device) for name in self._trainable],
        )

    def _exchange(self) -> None:
        self._live, self._spare = self._spare, self._live
        self._bind()

    def _bind(self) -> None:
        for parameter, weight in zip(self._trainable.values(), self._live.weights, strict=True):
            parameter.data = weight
        for buffer, value in zip(self._buffers.values(), self._live.buffers, strict=True):
            buffer.data = value

    def _copy_live(self) -> None:
        live, spare = self._live, self._spare
        spare.step = None
        spare.weights = _copied(live.weights, spare.weights)
        spare.buffers = _copied(live.buffers, spare.buffers)
        old = spare.optimizer or [{} for _ in live.optimizer]
        spare.optimizer = [_copied_entries(entry, into) for entry, into in zip(live.optimizer, old, strict=True)]

    def _run_optimizer(self, optimizer: Optimizer, gradients: Mapping[str, Tensor | None], lr_scale: float) -> None:
        shadows = zip(self._trainable, self._shadow, self._spare.weights, self._spare.optimizer, strict=True)
        for name, shadow, weight, entries in shadows:
            gradient = gradients.get(name)
            shadow.data = weight
            shadow.grad = None if gradient is None else gradient.to(weight.dtype)
            optimizer.state.pop(shadow, None)
            if entries:
                optimizer.state[shadow] = entries
        for group, settings in zip(optimizer.param_groups, self._settings, strict=True):
            group["lr"] = settings["lr"] * lr_scale
        optimizer.step()
        self._spare.optimizer = [dict(optimizer.state.pop(shadow, {})) for shadow in self._shadow]
        for shadow in self._shadow:
            shadow.grad = None
        for group, settings in zip(optimizer.param_groups, self._settings, strict=True):
            group["lr"] = settings["lr"]
        if self._group_settings() != self._settings:
            raise ConfigError(f"{type(optimizer).__name__} keeps state in its parameter groups, which is not supported")

    def _group_settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _shapes(state: LayerState) -> list[tuple[str, torch.Size]]:
    return [(name, value.shape) for name, value in (*state.parameters.items(), *state.buffers.items())]


def _copied(values: Sequence[Tensor], into: Sequence[Tensor]) -> list[Tensor]:
    """Copy into tensors that exist already, or into new ones."""
    if len(into) != len(values):
        return [value.clone() for value in values]
    return [target.copy_(value) for value, target in zip(values, into, strict=True)]


def _copied_entries(values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied_entry(value, into.get(key)) for key, value in values.items()}


def _copied_entry(value: Any, into: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype and into is not value:
        return into.copy_(value)
    return value.clone()


def _placed(entries: Mapping[str, Tensor | Number], device: torch.device) -> dict[str, Any]:
    """Copy an optimizer's entries to the parameters' device; torch keeps scalars (step counts) on the CPU."""
    return {
        key: value.to(device if value.dim() else "cpu", copy=True) if isinstance(value, Tensor) else value
        for key, value in entries.items()
    }
