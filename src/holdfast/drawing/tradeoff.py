"""Draws what time costs in bytes: a curve per way to trade one for the other, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.drawing.axis import TimeAxis, ticks
from holdfast.drawing.svg import canvas, element, legend, text, title

__all__ = ["Point", "tradeoff_to_svg"]

Point = tuple[float, float]
"""Seconds and bytes."""

_LEFT, _TOP, _WIDTH, _HEIGHT, _RIGHT, _BOTTOM = 90, 44, 620, 260, 20, 40
_COLOURS = ("#2b6cb0", "#c05621", "#718096", "#2f855a")


def tradeoff_to_svg(curves: Mapping[str, Sequence[Point]], chosen: Point, caption: str) -> str:
    """Returns a picture: seconds to the right, bytes up, a curve per name through its points, the last one at the left.

    Args:
        curves: points of each curve, by its name; at most four curves.
        chosen: is marked with a circle.
        caption: stands above.
    """
    points = [chosen, *(point for curve in curves.values() for point in curve)]
    most = max(size for _, size in points) or 1.0
    axis = TimeAxis(left=_LEFT, width=_WIDTH, duration=max(time for time, _ in points))
    bottom = _TOP + _HEIGHT

    def place(point: Point) -> Point:
        return axis.at(point[0]), bottom - point[1] / most * _HEIGHT

    body = [text(_LEFT, 18, caption), *axis.ticks(_TOP, bottom, " s", stroke="#eee"), *_levels(most, bottom)]
    for colour, (name, curve) in zip(_COLOURS, curves.items(), strict=False):
        line = " ".join(f"{x:.2f},{y:.2f}" for x, y in map(place, curve))
        body.append(element("polyline", title(name), points=line, fill="none", stroke=colour, stroke_width="2"))
    x, y = place(chosen)
    about = title(f"{chosen[0]:.6g} s, {chosen[1]:.6g} bytes")
    body.append(element("circle", about, cx=x, cy=y, r=5, fill="none", stroke="#222", stroke_width="2"))
    keys = {name: {"fill": colour} for colour, name in zip(_COLOURS, curves, strict=False)}
    body += legend(_LEFT, bottom + 22, keys, letter=7)
    style = element("style", "text { font-family: sans-serif; font-size: 12px }")
    return canvas(_LEFT + _WIDTH + _RIGHT, bottom + _BOTTOM, style, body)


def _levels(most: float, bottom: int) -> Iterator[str]:
    """Yields a line at every round number of bytes, and the number before it."""
    for size in ticks(most):
        y = bottom - size / most * _HEIGHT
        yield element("line", x1=_LEFT, x2=_LEFT + _WIDTH, y1=y, y2=y, stroke="#eee")
        yield text(_LEFT - 6, y + 4, f"{size:.3g} B", text_anchor="end")
