"""Double-buffered layers: an update is made on a copy, goes live by swapping pointers, can be taken back bitwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from holdfast.optim.committed import CommittedLayer, Fold, Version, copied, copied_entry
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.loss_scale import LossScaling

__all__ = ["ShadowedLayer"]


class ShadowedLayer(CommittedLayer):
    """A layer whose parameters, buffers and optimizer state exist twice.

    `update` writes the next state into the shadow, `swap` exchanges the two, `take_back` exchanges them again,
    bitwise. Only what the parameters' and buffers' objects point to changes. The shadow is made at the first
    update.
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
        self._shadow = Version(step=None, weights=[], buffers=[])

    @property
    def exact(self) -> bool:
        """Always: a state taken back is the old copy."""
        return True

    @property
    def updated(self) -> bool:
        """Whether the next state is ready to be swapped in."""
        return self._shadow.step == self.step + 1

    def update(self, gradients: Mapping[str, Tensor | None], lr_scale: float, fold: Fold | None = None) -> None:
        """Make the next state on the shadow; see `CommittedLayer.update`.

        Raises:
            ConfigError: the optimizer keeps state in its parameter groups, which would not be taken back.
        """
        self._copy_live()
        self._fold(fold, self._shadow.buffers)
        self._run_optimizer(self._shadow, self._in_order(gradients), lr_scale)
        self._shadow.loss_scale = self._next_scale(counted=True)
        self._shadow.step = self.step + 1

    def skip(self) -> None:
        """Make the next state an unchanged copy; see `CommittedLayer.skip`."""
        self._copy_live()
        self._shadow.loss_scale = self._next_scale(counted=False)
        self._shadow.step = self.step + 1

    def swap(self) -> None:
        """Exchange the two copies; see `CommittedLayer.swap`."""
        self._require_update()
        self._exchange()

    def take_back(self, to_step: int) -> None:
        """Exchange the two copies again, bitwise; see `CommittedLayer.take_back`."""
        if self.step == to_step + 1 and self._shadow.step == to_step:
            self._exchange()
        self._require_step(to_step)
        if self._shadow.step is not None and self._shadow.step > to_step:
            self._shadow.step = None
        self._bind()

    def _forget(self) -> None:
        self._shadow.step = None

    def _exchange(self) -> None:
        self._live, self._shadow = self._shadow, self._live
        self._bind()

    def _copy_live(self) -> None:
        live, shadow = self._live, self._shadow
        shadow.step = None
        shadow.weights = copied(live.weights, shadow.weights)
        shadow.buffers = copied(live.buffers, shadow.buffers)
        old = shadow.optimizer or [{} for _ in live.optimizer]
        shadow.optimizer = [_copied_entries(entry, into) for entry, into in zip(live.optimizer, old, strict=True)]


def _copied_entries(values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copied_entry(value, into.get(key)) for key, value in values.items()}
