"""What is summed over workers: what each contributes, and what comes of it.

The bits of a sum of rounded numbers depend on the order of its additions. So a contribution is not one number but its
parts, each the sum of what stands side by side in a fixed order, and whoever has those of all members folds them by
that order. Which parts they are, the contribution's header says, and it goes whole to every member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Contribution", "SumSize", "Told", "Total", "add_up", "plain"]


@dataclass(frozen=True, slots=True)
class Told:
    """What one member of a sum contributes, to all of it or to a share of the elements.

    Attributes:
        header: as the member wrote it.
        parts: 1-D, all of one length.
        kept: whether somebody else needs the parts as they are.
    """

    header: bytes
    parts: Sequence[Any]
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a worker contributes to a sum. Nobody changes it any more.

    Attributes:
        header: what all members are told beside the numbers.
        parts: the numbers: 1-D, all of one length and type, which those of all members have; any number of them.
        length: of each part, also where there is none.
        fold: makes the sum, so long, of what all members, in their order, have told; raises what is wrong with that.
    """

    header: bytes
    parts: tuple[Any, ...]
    length: int
    fold: Callable[[Sequence[Told], int], Any]

    @property
    def told(self) -> Told:
        """All of it."""
        return Told(self.header, self.parts)


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over workers.

    Attributes:
        total: 1-D.
        headers: of all members, in their order.
    """

    total: Any
    headers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSize:
    """How much any member contributes to a sum at most.

    Attributes:
        header: bytes of the header.
        part: bytes of each part.
        parts: how many there are.
    """

    header: int
    part: int
    parts: int = 1


def add_up(contributions: Sequence[Contribution]) -> Total:
    """Returns the sum of contributions that are all here, in the order of the members."""
    told = tuple(each.told for each in contributions)
    return Total(contributions[0].fold(told, contributions[0].length), tuple(each.header for each in told))


def plain(numbers: Any) -> Contribution:
    """Returns a contribution of one part and no header: parts are added in the order of the members."""
    return Contribution(b"", (numbers,), len(numbers), _added)


def _added(told: Sequence[Told], length: int) -> Any:
    (first, *others) = (part for each in told for part in each.parts)
    total = first
    for other in others:
        total = total + other
    return total
