"""Takes the settings of optimizers and schedulers from a state: where the script has other ones now, these count.

They differ only where a person has accepted it. What is of progress goes on: a learning rate is where its schedule was,
in proportion to the one that the script gives now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from holdfast.runtime.loop.facts import OF_PROGRESS, of_group

__all__ = ["Changes", "take_groups", "take_schedule"]

_RATES = ("lr", "initial_lr")
_SHAPING = ("amsgrad", "centered", "momentum")
"""Settings by which an optimizer has more state or less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a script says of itself, beside what the run said whose state it takes; none: both say the same."""

    before: Mapping[str, Any] = field(default_factory=dict)
    now: Mapping[str, Any] = field(default_factory=dict)

    def has(self, path: str, group: int | None = None) -> bool:
        """Whether a key has another value, in all groups or in one."""
        if group is None:
            return bool(self.before.get(path) != self.now.get(path))
        return bool(of_group(self.before, path, group) != of_group(self.now, path, group))

    def of_schedules(self) -> bool:
        """Whether there are other schedulers: then they begin anew."""
        kinds = {path for path in (*self.before, *self.now) if path.startswith("scheduler") and path.endswith(".kind")}
        return any(map(self.has, kinds))

    def rates(self, path: str) -> bool:
        """Whether an optimizer has other learning rates, or other groups."""
        return self.has(f"{path}.lr") or self.has(f"{path}.groups")

    def reshape(self, path: str) -> bool:
        """Whether the state of an optimizer's parameters is of no use: it is of another class, or has other entries."""
        shaping = [f"{path}.{key}" for key in _SHAPING if self.has(f"{path}.{key}")]
        return self.has(f"{path}.kind") or any(bool(self.before.get(k)) != bool(self.now.get(k)) for k in shaping)


def take_groups(optimizer: Optimizer, path: str, stored: Sequence[Mapping[str, Any]], changes: Changes) -> None:
    """Takes the settings of an optimizer's groups.

    Args:
        optimizer: takes them.
        path: its key.
        stored: the settings, by group.
        changes: where the script's own count.
    """
    alike = not changes.has(f"{path}.kind") and not changes.has(f"{path}.groups")
    for index, group in enumerate(optimizer.param_groups):
        there = stored[index if alike else 0]
        if alike:
            names = [each for each in there if each not in _RATES and not changes.has(f"{path}.{each}", index)]
            group.update({each: _like(there[each], group.get(each)) for each in names})
        if not changes.of_schedules():
            same = alike and not changes.has(f"{path}.lr", index)
            group.update(_rates(there) if same else _scaled(there, of_group(changes.now, f"{path}.lr", index)))


def _rates(there: Mapping[str, Any]) -> dict[str, Any]:
    return {key: there[key] for key in _RATES if key in there}


def _scaled(there: Mapping[str, Any], initial: float) -> dict[str, Any]:
    """Where its schedule was, in proportion; without a schedule, as the script gives it."""
    if not there.get("initial_lr"):
        return {"lr": initial}
    return {"lr": there["lr"] * initial / there["initial_lr"], "initial_lr": initial}


def _like(value: Any, there: Any) -> Any:
    """A setting as the optimizer had it: JSON makes lists of tuples."""
    return tuple(value) if isinstance(there, tuple) else value


def take_schedule(
    scheduler: Any, path: str, stored: dict[str, Any], first: Mapping[str, Any], changes: Changes
) -> None:
    """Takes the state of a scheduler.

    Args:
        scheduler: takes it; its optimizer has taken its groups.
        path: its key.
        stored: the state.
        first: the one that it began with.
        changes: where the script's own settings count.
    """
    own = {key: _merged(stored.get(key), value) for key, value in first.items() if changes.has(f"{path}.{key}")}
    state = {**stored, **own}
    optimizer = getattr(scheduler, "optimizer", None)
    optimizers = [each.removesuffix(".lr") for each in changes.now if each.startswith("optimizer") and _is_rate(each)]
    if optimizer is not None and any(map(changes.rates, optimizers)):
        state = _rebased(state, first, [group["lr"] for group in optimizer.param_groups])
    scheduler.load_state_dict(state)


def _is_rate(path: str) -> bool:
    return path.endswith(".lr")


def _merged(stored: Any, first: Any) -> Any:
    """Settings of schedulers within a scheduler, which are as far as they were."""
    if isinstance(first, list) and isinstance(stored, list) and len(first) == len(stored):
        return [_merged(*each) for each in zip(stored, first, strict=True)]
    if isinstance(first, dict) and isinstance(stored, dict) and "last_epoch" in stored:
        return {**first, **{key: stored[key] for key in OF_PROGRESS if key in stored}}
    return first


def _rebased(state: Mapping[str, Any], first: Mapping[str, Any], rates: list[float]) -> dict[str, Any]:
    """A schedule's state over other learning rates."""
    based = dict(state)
    if "base_lrs" in first:
        based["base_lrs"] = list(first["base_lrs"])
    if "_last_lr" in state:
        based["_last_lr"] = list(rates)
    if "_schedulers" in state:
        inner = zip(state["_schedulers"], first["_schedulers"], strict=True)
        based["_schedulers"] = [_rebased(one, other, rates) for one, other in inner]
    return based
