"""In which order the gradients of a step's micro-batches are added: one that does not depend on who has which.

The micro-batches are cut into *chunks* of neighbours. Within one they are added one after another; chunks are added
along a binary tree, neighbours first. What a worker holds are *parts*, intervals of numbers: of a chunk the beginning
or all of it, whole subtrees, or single micro-batches that came before those which they are added onto.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.core.ids import Interval
from holdfast.errors import InternalError

__all__ = ["SumOrder", "better_chunks", "default_chunks", "most_held"]

T = TypeVar("T")
_MOST_CHUNKS = 8
"""More have more workers send one part each, and each of few workers hold more."""


@dataclass(frozen=True, slots=True)
class SumOrder:
    """The order of the sums of a step.

    Attributes:
        num_microbatches: of the step.
        chunk: how many are added one after another; divides them.

    Example:
        >>> order = SumOrder.of(24)
        >>> order.chunk, order.partner((0, 6), {(6, 12)}), order.partner((3, 5), {(5, 6)}), order.partner((0, 1), ())
        (3, (6, 12), (5, 6), None)
    """

    num_microbatches: int
    chunk: int

    @classmethod
    def of(cls, num_microbatches: int, chunks: int | None = None) -> SumOrder:
        """Returns the order for so many: it does not depend on who the workers are, nor on how many.

        Args:
            num_microbatches: of the step.
            chunks: in how many they are cut, a number that divides them; None: the largest power of two that does, up
                to 8, with which 1, 2, 4 or 8 workers hold one part each in the end.
        """
        return cls(num_microbatches, num_microbatches // (chunks or default_chunks(num_microbatches)))

    def add(
        self,
        parts: dict[Interval, T],
        number: int,
        *,
        begin: Callable[[], T],
        onto: Callable[[T], T],
        join: Callable[[T, T], T],
    ) -> None:
        """Adds a micro-batch to the parts that a worker holds.

        Args:
            parts: which are changed.
            number: of the micro-batch, which is in none of them.
            begin: makes a part of it alone.
            onto: adds it to a part.
            join: adds two parts.
        """
        first = number - number % self.chunk
        if number > first and (first, number) in parts:
            part, value = (first, number + 1), onto(parts.pop((first, number)))
        else:
            part, value = (number, number + 1), begin()
        while (other := self.partner(part, parts)) is not None:
            value = join(value, parts.pop(other))
            part = (min(part[0], other[0]), max(part[1], other[1]))
        parts[part] = value

    def partner(self, part: Interval, parts: Collection[Interval]) -> Interval | None:
        """Returns which of some parts is to be added to one; None if none of them is, yet."""
        start, stop = part
        wanted: Interval | None
        if start % self.chunk:
            wanted = (start - start % self.chunk, start)
        elif stop % self.chunk:
            wanted = (stop, stop + 1)
        else:
            wanted = self._sibling(part)
        return wanted if wanted in parts else None

    def _sibling(self, part: Interval) -> Interval | None:
        """The other half of the subtree of which a part of whole chunks is one half."""
        start, stop = 0, self.num_microbatches
        while (start, stop) != part:
            middle = self._middle(start, stop)
            if part == (start, middle):
                return (middle, stop)
            if part == (middle, stop):
                return (start, middle)
            start, stop = (start, middle) if part[1] <= middle else (middle, stop)
        return None

    def _middle(self, start: int, stop: int) -> int:
        """Where a subtree of several chunks is cut: its left half is a whole one."""
        chunks = (stop - start) // self.chunk
        return start + self.chunk * (1 << (chunks - 1).bit_length() - 1)

    def total(self, parts: Mapping[Interval, T], absent: Container[int], add: Callable[[T, T], T]) -> T | None:
        """Returns the sum of all micro-batches.

        Args:
            parts: of all workers: each micro-batch that is not absent is in one of them.
            absent: what adds nothing.
            add: two of them, the earlier one first.

        Returns:
            It; None if all are absent.
        """
        return self._total(0, self.num_microbatches, parts, absent, add)

    def _total(
        self, start: int, stop: int, parts: Mapping[Interval, T], absent: Container[int], add: Callable[[T, T], T]
    ) -> T | None:
        if (start, stop) in parts:
            return parts[start, stop]
        if stop - start == self.chunk:
            return self._of_chunk(start, parts, absent, add)
        middle = self._middle(start, stop)
        left, right = (self._total(*half, parts, absent, add) for half in ((start, middle), (middle, stop)))
        return add(left, right) if left is not None and right is not None else left if right is None else right

    def _of_chunk(
        self, start: int, parts: Mapping[Interval, T], absent: Container[int], add: Callable[[T, T], T]
    ) -> T | None:
        ends = {begin: end for begin, end in parts if start <= begin < start + self.chunk}
        at, total = start, None
        while at < start + self.chunk:
            if at not in ends and at in absent:
                at += 1
                continue
            if at not in ends:
                raise InternalError(f"the sum of micro-batches {start} and on: no part of it begins with {at}")
            part = parts[at, ends[at]]
            total, at = part if total is None else add(total, part), ends[at]
        return total

    def held(self, numbers: Iterable[int]) -> tuple[int, int]:
        """Returns how many parts a worker holds that adds these micro-batches in their order: at most, and at last."""
        parts: dict[Interval, None] = {}
        counts = [0]

        def count(_: None = None) -> None:
            counts.append(len(parts) + 1)

        for number in sorted(numbers):
            self.add(parts, number, begin=count, onto=count, join=lambda one, other: None)
        return max(counts), len(parts)


def default_chunks(num_microbatches: int) -> int:
    """Returns in how many chunks micro-batches are cut where nobody says it."""
    return min(num_microbatches & -num_microbatches, _MOST_CHUNKS)


def most_held(counts: Sequence[int], lanes: Sequence[int] = (), chunks: int | None = None) -> tuple[int, int]:
    """Returns how many parts any worker holds while nothing has failed: at most, and at last.

    Args:
        counts: how many micro-batches pipeline 0, 1, ... has.
        lanes: how many workers of each take them by turns, at most; one, where there are none.
        chunks: in how many chunks they are cut; None: see `SumOrder.of`.
    """
    order, first = SumOrder.of(sum(counts), chunks), 0
    found = []
    for count, width in zip(counts, lanes or [1] * len(counts), strict=True):
        found += [order.held(range(first + lane, first + count, width)) for lane in range(width)]
        first += count
    most, last = zip(*found, strict=True)
    return max(most), max(last)


def better_chunks(counts: Sequence[int], lanes: Sequence[int] = ()) -> tuple[int, int, int] | None:
    """Returns in how many chunks micro-batches are best cut for these workers; None: as where nobody says it.

    That is where they hold fewest parts at last, and of such numbers where they hold fewest at any time.

    Returns:
        How many chunks; how many parts a worker holds at last, as it is and then.
    """
    _, usual = most_held(counts, lanes)
    if usual == 1:
        return None
    total = sum(counts)
    found = []
    for chunks in (each for each in range(1, total + 1) if total % each == 0):
        most, last = most_held(counts, lanes, chunks)
        found.append((last, most, chunks))
    last, _, chunks = min(found)
    return (chunks, usual, last) if last < usual else None
