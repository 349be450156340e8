"""Draws numbers that change along a run: lines, points and marked places, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.drawing.axis import TimeAxis, ticks
from holdfast.drawing.svg import canvas, element, legend, text, title, upright

__all__ = ["Point", "curves_to_svg"]

Point = tuple[float, float]
"""Where it is along the run, and the number."""

_LEFT, _TOP, _WIDTH, _HEIGHT, _RIGHT, _BOTTOM = 70, 44, 640, 240, 20, 46
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#718096", "#6b46c1", "#b7791f", "#b83280", "#1a202c")


def curves_to_svg(
    curves: Mapping[str, Sequence[Point]],
    caption: str,
    *,
    points: Mapping[str, Sequence[Point]] | None = None,
    marks: Mapping[str, float] | None = None,
    unit: str = "",
) -> str:
    """Returns a picture.

    Args:
        curves: a line through the points of each, by its name.
        caption: stands above.
        points: circles, by the name of what they are; with the curves at most eight.
        marks: upright lines, by what stands above each.
        unit: stands behind the numbers at the left.
    """
    points = points or {}
    everything = [point for row in (*curves.values(), *points.values()) for point in row]
    most = max((value for _, value in everything), default=0.0) or 1.0
    axis = TimeAxis(left=_LEFT, width=_WIDTH, duration=max((at for at, _ in everything), default=0.0))
    bottom = _TOP + _HEIGHT

    def place(point: Point) -> Point:
        return axis.at(point[0]), bottom - point[1] / most * _HEIGHT

    body = [text(_LEFT, 16, caption), *axis.ticks(_TOP, bottom, stroke="#eee"), *_levels(most, bottom, unit)]
    colours = dict(zip((*curves, *points), _COLOURS, strict=False))
    for name, at in (marks or {}).items():
        body.append(upright(axis.at(at), _TOP, bottom, stroke="#222", stroke_dasharray="4 3"))
        body.append(text(axis.at(at), _TOP - 4, name, text_anchor="middle"))
    for name, curve in curves.items():
        line = " ".join(f"{x:.2f},{y:.2f}" for x, y in map(place, curve))
        body.append(element("polyline", title(name), points=line, fill="none", stroke=colours[name], stroke_width="2"))
    for name, row in points.items():
        for x, y in map(place, row):
            body.append(element("circle", title(name), cx=x, cy=y, r=4, fill="none", stroke=colours[name]))
    body += legend(_LEFT, bottom + 24, {name: {"fill": colour} for name, colour in colours.items()}, letter=7)
    style = element("style", "text { font-family: sans-serif; font-size: 12px }")
    return canvas(_LEFT + _WIDTH + _RIGHT, bottom + _BOTTOM, style, body)


def _levels(most: float, bottom: int, unit: str) -> Iterator[str]:
    """Yields a line at every round number, and the number before it."""
    for value in ticks(most):
        y = bottom - value / most * _HEIGHT
        yield element("line", x1=_LEFT, x2=_LEFT + _WIDTH, y1=y, y2=y, stroke="#eee")
        yield text(_LEFT - 6, y + 4, f"{value:.3g}{unit}", text_anchor="end")
