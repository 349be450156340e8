"""What a table or a figure of a paper comes to here: rows, each beside what is printed, and what was assumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Constant", "Found", "Item", "Origin", "Row", "Verdict"]


class Origin(StrEnum):
    """Where a number comes from that a computation takes. A row that takes one fitted to itself is no result."""

    PRINTED = "printed"
    """In the paper."""
    ARTIFACT = "published beside the paper"
    """In code or data of its authors."""
    MEASURED = "measured here"
    ESTIMATED = "estimated"
    """From operations and bytes, by a formula."""
    ASSUMED = "assumed"
    """Nobody says it."""
    FITTED = "fitted"
    """So that another row of the same paper is met; says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number that a computation takes.

    Attributes:
        name: what it is.
        value: it, with its unit; a range, where the rows' ranges are over it.
        origin: where it comes from.
        why: what is to be known of it beside that.
    """

    name: str
    value: str
    origin: Origin
    why: str = ""


class Verdict(StrEnum):
    """How a row ends."""

    MET = "met"
    BETTER = "better"
    """Further in the direction that is better, where that was wanted of what is printed."""
    NOT_MET = "not met"
    NOTHING_CAN = "nothing can"
    """What is printed contradicts a bound, or other numbers of the same paper."""
    OPEN = "not given"
    """Something that it takes is not published."""
    FITTED = "fitted"
    """A constant was chosen so that it comes out."""
    NOT_PRINTED = "not printed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number.

    Attributes:
        what: it is.
        printed: in the paper; None: it prints none for this.
        ours: as it comes out here.
        unit: of both.
        reach: the least and the greatest that come out over what is left open; None: nothing is.
        within: how far off, as a share of what is printed, still counts as met.
        at_most: whether what is printed is a limit, which ours may not exceed.
        less_is_better: True or False, where going beyond the printed number is no miss; None: it is one.
        fitted: whether a constant was chosen so that this comes out.
        missed: how it ends if it is not met.
        why: it is not.
    """

    what: str
    printed: float | None
    ours: float
    unit: str = ""
    reach: tuple[float, float] | None = None
    within: float = 0.05
    at_most: bool = False
    less_is_better: bool | None = None
    fitted: bool = False
    missed: Verdict = Verdict.NOT_MET
    why: str = ""

    @property
    def gap(self) -> float | None:
        """By how much ours is more than what is printed, as a share of that; None where that means nothing."""
        return self.ours / self.printed - 1 if self.printed and math.isfinite(self.ours) else None

    @property
    def verdict(self) -> Verdict:
        """Whether it is met: by the readings that were chosen before, whatever lies in its reach."""
        if self.printed is None:
            return Verdict.NOT_PRINTED
        if self.fitted:
            return Verdict.FITTED
        off = abs(self.ours - self.printed)
        if off <= self.within * abs(self.printed) or (self.at_most and self.ours <= self.printed):
            return Verdict.MET
        if self.less_is_better is not None and (self.ours < self.printed) == self.less_is_better:
            return Verdict.BETTER
        return self.missed


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one table or figure comes to.

    Attributes:
        rows: its numbers.
        constants: that they take.
        says: what is to be concluded, in paragraphs.
        pictures: SVG, by name.
    """

    rows: tuple[Row, ...]
    constants: tuple[Constant, ...] = ()
    says: tuple[str, ...] = ()
    pictures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A table or a figure that can be reproduced.

    Attributes:
        name: ``PAPER/PLACE``, such as ``swift/table5``.
        title: what it shows.
        find: computes it; told how many processes it may use side by side.
    """

    name: str
    title: str
    find: Callable[[int], Found]

    @property
    def paper(self) -> str:
        """Whose it is."""
        return self.name.partition("/")[0]
