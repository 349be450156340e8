"""The best groups: a programme over machines that keeps every way which may still be the best one.

A way is groups of all machines before one. Of two ways to the same machine, one that costs no more and logs no more
leaves the other nothing. So what is kept is a front of recovery over bytes, and of that, by the bounds of prices, what
can still be as good as groups that are known.

Where boundaries are equal, no machine has more than N ways. Where all are unlike, deciding whether some of them add up
to a given sum is a part of this problem, so the ways may double with each machine. Usually the bounds leave few of
them; they leave all if recovery grows by the same time per byte wherever groups merge. Then the search ends with an
error.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast.errors import ConfigError
from holdfast.planning.groups.chain import Grouping, MachineChain
from holdfast.planning.groups.costs import GroupCosts
from holdfast.planning.groups.merging import greedy_groups
from holdfast.planning.groups.relaxed import Relaxed, relaxed

__all__ = ["best_groups"]

_Way = tuple[int, int, int]
"""Recovery, bytes, and minus the boundaries that are merged, one bit each, the first one the highest."""
_NARROW = 32
_MOST_WAYS = 1_000_000
_ROUNDING = 1e-12


def best_groups(chain: MachineChain) -> Grouping:
    """Returns the groups with the least recovery time that fit the limit.

    Ties go to the lowest index: of two groupings that are equal, the one that merges the first boundary in which they
    differ. A boundary of no bytes is never merged: that would save nothing, and cost.

    Raises:
        ConfigError: too many groupings are within rounding of the best; coarser sizes have fewer.

    Cost: some ms for 16 machines, 0.2 s for 256 (``benchmarks/groups.py``); some seconds until the error.
    """
    costs = GroupCosts(chain)
    if sum(costs.stored) <= costs.room:
        return costs.rated(range(chain.num_machines))
    bounds = relaxed(costs)
    most = _total(costs, [group[0] for group in greedy_groups(chain).groups])
    if sum(costs.stored[first - 1] for first in bounds.starts[1:]) <= costs.room:
        most = min(most, _total(costs, bounds.starts))
    for width in (_NARROW, None):
        found = _search(costs, bounds, most, width)
        most = min(most, found[0]) if found else most
    assert found is not None
    return costs.rated(_starts(chain.num_machines, -found[2]))


def _total(costs: GroupCosts, starts: tuple[int, ...] | list[int]) -> int:
    return sum(costs.weighted(*each) for each in zip(starts, [*starts[1:], costs.chain.num_machines], strict=True))


def _search(costs: GroupCosts, bounds: Relaxed, most: int, width: int | None) -> _Way | None:
    """Returns the best way to the end that costs at most this; if only so many are kept per machine, maybe none."""
    count = costs.chain.num_machines
    whole, every = costs.weighted(0, count), sum(costs.stored)
    limit = most / whole + _ROUNDING
    possible = bounds.possible(limit)
    num_ways = 0
    ways: list[list[_Way]] = [[(0, 0, 0)], *([] for _ in range(count))]
    for first in range(count):
        here, ways[first] = list(_undominated(ways[first])), []
        if not here:
            continue
        paid, stored = (np.array([way[part] / of for way in here]) for part, of in ((0, whole), (1, every)))
        least = paid + bounds.bounds(stored, first)
        num_ways += len(here)
        if num_ways > _MOST_WAYS:
            raise ConfigError(
                f"more than {_MOST_WAYS} ways to group the machines before {first} may be the best: "
                "expected boundaries that are rounded to fewer different sizes, or the greedy algorithm"
            )
        kept = [here[place] for place in np.argsort(least, kind="stable")[:width] if least[place] <= limit]
        for stop in map(int, np.flatnonzero(possible[first])):
            cost, room = costs.weighted(first, stop), costs.room
            more = costs.stored[stop - 1] if stop < count else 0
            merged = (1 << stop - 1 - first) - 1 << count - stop
            ways[stop] += [(way[0] + cost, way[1] + more, way[2] - merged) for way in kept if way[1] + more <= room]
    return min(ways[count], key=lambda way: (way[0], way[2]), default=None)


def _undominated(ways: list[_Way]) -> Iterator[_Way]:
    """Yields the ways to a machine of which none is left without a use by another one.

    One that costs less and logs no more does that, or one that costs the same, logs no more and wins the tie.
    """
    below = least = None
    cost, winner = -1, 1
    for way in sorted(ways):
        if way[0] > cost:
            below, cost, winner = least, way[0], 1
        if (below is None or way[1] < below) and way[2] < winner:
            winner = way[2]
            least = way[1] if least is None else min(least, way[1])
            yield way


def _starts(count: int, merged: int) -> list[int]:
    return [0, *(place for place in range(1, count) if not merged >> count - 1 - place & 1)]
