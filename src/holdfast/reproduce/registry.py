"""All that can be reproduced, and what cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from holdfast.errors import ConfigError
from holdfast.reproduce import nicolae, oobleck, slipstream, swift
from holdfast.reproduce.found import Item

__all__ = ["ELSEWHERE", "ITEMS", "wanted"]

ITEMS: Mapping[str, Item] = MappingProxyType(
    {item.name: item for paper in (slipstream, oobleck, swift, nicolae) for item in paper.ITEMS}
)
"""By name, in the order of the report."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "slipstream/table2": "real runs against simulation: this package's are in [benchmarks](benchmarks.md)",
        "slipstream/figure7": "losses that are survived: tests, and every run of the soak",
        "oobleck/table1": "models and batches: input",
        "swift/tables 1, 2, 4": "operators of optimizers, models, lengths of runs: input",
        "swift/figure12": "accuracy after undoing: other models, in [undo](undo.md)",
        "nicolae/table1": "seconds of models on A100s: input",
        "nicolae/figures 2a, 2b, 3a, 4a": "accuracies: other models and data, in [study](study.md)",
    }
)
"""What is not computed, and what stands for it."""


def wanted(names: Sequence[str]) -> tuple[Item, ...]:
    """Return what is meant by names, in the order of the report: ``all``, a paper, or one item each.

    Raises:
        ConfigError: there is none of a name.
    """
    found = set[str]()
    for name in names:
        meant = {each for each in ITEMS if name in ("all", each, ITEMS[each].paper)}
        if not meant:
            raise ConfigError(f"{name}: expected all, {', '.join(_papers())}, or one of {', '.join(ITEMS)}")
        found |= meant
    return tuple(item for name, item in ITEMS.items() if name in found)


def _papers() -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.paper for item in ITEMS.values()))
