"""Merging neighbours, the cheapest first, until what is logged between groups fits: by two rules for what is cheap."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from holdfast.planning.groups.chain import Grouping, MachineChain
from holdfast.planning.groups.costs import GroupCosts, exact

__all__ = ["authors_groups", "greedy_groups"]

_Rise = Callable[[int, int, int], Fraction]
"""How much more time recovery takes, if groups that begin at the first two machines and end before the third merge."""


def greedy_groups(chain: MachineChain) -> Grouping:
    """Returns groups by the greedy of the paper: always the merger with the least rise in recovery time per byte.

    The rise is that of the sum of R(G) |G| / N, so a parallel chain is the paper's parallel variant. Among equals the
    first two groups merge. A boundary of no bytes is never merged: it saves nothing.

    Cost: O(N^2).

    Source: Zhong et al., "SWIFT", section 5.3; logs may be as large as the limit, which the text has them stay below.
    """
    costs = GroupCosts(chain)

    def rise(first: int, middle: int, stop: int) -> Fraction:
        return Fraction(costs.weighted(first, stop) - costs.weighted(first, middle) - costs.weighted(middle, stop))

    return _merged(costs, rise, 0)


def authors_groups(chain: MachineChain, behind_bytes: float) -> Grouping:
    """Returns groups by the rule of the authors' published code, which made the paper's table 7.

    It differs from section 5.3 in two things. What a merger adds is R(G) - (R(G_i) + R(G_{i+1})) / 2, however large the
    groups are. And the list of boundaries has an entry for the last machine, too, which never merges: there is nothing
    behind it, yet it takes of the limit. (It is not in ``storage_bytes``.) Their rule knows no parallel recovery: the
    groups of a parallel chain are the same, only rated otherwise.

    Args:
        chain: the machines; the authors counted one direction of each boundary.
        behind_bytes: the entry of the last machine.

    Source: github.com/jasperzhong/swift, benchmarks/distributed/ft/pipeline_vit/profile/optimizer.py.
    """
    costs = GroupCosts(chain)

    def rise(first: int, middle: int, stop: int) -> Fraction:
        apart = costs.recovery(first, middle) + costs.recovery(middle, stop)
        return costs.recovery(first, stop) - Fraction(apart, 2)

    return _merged(costs, rise, exact(behind_bytes) * chain.interval / costs.byte)


def _merged(costs: GroupCosts, rise: _Rise, always: Fraction | int) -> Grouping:
    """Merges until what is logged, and ``always``, fits, or nothing is left to merge."""
    ends = [*range(costs.chain.num_machines + 1)]
    logged = sum(costs.stored) + always
    while logged > costs.room:
        places = [place for place in range(1, len(ends) - 1) if costs.stored[ends[place] - 1]]
        if not places:
            break
        best = min(
            places, key=lambda at: rise(*ends[at - 1 : at + 2]) / costs.stored[ends[at] - 1]
        )  # the first of them
        logged -= costs.stored[ends[best] - 1]
        del ends[best]
    return costs.rated(ends[:-1])
