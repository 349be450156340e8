"""What groups cost, in whole numbers: no sum depends on its order, and ties are ties."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate

from holdfast.planning.groups.chain import Group, Grouping, MachineChain

__all__ = ["GroupCosts", "exact"]


class GroupCosts:
    """What groups of a chain cost.

    The recovery of a group G computes what its machines compute, and moves what passes between them:

        R(G) = sum of computes + inner boundaries / bandwidth

    divided by floor(N / |G|), the copies of the group that all machines have room for, if it is parallel. A machine of
    G is lost in |G| of N cases. Seconds and bytes are whole multiples of :attr:`second` and :attr:`byte`; decimals
    count as they are written, so 0.1 + 0.2 ties with 0.3.

    Attributes:
        chain: the machines.
        second: the unit of seconds.
        byte: the unit of bytes.
        stored: what logging each boundary takes for an interval.
        room: what all logs may take.

    Source: Zhong et al., "SWIFT", section 5.3.
    """

    def __init__(self, chain: MachineChain) -> None:
        self.chain = chain
        count = chain.num_machines
        seconds = [exact(each) for each in chain.compute_s]
        moved = [exact(each) / exact(chain.bandwidth) for each in chain.boundary_bytes]
        logged = [exact(each) * chain.interval for each in chain.boundary_bytes]
        limit = exact(chain.limit_bytes)
        self.second = Fraction(1, _denominator([*seconds, *moved]))
        self.byte = Fraction(1, _denominator([*logged, limit]))
        self._computed, self._moved = (_sums(each, self.second) for each in (seconds, moved))
        self.stored = tuple(int(each / self.byte) for each in logged)
        self.room = int(limit / self.byte)
        self._copies = math.lcm(*(count // size for size in range(1, count + 1))) if chain.parallel else 1
        self._unit = self.second / (count * self._copies)

    def recovery(self, first: int, stop: int) -> int:
        """Returns R(G) for machines ``first`` to ``stop - 1``, by one copy of the group, in :attr:`second`."""
        return self._computed[stop] - self._computed[first] + self._moved[stop - 1] - self._moved[first]

    def weighted(self, first: int, stop: int) -> int:
        """Returns R(G) |G| / N for machines ``first`` to ``stop - 1``, in a unit that is the same for all groups."""
        size = stop - first
        shared = self._copies // (self.chain.num_machines // size) if self.chain.parallel else 1
        return self.recovery(first, stop) * size * shared

    def rated(self, starts: Sequence[int]) -> Grouping:
        """Returns the groups that begin at these machines, of which 0 is the first, with what they come to."""
        stops = [*starts[1:], self.chain.num_machines]
        total = sum(self.weighted(first, stop) for first, stop in zip(starts, stops, strict=True))
        storage = sum(self.stored[first - 1] for first in starts[1:]) * self.byte
        groups: tuple[Group, ...] = tuple(tuple(range(*each)) for each in zip(starts, stops, strict=True))
        return Grouping(
            groups=groups,
            recovery_s=float(total * self._unit),
            storage_bytes=int(storage) if storage.denominator == 1 else float(storage),
        )


def exact(value: float) -> Fraction:
    """Returns a number as it is written in decimals.

    >>> exact(0.1) + exact(0.2) == exact(0.3)
    True
    """
    return Fraction(repr(value))


def _denominator(values: Iterable[Fraction]) -> int:
    return math.lcm(*(value.denominator for value in values))


def _sums(values: Sequence[Fraction], unit: Fraction) -> list[int]:
    """Returns sums of the first 0, 1, ... values."""
    return list(accumulate((int(value / unit) for value in values), initial=0))
