"""Draws a run's timeline: as text for a terminal, as SVG for a browser."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from xml.sax.saxutils import escape

from holdfast.core.pictures import ticks
from holdfast.telemetry.timeline import BOUNDARY, Mark, Mode, Row, RunTimeline

__all__ = ["draw_svg", "draw_text"]

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
_SIGNS = {Mode.RECOVERING: "x", Mode.ENTERING: "e", Mode.ARRIVING: "a", Mode.ABSENT: " "}
_LEGEND = (
    "# computing  + computing less than half of the time  - waiting  x step given up, recovering",
    "a there, not let in yet  e entering, computes nothing  (blank) absent",
)
_SLICES = 100


def draw_text(timeline: RunTimeline, *, slices: int = _SLICES) -> str:
    """Returns one line per worker, one character per slice of time; a letter where a fault strikes.

    A slice shows the rarest mode that fills a quarter of it: a recovery before all, then being let in, then absence.

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
    struck = "  ".join(f"{_letter(kind)} {kind}" for kind in kinds)
    legend = [*_LEGEND, struck] if struck else _LEGEND
    return "\n".join([*text, *(" " * (margin + 2) + line for line in legend)])


def _letter(kind: str) -> str:
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
            strip[_slice_of(mark.time, timeline, slices)] = _letter(mark.kind)
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


_WIDTH, _LEFT, _RIGHT, _TOP, _PITCH, _HEIGHT, _AXES = 1200, 68, 20, 76, 24, 18, 46
_FILLS = {
    Mode.MEMBER: "#d6e4f0",
    Mode.RECOVERING: "#d6604d",
    Mode.ENTERING: "#5aae61",
    Mode.ARRIVING: "#e9c716",
    Mode.ABSENT: "#ffffff",
}
_BUSY = "#2b6cb0"
_STYLE = """\
text { font: 12px sans-serif; fill: #222 } .small { font-size: 10px }
.letter { font-weight: bold; text-anchor: middle; fill: #fff }
.generation line { stroke: #222 } .generation.boundary line { stroke: #888; stroke-dasharray: 3 3 }"""


def draw_svg(timeline: RunTimeline, title: str) -> str:
    """Returns a picture: a row per worker, time to the right, generations as vertical lines, a disc for each fault;
    below it the seconds, and how many steps were done when.

    Args:
        timeline: of a run.
        title: written above it, as it is.
    """
    bottom = _TOP + _PITCH * len(timeline.rows)
    places = {row.worker: _TOP + _PITCH * index for index, row in enumerate(timeline.rows)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + _AXES}" width="{_WIDTH}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{bottom + _AXES}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18">{escape(title)}</text>',
        *_svg_legend(),
        *(line for row in timeline.rows for line in _svg_row(row, places[row.worker], timeline)),
        *_svg_generations(timeline, bottom),
        *(_svg_mark(mark, places[mark.worker], timeline) for mark in timeline.marks),
        *_svg_axis(timeline, bottom),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(time: float, timeline: RunTimeline) -> float:
    share = time / timeline.duration if timeline.duration else 0.0
    return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)


def _svg_legend() -> Iterable[str]:
    entries = [("computing", _BUSY), ("waiting", _FILLS[Mode.MEMBER])]
    entries += [("step given up, recovering", _FILLS[Mode.RECOVERING]), ("entering", _FILLS[Mode.ENTERING])]
    entries += [("there, not let in yet", _FILLS[Mode.ARRIVING]), ("absent", _FILLS[Mode.ABSENT])]
    x = _LEFT
    for label, fill in entries:
        yield f'<rect x="{x}" y="30" width="12" height="12" fill="{fill}" stroke="#888"/>'
        yield f'<text x="{x + 17}" y="40">{label}</text>'
        x += 42 + round(6.2 * len(label))


