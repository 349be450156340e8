"""Optimizers that do what somebody else's one would do to some of its parameters, by the settings that it has then."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ConfigError
from holdfast.optim.digest import cloned_entries

__all__ = ["Mirror", "is_mirror"]

_MARK = "_mirrors"


def is_mirror(optimizer: Optimizer) -> bool:
    """Whether an optimizer was made by a `Mirror`."""
    return _MARK in vars(optimizer)


class Mirror:
    """Makes optimizers of the same kind as another one, over stand-ins for some of its parameters.

    Args:
        optimizer: the one that is mirrored; what it says of its groups counts whenever a mirror steps.
        parameters: those that stand-ins will be made for, in their order. Those that are in none of its groups are not
            updated.
        steps_now: called with the one that is mirrored whenever a mirror is about to step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        steps_now: Callable[[Optimizer], None] = lambda optimizer: None,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = tuple(parameters)
        self._steps_now = steps_now
        self._sources: list[dict[str, Any]] = []

    def __call__(self, stand_ins: list[nn.Parameter]) -> Optimizer:
        """Makes the optimizer; it has no state."""
        standing_for = {id(p): stand_in for p, stand_in in zip(self._parameters, stand_ins, strict=True)}
        self._sources, groups = [], []
        for group in self._optimizer.param_groups:
            ours = [standing_for[id(p)] for p in group["params"] if id(p) in standing_for]
            if ours:
                self._sources.append(group)
                groups.append({**group, "params": ours})
        made: Optimizer = object.__new__(type(self._optimizer))
        made.__dict__.update(
            {k: v for k, v in self._optimizer.__dict__.items() if k not in ("step", "zero_grad", "load_state_dict")}
        )
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            made.__dict__[hooks] = OrderedDict()  # they are called once for all mirrors
        vars(made)[_MARK] = True
        made.state = defaultdict(dict)
        made.param_groups = groups
        return made

    def sync(self, made: Optimizer) -> None:
        """Gives it the settings that the mirrored one has now, as a scheduler or a hook has changed them."""
        self._steps_now(self._optimizer)
        for group, source in zip(made.param_groups, self._sources, strict=True):
            group.update({key: _copied(value) for key, value in source.items() if key != "params"})

    def entries(self) -> list[dict[str, Any]]:
        """Returns copies of what the mirrored one has of each parameter, in their order."""
        rows = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        return [cloned_entries(row) for row in rows]

    def shown(self) -> list[dict[str, Any]]:
        """Returns what the mirrored one has of each parameter now: the dicts themselves, whoever put them there."""
        return [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]

    def show(self, entries: Sequence[dict[str, Any]]) -> None:
        """Has the mirrored one show what there is of each parameter now: the same dicts, no copies."""
        for parameter, row in zip(self._parameters, entries, strict=True):
            if row:
                self._optimizer.state[parameter] = row
            else:
                self._optimizer.state.pop(parameter, None)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        raise ConfigError("a setting of the optimizer is a tensor (such as lr=torch.tensor(...)); expected a number")
    return value
