"""All that can be reproduced, and what cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from holdfast.errors import ConfigError
from holdfast.reproduce import here, nicolae, oobleck, slipstream, swift
from holdfast.reproduce.found import Item

__all__ = ["ELSEWHERE", "FIRST", "ITEMS", "wanted"]

ITEMS: Mapping[str, Item] = MappingProxyType(
    {item.name: item for paper in (slipstream, oobleck, swift, nicolae, here) for item in paper.ITEMS}
)
"""By name, in the order of the report."""

FIRST = (
    ("slipstream/example", "one lost, decoupled and staggered, period"),
    ("slipstream/table1", "GPT-3 Medium, 30m: SlipStream"),
    ("slipstream/table1", "GPT-3 3.35B, 30m: SlipStream"),
    ("slipstream/table1", "GPT-3 6.7B, 30m: SlipStream"),
    ("slipstream/figure8", "GPT-3 6.7B: SlipStream over Oobleck"),
    ("slipstream/figure8", "GPT-3 Medium: SlipStream over Bamboo"),
    ("oobleck/table2", "GPT-3 6.7b, 10m: Oobleck"),
    ("oobleck/table2", "GPT-3 6.7b, 10m: Oobleck over Varuna"),
    ("oobleck/figure10", "GPT-3 2.7b, EC2 (p3): Oobleck over Varuna"),
    ("swift/table5", "Wide-ResNet-50: global checkpoints"),
    ("swift/table5", "BERT-128: SWIFT"),
    ("swift/figure9", "Wide-ResNet-50: replication against global checkpoints"),
    ("swift/figure13", "BERT-128: saved over global checkpoints"),
    ("nicolae/figure3", "ResNet-50: an epoch that is run again, by one mini-batch"),
)
"""The rows that whoever knows the papers looks for, by their items."""

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
