"""How ``holdfast groups`` shows groups: as a table, JSON or a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from holdfast.drawing.tradeoff import tradeoff_to_svg
from holdfast.planning.groups.chain import Grouping, MachineChain

__all__ = ["FORMATS", "ShownGroups"]

_LIMITS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownGroups:
    """Groups, and what there is to say of them.

    Attributes:
        chain: the machines and the limit.
        grouping: the groups.
        algorithms: what makes groups of such a chain, by name; that of these groups first.
    """

    chain: MachineChain
    grouping: Grouping
    algorithms: Mapping[str, Callable[[MachineChain], Grouping]]


def _to_json(shown: ShownGroups) -> str:
    found = shown.grouping
    return (
        json.dumps(
            {
                "groups": [list(group) for group in found.groups],
                "recovery_s": found.recovery_s,
                "storage_bytes": found.storage_bytes,
            }
        )
        + "\n"
    )


def _to_table(shown: ShownGroups) -> str:
    chain, found = shown.chain, shown.grouping
    spans = [f"{group[0]}-{group[-1]}" if len(group) > 1 else f"{group[0]}" for group in found.groups]
    return (
        f"groups    {len(found.groups)} of {chain.num_machines} machine(s): {', '.join(spans)}\n"
        f"recovery  {found.recovery_s:.6g} s for a lost step, each machine as likely to be lost as any other\n"
        f"storage   {found.storage_bytes:.6g} of {chain.limit_bytes:.6g} bytes, for {chain.interval} step(s)\n"
    )


def _to_svg(shown: ShownGroups) -> str:
    most = sum(shown.chain.boundary_bytes) * shown.chain.interval
    chains = [replace(shown.chain, limit_bytes=most * part / _LIMITS) for part in range(_LIMITS + 1)]
    curves = {
        name: [(make(chain).recovery_s, chain.limit_bytes) for chain in chains]
        for name, make in shown.algorithms.items()
    }
    chosen = (shown.grouping.recovery_s, shown.chain.limit_bytes)
    limit = min(chosen[1], most)
    return tradeoff_to_svg(curves, (chosen[0], limit), "recovery of a lost step against the limit of all logs")


FORMATS: Mapping[str, Callable[[ShownGroups], str]] = MappingProxyType(
    {"json": _to_json, "svg": _to_svg, "table": _to_table}
)
"""The name of every form, and what makes it."""
