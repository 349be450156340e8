"""How long a step takes a pipeline, for any number of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Pace", "pace_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The time of a step as a function of its micro-batches: the greatest of some straight lines, none of which falls.

    Attributes:
        lines: seconds per micro-batch and seconds besides, of each line; no line is below another one everywhere.
    """

    lines: tuple[tuple[float, float], ...]

    @property
    def steady_s(self) -> float:
        """Seconds that one more micro-batch takes in the end."""
        return max(each for each, _ in self.lines)

    def seconds(self, microbatches: int) -> float:
        """Returns the time of a step of so many micro-batches, at least 1."""
        return max(microbatches * each + besides for each, besides in self.lines)

    def most_within(self, seconds: float, limit: int) -> int:
        """Returns the most micro-batches, up to a limit, of which a step takes no longer; 0 if one already does."""
        if self.seconds(1) > seconds:
            return 0
        most = min((int(min(limit, (seconds - besides) / each)) for each, besides in self.lines if each), default=limit)
        most = max(1, most)
        while most > 1 and self.seconds(most) > seconds:
            most -= 1
        while most < limit and self.seconds(most + 1) <= seconds:
            most += 1
        return most


def pace_of(stage_s: Sequence[float], slowest: int) -> Pace:
    """Returns the pace of a pipeline whose stages take so long for F and B of one micro-batch.

    It is the cost by which templates are chosen, or what bounds a step physically where that is more: stage k runs all
    micro-batches, and the first of them comes through the stages before it, so no step is shorter than
    ``N_b w_k + w_0 + ... + w_{k-1}``. The evaluator says more of one plan; this serves to compare thousands.

    Args:
        stage_s: what the stages take, in seconds.
        slowest: the last of the slowest stages.

    >>> pace_of([1, 2, 1], 1).seconds(4), pace_of([3, 1, 1, 1], 0).seconds(8)
    (9, 24)
    """
    stages, worst = len(stage_s), stage_s[slowest]
    besides = sum(stage_s) + (slowest - stages - 1) * worst + sum(stage_s[slowest:])
    return Pace(lines=tuple(_highest([(worst, besides), *_arrivals(stage_s)])))


def _arrivals(stage_s: Sequence[float]) -> Iterator[tuple[float, float]]:
    before: float = 0
    for time in stage_s:
        yield time, before
        before += time


def _highest(lines: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yields the lines that are not below another one from one micro-batch on."""
    most = -math.inf
    for each, besides in sorted(lines, key=lambda line: (-line[0], -line[1])):
        if each + besides > most:
            yield each, besides
            most = each + besides