def _svg_row(row: Row, y: int, timeline: RunTimeline) -> Iterable[str]:
    yield f'<g class="row"><text x="8" y="{y + 13}">{escape(row.worker)}</text>'
    for stretch in row.stretches:
        if stretch.mode is not Mode.ABSENT:
            yield _bar(stretch.mode, stretch.start, stretch.end, y, _FILLS[stretch.mode], timeline)
    pixel = timeline.duration / (_WIDTH - _LEFT - _RIGHT)
    for start, end in _merged(row.busy, pixel / 2):
        yield _bar("busy", start, end, y, _BUSY, timeline)
    yield "</g>"


def _bar(kind: str, start: float, end: float, y: int, fill: str, timeline: RunTimeline) -> str:
    x = _x(start, timeline)
    width = max(0.3, round(_x(end, timeline) - x, 1))
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{_HEIGHT}" fill="{fill}"/>'


def _merged(intervals: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Joins intervals in order that lie no further apart than ``gap``, so that long runs stay drawable."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _svg_generations(timeline: RunTimeline, bottom: int) -> Iterable[str]:
    """A line each; its number stands a line higher where it would touch the one before, or nowhere."""
    free = {_TOP - 6: 0.0, _TOP - 17: 0.0}
    for each in timeline.generations:
        x = _x(each.time, timeline)
        kind = " boundary" if each.strategy == BOUNDARY else ""
        yield f'<g class="generation{kind}"><line x1="{x}" x2="{x}" y1="{_TOP - 4}" y2="{bottom}"/>'
        y = next((y for y, room in free.items() if x >= room), None)
        if y is not None:
            free[y] = x + 14
            yield f'<text class="small" x="{x}" y="{y}" text-anchor="middle">{each.number}</text>'
        yield "</g>"


def _svg_mark(mark: Mark, y: int, timeline: RunTimeline) -> str:
    x, middle = _x(mark.time, timeline), y + _HEIGHT // 2
    about = escape(f"{mark.time:.3f} s: {mark.kind} {mark.text}")
    disc = f'<circle cx="{x}" cy="{middle}" r="8" fill="#111" stroke="#fff"/>'
    letter = f'<text class="small letter" x="{x}" y="{middle + 4}">{_letter(mark.kind)}</text>'
    return f'<g class="mark"><title>{about}</title>{disc}{letter}</g>'


def _svg_axis(timeline: RunTimeline, bottom: int) -> Iterable[str]:
    """Seconds, and below them how many steps were done."""
    yield f'<text class="small" x="8" y="{bottom + 16}">seconds</text>'
    for time in ticks(timeline.duration):
        x = _x(time, timeline)
        yield f'<line x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}" stroke="#222"/>'
        yield f'<text class="small" x="{x}" y="{bottom + 16}" text-anchor="middle">{time:g} s</text>'
    yield from _svg_steps(timeline, bottom)


def _svg_steps(timeline: RunTimeline, bottom: int) -> Iterable[str]:
    """How many steps were done: a line through all rows where there is room for the number, else a short one."""
    if not timeline.commits:
        return
    yield f'<text class="small" x="8" y="{bottom + 36}">steps done</text>'
    signs, labels = _spaced(timeline, apart=4.0), _spaced(timeline, apart=28.0)
    for step in sorted(signs | labels):
        x, top = labels.get(step) or signs[step], _TOP if step in labels else bottom + 22
        yield f'<line class="step" x1="{x}" x2="{x}" y1="{top}" y2="{bottom + 26}" stroke="#222" stroke-width="0.4"/>'
    for step, x in labels.items():
        yield f'<text class="small step" x="{x}" y="{bottom + 36}" text-anchor="middle">{step + 1}</text>'


def _spaced(timeline: RunTimeline, apart: float) -> dict[int, float]:
    """Returns where every so many steps were done, so many that signs have room; of the last step if of no other."""
    places = {step: _x(time, timeline) for step, time in timeline.commits}
    for every in (factor * 10**power for power in range(9) for factor in (1, 2, 5)):
        found = {step: x for step, x in places.items() if (step + 1) % every == 0}
        if all(b - a >= apart for a, b in pairwise(found.values())):
            break
    last = max(places)
    return found or {last: places[last]}
