"""Running statistics of batch-norm, taken apart: each micro-batch's statistics now, their fold in one order later.

A batch-norm module would fold each micro-batch into its buffers as it comes, so that the result depends on the order
and on the worker. Here a forward pass runs with scratch buffers and momentum 1, which leaves the batch's own statistics
in them. These travel with the gradients; the update folds all of them in the order of the global micro-batch numbers.
While a module is in ``eval()``, as for the pseudo-labels of a teacher, it has its own buffers: as the step found them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from holdfast.errors import ConfigError

__all__ = ["RunningStats"]

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class RunningStats:
    """The batch-norm modules of one layer that are training with running statistics.

    Args:
        layer: index of the layer, for messages.
        module: the layer.
    """

    def __init__(self, layer: int, module: nn.Module) -> None:
        self._layer = layer
        self._modules = {name: norm for name, norm in module.named_modules() if _tracks(norm)}
        self._scratch: dict[str, list[Tensor]] = {}
        prefixes = [f"{name}." if name else "" for name in self._modules]
        self.buffer_names = frozenset(prefix + kind for prefix in prefixes for kind in _NAMES)
        """Names within the layer of the buffers that are handled here."""

    @property
    def width(self) -> int:
        """Float32 values per micro-batch: mean and unbiased variance of every feature."""
        return sum(2 * norm.get_buffer("running_mean").numel() for norm in self._modules.values())

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep the real buffers out of every forward pass within: backward passes too may run one (checkpointing).

        Not out of those in ``eval()``, which read them and change nothing.
        """
        kept = [(norm, norm.momentum, [norm._buffers[kind] for kind in _NAMES]) for norm in self._modules.values()]
        try:
            for (name, norm), (_, _, real) in zip(self._modules.items(), kept, strict=True):
                norm.momentum = 1.0
                self._scratch[name] = [torch.zeros_like(buffer) for buffer in real]  # the graph keeps it
                switch = _Switch(norm, real, self._scratch[name])
                norm.train = switch.train
                switch.turn()
            yield
        finally:
            for norm, momentum, buffers in kept:
                norm.__dict__.pop("train", None)
                norm.momentum = momentum
                norm._buffers.update(zip(_NAMES, buffers, strict=True))

    def taken(self) -> Tensor:
        """Return the statistics of the forward pass just run within `apart`: float32 ``[width]``.

        Raises:
            ConfigError: a batch-norm module did not run exactly once.
        """
        for name, (_, _, times) in self._scratch.items():
            if int(times.item()) != 1:
                advice = "set track_running_stats=False or use separate modules"
                if not self._modules[name].training:
                    advice = "it is in eval() now; one that is to stay so must be before training begins"
                raise ConfigError(
                    f"layer {self._layer}: batch-norm {name!r} ran {int(times.item())} times in one forward pass in"
                    f" train(), expected once; {advice}"
                )
        return torch.cat([value.float() for scratch in self._scratch.values() for value in scratch[:2]])

    def fold(self, buffers: Mapping[str, Tensor], records: Tensor) -> None:
        """Fold all micro-batches into buffers, in place and in the order of the rows.

        Args:
            buffers: the layer's buffers by name.
            records: float32 ``[num_microbatches, width]``, rows as `taken` returned them.
        """
        start = 0
        for name, norm in self._modules.items():
            prefix = f"{name}." if name else ""
            mean, var, tracked = (buffers[prefix + kind] for kind in _NAMES)
            size = mean.numel()
            for row in records[:, start : start + 2 * size]:
                tracked.add_(1)
                factor = 1.0 / float(tracked.item()) if norm.momentum is None else norm.momentum
                mean.mul_(1.0 - factor).add_(row[:size] * factor)
                var.mul_(1.0 - factor).add_(row[size:] * factor)
            start += 2 * size


@dataclass(frozen=True, slots=True)
class _Switch:
    """Gives a module its real buffers in ``eval()`` and the scratch ones in ``train()``.

    Attributes:
        norm: the module; a copy of it has a copy of its switch.
        real: its own buffers.
        scratch: those of the micro-batch that runs.
    """

    norm: _BatchNorm
    real: list[Tensor]
    scratch: list[Tensor]

    def train(self, mode: bool = True) -> _BatchNorm:
        """In the place of the module's own: ``eval()`` and the ``train()`` of a model around it come here, too."""
        type(self.norm).train(self.norm, mode)
        self.turn()
        return self.norm

    def turn(self) -> None:
        """Gives the module what its mode needs."""
        self.norm._buffers.update(zip(_NAMES, self.scratch if self.norm.training else self.real, strict=True))


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training and module.running_mean is not None
