"""Layers that are updated in place; a step is taken back by inverting it, with what was kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.optim.committed import CommittedLayer, Fold, copied, copied_entry
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.loss_scale import LossScale, LossScaling
from holdfast.optim.undo import WEIGHT, Inverse, MadeStep, inverse_of

__all__ = ["UndoableLayer"]


@dataclass(slots=True, kw_only=True)
class _Update:
    """An update, ready to be made or made.

    Attributes:
        step: the step that it leads to.
        buffers: the next buffers; once the update is made, those before.
        loss_scale: the next scale of the loss; once the update is made, the one before.
        gradients: per trainable parameter; None for one that is left as it is.
        lr_scale: factor on the learning rates.
        kept: per trainable parameter, copies of what cannot be inverted.
        first: per trainable parameter, whether it had no optimizer state before.
    """

    step: int
    buffers: list[Tensor]
    loss_scale: LossScale | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    lr_scale: float = 1.0
    kept: list[dict[str, Any]] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)

    @property
    def skips(self) -> bool:
        """Whether there is no optimizer to run."""
        return not any(gradient is not None for gradient in self.gradients)


class UndoableLayer(CommittedLayer):
    """A layer whose parameters and optimizer state exist once.

    `update` keeps what the step will need: its gradients (until the next update), the learning rate and, rarely, a copy
    of an entry; `swap` runs the optimizer in place; `take_back` inverts it. Buffers and the loss scale are small, not
    inverted but kept twice. Weights and optimizer state come back within the bounds of `holdfast.optim.undo`, buffers,
    loss scale and skipped steps bitwise.

    `swap` and `take_back` change several tensors in place: a process that goes on after an exception inside them has
    lost the layer. Death inside them is like death anywhere.

    Raises:
        NotUndoable: the optimizer's steps have no inverse.
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
        super().__init__(layer, module, factory, tied=tied, step=step, scaling=scaling)
        self._inverse: Inverse | None = inverse_of(self._optimizer) if self._optimizer is not None else None
        self._groups = self._places_of_groups()
        self._update: _Update | None = None
        self._exact = True
        self._whole = True

    @property
    def whole(self) -> bool:
        """False after an exception in the middle of a step, or of its inverse."""
        return self._whole

    @property
    def exact(self) -> bool:
        """False once a step was inverted or a state came from elsewhere, which may have been inverted there."""
        return self._exact

    @property
    def updated(self) -> bool:
        """Whether the next state is ready to be swapped in."""
        return self._update is not None and self._update.step == self.step + 1

    def update(self, gradients: Mapping[str, Tensor | None], lr_scale: float, fold: Fold | None = None) -> None:
        """Keep what the step and its inverse need, and make the next buffers; see `CommittedLayer.update`."""
        old = self._update.buffers if self._update is not None else []
        self._update = None
        buffers = copied(self._live.buffers, old)
        self._fold(fold, buffers)
        self._update = _Update(
            step=self.step + 1,
            buffers=buffers,
            loss_scale=self._next_scale(counted=True),
            gradients=self._in_order(gradients),
            lr_scale=lr_scale,
            kept=self._copies(lr_scale),
            first=[not entries for entries in self._live.optimizer],
        )

    def skip(self) -> None:
        """Prepare to count a step; see `CommittedLayer.skip`."""
        self._update = _Update(
            step=self.step + 1,
            buffers=copied(self._live.buffers, []),
            loss_scale=self._next_scale(counted=False),
        )

    def swap(self) -> None:
        """Run the optimizer in place and exchange the buffers; see `CommittedLayer.swap`.

        Raises:
            ConfigError: the optimizer keeps state in its parameter groups, or changes the gradients.
        """
        self._require_update()
        update = self._update
        assert update is not None
        if not update.skips:
            versions = [gradient._version for gradient in update.gradients if gradient is not None]
            self._whole = False
            self._run_optimizer(self._live, update.gradients, update.lr_scale)
            self._whole = True
            if versions != [gradient._version for gradient in update.gradients if gradient is not None]:
                raise ConfigError(
                    f"{type(self._optimizer).__name__} changes its gradients, which its inverse needs as they were;"
                    " use resilience.commit: shadow"
                )
        self._exchange_small(update)
        self._live.step = update.step

    def take_back(self, to_step: int) -> None:
        """Invert the last step; see `CommittedLayer.take_back`. Drops what was kept of it."""
        update = self._update
        if update is not None and self.step == to_step + 1 == update.step:
            self._whole = False
            self._undo(update)
            self._whole = True
            self._exchange_small(update)
            self._live.step = to_step
        self._require_step(to_step)
        if update is not None and update.step > to_step:
            self._update = None

    def _forget(self) -> None:
        self._update = None
        self._exact = False
        self._whole = True

    def _copies(self, lr_scale: float) -> list[dict[str, Any]]:
        """Copies, from before the step, of what its inverse could not compute."""
        if self._inverse is None:
            return []
        names = [self._inverse.keep(group) for group in self._used(lr_scale)]
        places = zip(self._groups, self._live.weights, self._live.optimizer, strict=True)
        return [_copies_of(names[group], {**entries, WEIGHT: weight}) for group, weight, entries in places]

    def _undo(self, update: _Update) -> None:
        settings = self._used(update.lr_scale)
        for place, gradient in enumerate(update.gradients):
            if gradient is None:
                continue
            made = MadeStep(
                weight=self._live.weights[place],
                gradient=gradient,
                state=self._live.optimizer[place],
                group=settings[self._groups[place]],
                kept=update.kept[place],
            )
            self._exact = False
            self._undo_one(place, made, first=update.first[place])
            update.gradients[place] = None

    def _undo_one(self, place: int, made: MadeStep, *, first: bool) -> None:
        assert self._inverse is not None
        undone = self._inverse.undo(made)
        made.weight.copy_(undone.weight)
        entries = {} if first else undone.state
        self._live.optimizer[place] = {key: _rounded(value, made.state.get(key)) for key, value in entries.items()}

    def _exchange_small(self, update: _Update) -> None:
        """Exchange what is not inverted, but kept twice."""
        self._live.buffers, update.buffers = update.buffers, self._live.buffers
        self._live.loss_scale, update.loss_scale = update.loss_scale, self._live.loss_scale
        self._bind_buffers()

    def _places_of_groups(self) -> list[int]:
        """Per trainable parameter, which of the optimizer's groups it is in."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        found = {id(parameter): place for place, group in enumerate(groups) for parameter in group["params"]}
        missing = [name for name, p in zip(self._trainable, self._stand_ins, strict=True) if id(p) not in found]
        if missing:
            raise ConfigError(f"layer {self.layer}: the optimizer was not given parameter {missing[0]!r} of the layer")
        return [found[id(parameter)] for parameter in self._stand_ins]


def _copies_of(names: frozenset[str], entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copied_entry(entries[name]) for name in names if entries.get(name) is not None}


def _rounded(value: Any, into: Any) -> Any:
    """An entry in the type and place that it had after the step."""
    return copied_entry(value, into) if not isinstance(into, Tensor) else into.copy_(torch.as_tensor(value))
