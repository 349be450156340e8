"""Draws a run as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from holdfast.drawing.axis import TimeAxis
from holdfast.drawing.run_text import letter_of
from holdfast.drawing.svg import canvas, element, legend, rect, text, title, upright
from holdfast.telemetry.timeline import BOUNDARY, Mode, Row, RunTimeline, TimelineMark

__all__ = ["LOST", "LOST_HEIGHT", "run_to_svg"]

_WIDTH, _LEFT, _RIGHT, _TOP, _PITCH, _HEIGHT, _AXES = 1200, 68, 20, 76, 24, 18, 46
LOST, LOST_HEIGHT = "#c00000", 6
"""The bar of a worker that is lost: seen at once, and no part of what is computed."""
_FILLS = {
    Mode.MEMBER: "#d6e4f0",
    Mode.RECOVERING: "#f4a582",
    Mode.ENTERING: "#5aae61",
    Mode.ARRIVING: "#e9c716",
    Mode.LOST: LOST,
    Mode.ABSENT: "#ffffff",
}
_BUSY = "#2b6cb0"
_LEGEND = {
    "computing": _BUSY,
    "waiting": _FILLS[Mode.MEMBER],
    "step given up, recovering": _FILLS[Mode.RECOVERING],
    "entering": _FILLS[Mode.ENTERING],
    "there, not let in yet": _FILLS[Mode.ARRIVING],
    "lost": _FILLS[Mode.LOST],
    "absent": _FILLS[Mode.ABSENT],
}
_STYLE = """\
text { font: 12px sans-serif; fill: #222 } .small { font-size: 10px }
.letter { font-weight: bold; text-anchor: middle; fill: #fff }
.generation line { stroke: #222 } .generation.boundary line { stroke: #888; stroke-dasharray: 3 3 }"""


def run_to_svg(timeline: RunTimeline, heading: str) -> str:
    """Returns a picture: a row per worker, time to the right, generations as vertical lines, a disc for each fault;
    below it the seconds, and how many steps were done when.

    Args:
        timeline: of a run.
        heading: written above it, as it is.
    """
    axis = TimeAxis(left=_LEFT, width=_WIDTH - _LEFT - _RIGHT, duration=timeline.duration)
    bottom = _TOP + _PITCH * len(timeline.rows)
    places = {row.worker: _TOP + _PITCH * index for index, row in enumerate(timeline.rows)}
    parts = [
        text(_LEFT, 18, heading),
        *legend(_LEFT, 30, {words: {"fill": fill, "stroke": "#888"} for words, fill in _LEGEND.items()}, letter=7),
        *(_row(row, places[row.worker], axis) for row in timeline.rows),
        *_generations(timeline, axis, bottom),
        *(_mark(mark, places[mark.worker], axis) for mark in timeline.marks),
        text(8, bottom + 16, "seconds", class_="small"),
        *axis.ticks(bottom, bottom + 4, " s", stroke="#222", class_="small"),
        *_steps(timeline, axis, bottom),
    ]
    return canvas(_WIDTH, bottom + _AXES, element("style", _STYLE), parts)


def _row(row: Row, y: int, axis: TimeAxis) -> str:
    bars = [text(8, y + 13, row.worker)]
    for stretch in row.stretches:
        if stretch.mode is not Mode.ABSENT:
            bars.append(_bar(stretch.mode, stretch.start, stretch.end, y, _FILLS[stretch.mode], axis))
    for start, end in _merged(row.busy, axis.duration / axis.width / 2):
        bars.append(_bar("busy", start, end, y, _BUSY, axis))
    return element("g", "\n".join(bars), class_="row")


def _bar(kind: str, start: float, end: float, y: int, fill: str, axis: TimeAxis) -> str:
    height = LOST_HEIGHT if kind == Mode.LOST else _HEIGHT
    top = y + (_HEIGHT - height) // 2
    return rect(axis.at(start), top, max(0.3, axis.length(end - start)), height, class_=kind, fill=fill)


def _merged(intervals: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Joins intervals in order that lie no further apart than ``gap``, so that long runs stay drawable."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _generations(timeline: RunTimeline, axis: TimeAxis, bottom: int) -> Iterator[str]:
    """A line each; its number stands a line higher where it would touch the one before, or nowhere."""
    free = {_TOP - 6: 0.0, _TOP - 17: 0.0}
    for each in timeline.generations:
        x = axis.at(each.time)
        line = upright(x, _TOP - 4, bottom)
        y = next((y for y, room in free.items() if x >= room), None)
        if y is not None:
            free[y] = x + 14
            line += text(x, y, str(each.number), class_="small", text_anchor="middle")
        yield element("g", line, class_="generation boundary" if each.strategy == BOUNDARY else "generation")


def _mark(mark: TimelineMark, y: int, axis: TimeAxis) -> str:
    x, middle = axis.at(mark.time), y + _HEIGHT // 2
    about = title(f"{mark.time:.3f} s: {mark.kind} {mark.text}")
    disc = element("circle", cx=x, cy=middle, r=8, fill="#111", stroke="#fff")
    return element("g", about + disc + text(x, middle + 4, letter_of(mark.kind), class_="small letter"), class_="mark")


def _steps(timeline: RunTimeline, axis: TimeAxis, bottom: int) -> Iterator[str]:
    """How many steps were done: a line through all rows where there is room for the number, else a short one."""
    if not timeline.commits:
        return
    yield text(8, bottom + 36, "steps done", class_="small")
    places = {step: axis.at(time) for step, time in timeline.commits}
    signs, labels = _spaced(places, apart=4.0), _spaced(places, apart=28.0)
    for step in sorted(signs | labels):
        top = _TOP if step in labels else bottom + 22
        yield upright(places[step], top, bottom + 26, class_="step", stroke="#222", stroke_width="0.4")
    for step, x in labels.items():
        yield text(x, bottom + 36, str(step + 1), class_="small step", text_anchor="middle")


def _spaced(places: dict[int, float], apart: float) -> dict[int, float]:
    """Returns where every so many steps were done, so many that signs have room; of the last step if of no other."""
    for every in (factor * 10**power for power in range(9) for factor in (1, 2, 5)):
        found = {step: x for step, x in places.items() if (step + 1) % every == 0}
        if all(b - a >= apart for a, b in pairwise(found.values())):
            break
    last = max(places)
    return found or {last: places[last]}
