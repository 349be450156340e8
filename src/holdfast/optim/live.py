"""Layers that are updated in place and only ever go forward: no copy is kept, and no step is inverted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import ConfigError
from holdfast.optim.committed import CommittedLayer, Fold, Version, copied
from holdfast.optim.digest import LayerState, cloned_entries
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.loss_scale import LossScale, LossScaling
from holdfast.optim.mirror import Mirror

__all__ = ["LiveLayer"]


@dataclass(slots=True, kw_only=True)
class _Next:
    """An update that is ready to be made.

    Attributes:
        step: the step that it leads to.
        buffers: those after it.
        loss_scale: the scale of the loss after it.
        gradients: per trainable parameter; None for one that is left as it is; empty: no optimizer runs.
    """

    step: int
    buffers: list[Tensor]
    loss_scale: LossScale | None
    gradients: list[Tensor | None] = field(default_factory=list)


class LiveLayer(CommittedLayer):
    """A layer that somebody else's code looks at between any two steps, so that it must never seem to go back.

    ``swap`` runs the optimizer in place. ``take_back`` changes nothing but the number of the step: the layer is
    *ahead* then, and making the same update again puts the number forward again. So it suits whoever needs nothing of
    an interrupted step but to have it ended, with the sums that it was updated with.

    ``swap`` changes several tensors: a process that goes on after an exception inside it has lost the layer.
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
        self._mirror = factory if isinstance(factory, Mirror) else None
        if self._mirror is not None:
            self._live.optimizer = self._mirror.entries()
            self._show()
        self._next: _Next | None = None
        self._ahead = False
        self._whole = True

    @property
    def optimizer(self) -> Optimizer | None:
        """What updates it; None if it has nothing to train."""
        return self._optimizer

    @property
    def exact(self) -> bool:
        """Always: nothing is inverted."""
        return True

    @property
    def whole(self) -> bool:
        """False after an exception in the middle of an update."""
        return self._whole

    @property
    def ahead(self) -> bool:
        """Whether the weights are those of the next step already."""
        return self._ahead

    @property
    def updated(self) -> bool:
        """Whether the next state is ready to be swapped in."""
        return self._ahead or (self._next is not None and self._next.step == self.step + 1)

    def update(self, gradients: Mapping[str, Tensor | None], lr_scale: float, fold: Fold | None = None) -> None:
        """Keep what the update needs, and make the next buffers; see `CommittedLayer.update`."""
        if self._ahead:
            return
        buffers = copied(self._live.buffers, [])
        self._fold(fold, buffers)
        self._next = _Next(
            step=self.step + 1,
            buffers=buffers,
            loss_scale=self._next_scale(counted=True),
            gradients=self._in_order(gradients),
        )

    def skip(self) -> None:
        """Prepare to count a step; see `CommittedLayer.skip`."""
        if not self._ahead:
            buffers = copied(self._live.buffers, [])
            self._next = _Next(step=self.step + 1, buffers=buffers, loss_scale=self._next_scale(counted=False))

    def swap(self) -> None:
        """Run the optimizer in place, unless that was done; see `CommittedLayer.swap`."""
        self._require_update()
        update, self._next = self._next, None
        if not self._ahead:
            assert update is not None, "an update is required, and it was not made yet"
            self._make(update)
        self._ahead = False
        self._live.step = self.step + 1

    def take_back(self, to_step: int) -> None:
        """Count the last step as not made, though it was; see `CommittedLayer.take_back`."""
        if self.step == to_step + 1 and not self._ahead:
            self._live.step, self._ahead = to_step, True
        self._require_step(to_step)
        self._next = None

    def count_back(self) -> None:
        """Count the last update as none: the same step is made again, on the weights that it has led to."""
        self._live.step = self.step - 1

    def put_back(self) -> None:
        """Take the values of what was put in the place of a tensor's ``data`` since the last update, not its memory.

        And what was put in the place of the optimizer's state of a parameter, or that nothing was left of it.

        Raises:
            ConfigError: it has another shape or type.
        """
        named, live = (*self._trainable.items(), *self._buffers.items()), (*self._live.weights, *self._live.buffers)
        for (name, tensor), value in zip(named, live, strict=True):
            if tensor.data_ptr() == value.data_ptr() and tensor.stride() == value.stride():
                continue
            if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
                raise ConfigError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} now, and was {value.dtype} {tuple(value.shape)} "
                    "at hf.prepare; expected the same shape and type to the end of the loop"
                )
            tensor.data = value.copy_(tensor.data.clone())  # which may be a view of the same memory
        if self._mirror is not None:
            pairs = zip(self._live.optimizer, self._mirror.shown(), strict=True)
            self._live.optimizer = [row if row is shown else cloned_entries(shown) for row, shown in pairs]
            self._show()

    def _make(self, update: _Next) -> None:
        self._whole = False
        if update.gradients:
            self._run_optimizer(self._live, update.gradients, 1.0)
        for buffer, value in zip(self._live.buffers, update.buffers, strict=True):
            buffer.copy_(value)
        self._live.loss_scale = update.loss_scale
        self._whole = True

    def _run_optimizer(self, version: Version, gradients: Sequence[Tensor | None], lr_scale: float) -> None:
        if self._mirror is not None and self._optimizer is not None:
            self._mirror.sync(self._optimizer)
            self._settings = self._group_settings()
        super()._run_optimizer(version, gradients, lr_scale)
        self._show()

    def install(self, state: LayerState) -> None:
        """Replace everything by a state from elsewhere; see `CommittedLayer.install`."""
        super().install(state)
        self._show()

    def _show(self) -> None:
        if self._mirror is not None:
            self._mirror.show(self._live.optimizer)

    def _forget(self) -> None:
        self._next, self._ahead, self._whole = None, False, True
