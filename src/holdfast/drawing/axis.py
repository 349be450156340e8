"""Time to the right: round times, and where times are in a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.drawing.svg import text, upright

__all__ = ["TimeAxis", "ticks"]


def ticks(end: float) -> list[float]:
    """Returns about eight round numbers from 0 to ``end``."""
    if end <= 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(end / 8))
    step = next(unit * factor for factor in (1, 2, 5, 10) if end / (unit * factor) <= 10)
    return [number * step for number in range(int(end / step) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """An axis of time.

    Attributes:
        left: pixels left of its beginning.
        width: its pixels.
        duration: what they stand for; 0 if nothing takes any time.
        begin: the time of its beginning.
    """

    left: int
    width: int
    duration: float
    begin: float = 0.0

    def length(self, duration: float) -> float:
        """Returns how many pixels stand for a duration."""
        return duration * (self.width / (self.duration or 1))

    def at(self, time: float) -> float:
        """Returns the pixels left of a time."""
        return self.left + self.length(time - self.begin)

    def ticks(self, top: int, bottom: int, unit: str = "", *, stroke: str, **label: object) -> Iterator[str]:
        """Yields a line at every round time, counted from the beginning, and below it the time.

        Args:
            top: where the lines begin.
            bottom: where they end.
            unit: written behind each time.
            stroke: the colour of the lines.
            label: attributes of the times.
        """
        for time in ticks(self.duration):
            x = self.at(self.begin + time)
            yield upright(x, top, bottom, class_="tick", stroke=stroke)
            yield text(x, bottom + 12, f"{time:g}{unit}", text_anchor="middle", **label)
