"""What the two ways to commit a layer share: its live state, the optimizer over it, export and install."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import ConfigError, InternalError
from holdfast.optim.digest import LayerState, Number, cloned_entries
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.loss_scale import LossScale, LossScaling

__all__ = ["Committed", "CommittedLayer", "Fold", "Version", "copied", "copied_entry"]

Fold = Callable[[Mapping[str, Tensor]], None]
"""Changes the next state's buffers in place, given by name."""


@dataclass(slots=True)
class Version:
    """One state of a layer.

    Attributes:
        step: updates made so far; None while its content means nothing.
        weights: the trainable parameters.
        buffers: the persistent buffers.
        optimizer: per trainable parameter, the optimizer's entries.
        loss_scale: None where losses are not scaled.
    """

    step: int | None
    weights: list[Tensor]
    buffers: list[Tensor]
    optimizer: list[dict[str, Any]] = field(default_factory=list)
    loss_scale: LossScale | None = None


class Committed(Protocol):
    """What a worker's stage needs of a layer; :class:`CommittedLayer` says what each does."""

    module: nn.Module

    @property
    def step(self) -> int: ...  # noqa: D102

    @property
    def loss_scale(self) -> LossScale | None: ...  # noqa: D102

    @property
    def trainable(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def exact(self) -> bool: ...  # noqa: D102

    @property
    def whole(self) -> bool: ...  # noqa: D102

    def rate(self, lr_scale: float) -> float | None: ...  # noqa: D102

    def update(  # noqa: D102
        self, gradients: Mapping[str, Tensor | None], lr_scale: float, fold: Fold | None = None
    ) -> None: ...

    def skip(self) -> None: ...  # noqa: D102

    def swap(self) -> None: ...  # noqa: D102

    def take_back(self, to_step: int) -> None: ...  # noqa: D102

    def export(self) -> LayerState: ...  # noqa: D102

    def install(self, state: LayerState) -> None: ...  # noqa: D102


class CommittedLayer(ABC):
    """A layer whose step number changes together with its weights, buffers and optimizer state, and can be taken back.

    `update` prepares the next state, `swap` makes it live, `take_back` returns to the one before. The parameters' and
    buffers' objects stay the same. Between any two calls the layer is whole: either at the old step or at the new one.
    An interrupted update may be repeated, and `take_back` is safe between any two calls.

    Args:
        layer: index of the layer.
        module: the layer; its tensors are made contiguous copies of their own. Frozen parameters exist once.
        factory: makes the optimizer over the trainable parameters.
        tied: names of parameters whose first use is in an earlier layer.
        step: updates made so far.
        scaling: how the scale of the loss changes; None to scale no loss.

    Raises:
        ConfigError: the optimizer's parameter groups are not what this class can keep.
    """

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        factory: OptimizerFactory,
        *,
        tied: Sequence[str] = (),
        step: int = 0,
        scaling: LossScaling | None = None,
    ) -> None:
        self.layer = layer
        self.module = module
        self._tied = tuple(tied)
        self._scaling = scaling
        self._parameters = dict(module.named_parameters())
        self._trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        kept = module.state_dict().keys()
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept}
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._live = Version(
            step=step,
            weights=[p.data for p in self._trainable.values()],
            buffers=[b.data for b in self._buffers.values()],
            optimizer=[{} for _ in self._trainable],
            loss_scale=scaling.first if scaling is not None else None,
        )
        self._stand_ins = [nn.Parameter(p.detach(), requires_grad=True) for p in self._trainable.values()]
        self._optimizer: Optimizer | None = factory(list(self._stand_ins)) if self._stand_ins else None
        self._first = self._entries_at_first()
        self._settings = self._group_settings()

    @property
    def step(self) -> int:
        """Updates made so far to what is live."""
        if self._live.step is None:
            raise InternalError(f"layer {self.layer}: the live state has no step")
        return self._live.step

    @property
    def loss_scale(self) -> LossScale | None:
        """What losses are scaled by in the step that begins with what is live; None where they are not."""
        return self._live.loss_scale

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that are trained, in registration order."""
        return tuple(self._trainable)

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the live state is bitwise what updates alone make of the first one."""

    @property
    def whole(self) -> bool:
        """Whether what is live is the state at its step, and not one that an exception left half-changed."""
        return True

    @property
    @abstractmethod
    def updated(self) -> bool:
        """Whether the next state is ready to be swapped in."""

    @abstractmethod
    def update(self, gradients: Mapping[str, Tensor | None], lr_scale: float, fold: Fold | None = None) -> None:
        """Prepare the next state: one optimizer step.

        Args:
            gradients: per trainable parameter; None (or absent) leaves the parameter and its state untouched. They must
                not be changed until the next update.
            lr_scale: factor on every learning rate of the optimizer.
            fold: changes the next state's buffers.

        After failure: what is live is untouched; safe to repeat. The state before the live one is lost.
        """

    @abstractmethod
    def skip(self) -> None:
        """Prepare a next state that is an unchanged copy but for the step's number and the scale of the loss.

        After failure: as `update`.
        """

    @abstractmethod
    def swap(self) -> None:
        """Make the next state live.

        Raises:
            InternalError: no next state is ready.
        """

    @abstractmethod
    def take_back(self, to_step: int) -> None:
        """Return to a step, at most one back. Does nothing but drop a prepared update if already there.

        Args:
            to_step: the step wanted, the live one or the one before.

        Raises:
            InternalError: that state cannot be reached.
        """

    def export(self) -> LayerState:
        """Return the live state. It shares memory with the layer: use it before the next swap."""
        pairs = zip(self._trainable, self._live.optimizer, strict=True)
        entries = {name: {key: value for key, value in entry.items() if value is not None} for name, entry in pairs}
        return LayerState(
            layer=self.layer,
            step=self.step,
            parameters={name: p.detach() for name, p in self._parameters.items()},
            buffers={name: b.detach() for name, b in self._buffers.items()},
            optimizer={name: entry for name, entry in entries.items() if entry},
            tied=self._tied,
            loss_scale=self._live.loss_scale,
        )

    def install(self, state: LayerState) -> None:
        """Replace everything by a state from elsewhere. There is nothing to take back to afterwards.

        The state of a run with another setting comes without a scale of the loss, or with one that is of no use here:
        then the scale is the first one, or none.

        Args:
            state: of the same layer; its tensors are copied.

        Raises:
            InternalError: it belongs to another layer or has other names or shapes.
        """
        mine = self.export()
        if state.layer != self.layer or _shapes(state) != _shapes(mine):
            raise InternalError(f"the state of layer {state.layer} does not fit layer {self.layer}")
        self._forget()
        for name, value in (*state.parameters.items(), *state.buffers.items()):
            target = self._parameters.get(name, self._buffers.get(name))
            if target is not None:
                target.data.copy_(value)
        weights = [p.data for p in self._trainable.values()]
        device = weights[0].device if weights else torch.device("cpu")
        self._live = Version(
            step=state.step,
            weights=weights,
            buffers=[b.data for b in self._buffers.values()],
            optimizer=[_placed(state.optimizer.get(name, {}), device) for name in self._trainable],
            loss_scale=None if self._scaling is None else state.loss_scale or self._scaling.first,
        )

    @abstractmethod
    def _forget(self) -> None:
        """Drop what was prepared and what could be taken back."""

    def _next_scale(self, *, counted: bool) -> LossScale | None:
        scale = self._live.loss_scale
        return None if self._scaling is None or scale is None else self._scaling.after(scale, counted=counted)

    def _require_update(self) -> None:
        if not self.updated:
            raise InternalError(f"layer {self.layer} at step {self.step}: swap without an update")

    def _require_step(self, to_step: int) -> None:
        if self.step != to_step:
            raise InternalError(f"layer {self.layer} is at step {self.step} and cannot be taken back to {to_step}")

    def _bind(self) -> None:
        for parameter, weight in zip(self._trainable.values(), self._live.weights, strict=True):
            parameter.data = weight
        self._bind_buffers()

    def _bind_buffers(self) -> None:
        for buffer, value in zip(self._buffers.values(), self._live.buffers, strict=True):
            buffer.data = value

    def _fold(self, fold: Fold | None, buffers: Sequence[Tensor]) -> None:
        if fold is not None:
            fold(dict(zip(self._buffers, buffers, strict=True)))

    def _run_optimizer(self, version: Version, gradients: Sequence[Tensor | None], lr_scale: float) -> None:
        """Make one optimizer step on a version, in place.

        Raises:
            ConfigError: the optimizer keeps state in its parameter groups, which would not be taken back.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return
        places = zip(self._stand_ins, version.weights, version.optimizer, gradients, strict=True)
        for stand_in, weight, entries, gradient in places:
            stand_in.data = weight
            stand_in.grad = gradient
            optimizer.state.pop(stand_in, None)
            if found := entries or cloned_entries(self._first.get(stand_in, {})):
                optimizer.state[stand_in] = found
        for group, used in zip(optimizer.param_groups, self._used(lr_scale), strict=True):
            group["lr"] = used["lr"]
        optimizer.step()
        for stand_in, weight in zip(self._stand_ins, version.weights, strict=True):
            if stand_in.data_ptr() != weight.data_ptr():  # the optimizer has put another tensor in its place
                weight.copy_(stand_in.data)
        version.optimizer = [dict(optimizer.state.pop(stand_in, {})) for stand_in in self._stand_ins]
        for stand_in in self._stand_ins:
            stand_in.grad = None
        for group, settings in zip(optimizer.param_groups, self._settings, strict=True):
            group["lr"] = settings["lr"]
        if self._group_settings() != self._settings:
            raise ConfigError(f"{type(optimizer).__name__} keeps state in its parameter groups, which is not supported")

    def _entries_at_first(self) -> dict[nn.Parameter, dict[str, Any]]:
        """What the optimizer's constructor made, as that of Adagrad did up to torch 2.6; most begin with nothing."""
        made = self._optimizer.state if self._optimizer is not None else {}
        return {stand_in: cloned_entries(made[stand_in]) for stand_in in self._stand_ins if stand_in in made}

    def _in_order(self, gradients: Mapping[str, Tensor | None]) -> list[Tensor | None]:
        """The gradients of the trainable parameters, each of its parameter's type."""
        found = [(gradients.get(name), p.dtype) for name, p in self._trainable.items()]
        return [None if gradient is None else gradient.to(dtype) for gradient, dtype in found]

    def rate(self, lr_scale: float) -> float | None:
        """Return the learning rate of the first group of parameters; None where nothing is trained."""
        return next((float(group["lr"]) for group in self._used(lr_scale)), None)

    def _used(self, lr_scale: float) -> list[dict[str, Any]]:
        """The settings of the optimizer's groups at a step."""
        return [{**settings, "lr": settings["lr"] * lr_scale} for settings in self._settings]

    def _group_settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _shapes(state: LayerState) -> list[tuple[str, torch.Size]]:
    return [(name, value.shape) for name, value in (*state.parameters.items(), *state.buffers.items())]


def copied(values: Sequence[Tensor], into: Sequence[Tensor]) -> list[Tensor]:
    """Copy into tensors that exist already, or into new ones."""
    if len(into) != len(values):
        return [value.clone() for value in values]
    return [target.copy_(value) for value, target in zip(values, into, strict=True)]


def copied_entry(value: Any, into: Any = None) -> Any:
    """Copy one entry of an optimizer, into a tensor that exists already if that fits."""
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
