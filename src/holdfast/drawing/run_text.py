"""Draws a run as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from holdfast.drawing.axis import ticks
from holdfast.telemetry.timeline import Mode, Row, RunTimeline

__all__ = ["letter_of", "run_to_text"]

_LETTERS = {
    "kill": "K",
    "hang": "H",
    "stall": "S",
    "slow": "W",
    "leave": "L",
    "join": "J",
    "partition": "P",
    "kill-node": "N",
    "kill-coordinator": "C",
    "death": "D",
}
_SIGNS = {Mode.RECOVERING: "x", Mode.ENTERING: "e", Mode.ARRIVING: "a", Mode.LOST: ".", Mode.ABSENT: " "}
_LEGEND = (
    "# computing  + computing less than half of the time  - waiting  x step given up, recovering",
    "a there, not let in yet  e entering, computes nothing  . lost  (blank) absent",
)
_SLICES = 100


def run_to_text(timeline: RunTimeline, *, slices: int = _SLICES) -> str:
    """Returns one line per worker, one character per slice of time; a letter where a fault strikes.

    A slice shows the rarest mode that fills a quarter of it: a recovery before all, then being let in, then being away.

    Args:
        timeline: of a run that has a duration.
        slices: how many characters wide.
    """
    names = [row.worker for row in timeline.rows]
    margin = max(len(name) for name in [*names, "generation"])
    lines = [("seconds", _ruler(timeline, slices)), ("generation", _generations(timeline, slices))]
    lines += [(row.worker, _strip(row, timeline, slices)) for row in timeline.rows]
    text = [f"{name:>{margin}}  {strip}".rstrip() for name, strip in lines]
    kinds = dict.fromkeys(mark.kind for mark in timeline.marks)
    struck = "  ".join(f"{letter_of(kind)} {kind}" for kind in kinds)
    legend = [*_LEGEND, struck] if struck else _LEGEND
    return "\n".join([*text, *(" " * (margin + 2) + line for line in legend)])


def letter_of(kind: str) -> str:
    """Returns what stands for a fault of this kind."""
    return _LETTERS.get(kind, "?")


def _slice_of(time: float, timeline: RunTimeline, slices: int) -> int:
    return int(min(slices - 1, time * slices / timeline.duration)) if timeline.duration else 0


def _ruler(timeline: RunTimeline, slices: int) -> str:
    times = ticks(timeline.duration)
    return _labels(((time, f"|{time:g}") for time in times), timeline, slices)


def _generations(timeline: RunTimeline, slices: int) -> str:
    return _labels(((each.time, f"|{each.number}") for each in timeline.generations), timeline, slices)


def _labels(labels: Iterable[tuple[float, str]], timeline: RunTimeline, slices: int) -> str:
    """Writes labels where they belong, as far as the one before leaves room."""
    line = ""
    for time, label in labels:
        place = _slice_of(time, timeline, slices)
        if place >= len(line):
            line = line.ljust(place) + label
    return line


def _strip(row: Row, timeline: RunTimeline, slices: int) -> str:
    width = timeline.duration / slices
    busy = _filled(row.busy, width, slices)
    modes = {mode: _filled(((s.start, s.end) for s in row.stretches if s.mode is mode), width, slices) for mode in Mode}
    strip = [_sign({mode: filled[at] for mode, filled in modes.items()}, busy[at]) for at in range(slices)]
    for mark in reversed(timeline.marks):
        if mark.worker == row.worker:
            strip[_slice_of(mark.time, timeline, slices)] = letter_of(mark.kind)
    return "".join(strip)


def _filled(intervals: Iterable[tuple[float, float]], width: float, slices: int) -> list[float]:
    """Which part of each slice is covered, from 0 to 1."""
    filled = [0.0] * slices
    for start, end in intervals:
        for at in range(int(start / width), min(slices, math.ceil(end / width))):
            filled[at] += (min(end, (at + 1) * width) - max(start, at * width)) / width
    return filled


def _sign(filled: dict[Mode, float], busy: float) -> str:
    sign = next((sign for mode, sign in _SIGNS.items() if filled[mode] >= 0.25), None)
    if sign is not None:
        return sign
    return "#" if busy >= 0.5 else "+" if busy > 0 else "-"
