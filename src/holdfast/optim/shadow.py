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

    `update` writes the next state into the spare copy, `swap` exchanges the two, `take_back` exchanges them again,
    bitwise. Only what the parameters' and buffers' objects point to changes. The spare copy is made at the first
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
        self._spare = Version(step=None, weights=[], buffers=[])

    @property
    def exact(self) -> bool:
        """Always: a state taken back is the old copy."""
        return True

    @property
    def updated(self) -> bool:
        """Whether the next state is ready to be swapped in."""
        return self._spare.step == self.step + 1

    def update(self, gradients: Mapping[str, Tensor | None], lr_scale: float, fold: Fold | None = None) -> None:
        """Make the next state on the spare copy; see `CommittedLayer.update`.

        Raises:
            ConfigError: the optimizer keeps state in its parameter groups, which would not be taken back.
        """
        self._copy_live()
        self._fold(fold, self._spare.buffers)
        self._run_optimizer(self._spare, self._in_order(gradients), lr_scale)
        self._spare.loss_scale = self._next_scale(counted=True)
        self._spare.step = self.step + 1

    def skip(self) -> None:
        """Make the next state an unchanged copy; see `CommittedLayer.skip`."""
        self._copy_live()
        self._spare.loss_scale = self._next_scale(counted=False)
        self._spare.step = self.step + 1

    def swap(self) -> None:
        """Exchange the two copies; see `CommittedLayer.swap`."""
        self._require_update()
        self._exchange()

    def take_back(self, to_step: int) -> None:
        """Exchange the two copies again, bitwise; see `CommittedLayer.take_back`."""
        if self.step == to_step + 1 and self._spare.step == to_step:
            self._exchange()
        self._require_step(to_step)
        if self._spare.step is not None and self._spare.step > to_step:
            self._spare.step = None
        self._bind()

    def _forget(self) -> None:
        self._spare.step = None

    def _exchange(self) -> None:
        self._live, self._spare = self._spare, self._live
        self._bind()

    def _copy_live(self) -> None:
        live, spare = self._live, self._spare
        spare.step = None
        spare.weights = copied(live.weights, spare.weights)
        spare.buffers = copied(live.buffers, spare.buffers)
        old = spare.optimizer or [{} for _ in live.optimizer]
        spare.optimizer = [_copied_entries(entry, into) for entry, into in zip(live.optimizer, old, strict=True)]


def _copied_entries(values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copied_entry(value, into.get(key)) for key, value in values.items()}
