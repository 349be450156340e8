"""Running statistics of batch-norm, taken apart: each micro-batch's statistics now, their fold in one order later.

A batch-norm module would fold each micro-batch into its buffers as it comes, so that the result depends on the order
and on the worker. Here a forward pass runs with scratch buffers of zeros. What k runs of a module with momentum m leave
in them is what they add to any buffer, which they multiply by (1 - m)^k besides: so both travel with the gradients, and
the update folds all micro-batches in the order of their global numbers. A module may run any number of times in each.
While it is in ``eval()``, as for the pseudo-labels of a teacher, it has its own buffers: as the step found them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from holdfast.errors import ConfigError

__all__ = ["RunningStats"]

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class RunningStats:
    """The batch-norm modules of one layer that have running statistics.

    Args:
        layer: index of the layer, for messages.
        module: the layer.
    """

    def __init__(self, layer: int, module: nn.Module) -> None:
        self._layer = layer
        self._modules = {name: norm for name, norm in module.named_modules() if _tracks(norm)}
        self._scratch: dict[str, list[Tensor]] = {}
        self._fill = 0.0
        self._seen = False
        prefixes = [f"{name}." if name else "" for name in self._modules]
        self.buffer_names = frozenset(prefix + kind for prefix in prefixes for kind in _NAMES)
        """Names within the layer of the buffers that are handled here."""

    @property
    def width(self) -> int:
        """Float32 values per micro-batch: of every module mean and unbiased variance of each feature, and its runs."""
        return sum(map(_width, self._modules.values()))

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names of modules with a forward pass of their own, which may read its running statistics as it trains."""
        torchs_own = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        return tuple(name for name, norm in self._modules.items() if type(norm).forward not in torchs_own)

    @contextmanager
    def filled(self, value: float) -> Iterator[None]:
        """Within it scratch buffers begin with a value: what is computed must not show which."""
        self._fill = value
        try:
            yield
        finally:
            self._fill = 0.0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep the real buffers out of every forward pass within: backward passes too may run one (checkpointing).

        Not out of those in ``eval()``, which read them and change nothing.
        """
        switches = []
        try:
            for name, norm in self._modules.items():
                real = [norm._buffers[kind] for kind in _NAMES]
                scratch = [torch.full_like(each, x) for each, x in zip(real, (self._fill, self._fill, 0), strict=True)]
                self._scratch[name] = scratch  # the graph keeps it
                switches.append(_Switch(norm, real, scratch, norm.__dict__.get("train")))
                norm.train = switches[-1].train
                switches[-1].turn()
            yield
        finally:
            for switch in switches:
                switch.remove()

    def taken(self) -> Tensor:
        """Return what was run within `apart` so far: float32 ``[width]``; of no meaning where it was `filled`.

        Raises:
            ConfigError: a module does not count how often it has run.
        """
        if not self._seen:  # asking makes a device wait; `fold` asks later
            for name, (mean, var, runs) in self._scratch.items():
                if not runs.any() and ((mean != self._fill).any() or (var != self._fill).any()):
                    raise self._uncounted(name)
            self._seen = True
        return torch.cat([value.float().reshape(-1) for scratch in self._scratch.values() for value in scratch])

    def fold(self, buffers: Mapping[str, Tensor], records: Tensor) -> None:
        """Fold all micro-batches into buffers, in place and in the order of the rows.

        Args:
            buffers: the layer's buffers by name.
            records: float32 ``[num_microbatches, width]``, rows as `taken` returned them.

        Raises:
            ConfigError: a module did not count how often it has run.
        """
        start = 0
        for name, norm in self._modules.items():
            prefix = f"{name}." if name else ""
            mean, var, tracked = (buffers[prefix + kind] for kind in _NAMES)
            size, width = mean.numel(), _width(norm)
            rows = records[:, start : start + width]
            for row, times in zip(rows, rows[:, -1].tolist(), strict=True):
                runs = int(times)
                if not runs:
                    if row[:-1].any():
                        raise self._uncounted(name)
                    continue
                tracked.add_(runs)
                if norm.momentum is None:  # what is added is a mean of all runs, those here and those before
                    share = runs / float(tracked.item())
                    kept = 1.0 - share
                else:
                    share, kept = 1.0, (1.0 - norm.momentum) ** runs
                mean.mul_(kept).add_(row[:size] * share)
                var.mul_(kept).add_(row[size:-1] * share)
            start += width

    def _uncounted(self, name: str) -> ConfigError:
        return ConfigError(
            f"layer {self._layer}: batch-norm {name!r} ({type(self._modules[name]).__name__}) changes its"
            " running statistics without counting it in num_batches_tracked; expected that it does as"
            " torch.nn.BatchNorm1d, or track_running_stats=False"
        )


@dataclass(frozen=True, slots=True)
class _Switch:
    """Gives a module its real buffers in ``eval()`` and the scratch ones in ``train()``.

    Attributes:
        norm: the module; a copy of it has a copy of its switch.
        real: its own buffers.
        scratch: those of the micro-batch that runs.
        own: what the module itself, and not its class, does in ``train()``; None: it has nothing of the kind.
    """

    norm: _BatchNorm
    real: list[Tensor]
    scratch: list[Tensor]
    own: Callable[..., Any] | None

    def train(self, mode: bool = True) -> _BatchNorm:
        """In the place of the module's own: ``eval()`` and the ``train()`` of a model around it come here, too."""
        if self.own is None:
            type(self.norm).train(self.norm, mode)
        else:
            self.own(mode)
        self.turn()
        return self.norm

    def remove(self) -> None:
        """The module is as it was."""
        if self.own is None:
            self.norm.__dict__.pop("train", None)
        else:
            self.norm.train = self.own  # type: ignore[method-assign]
        self.norm._buffers.update(zip(_NAMES, self.real, strict=True))

    def turn(self) -> None:
        """Gives the module what its mode needs."""
        self.norm._buffers.update(zip(_NAMES, self.scratch if self.norm.training else self.real, strict=True))


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module._buffers.get("running_mean") is not None


def _width(norm: nn.Module) -> int:
    return 2 * norm.get_buffer("running_mean").numel() + 1
