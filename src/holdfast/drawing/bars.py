"""Draws numbers as bars, one below the other, with what is to be said of each behind it, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.drawing.axis import TimeAxis
from holdfast.drawing.svg import canvas, element, legend, rect, text, title

__all__ = ["Bar", "bars_to_svg"]

_LEFT, _TOP, _WIDTH, _RIGHT, _ROW, _GAP = 190, 34, 420, 130, 18, 4
_LEGEND = 20
_LETTER = 7
_COLOURS = ("#a0aec0", "#4a5568", "#b7791f", "#2b6cb0", "#c05621", "#6b46c1", "#2f855a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One number.

    Attributes:
        name: stands before it.
        value: 0 or more.
        group: bars of one have one colour; at most seven groups.
        told: stands behind it.
    """

    name: str
    value: float
    group: str
    told: str = ""


def bars_to_svg(bars: Sequence[Bar], caption: str, unit: str = "", *, groups: Sequence[str] = ()) -> str:
    """Returns a picture of bars.

    Args:
        bars: from top to bottom.
        caption: stands above.
        unit: stands behind the numbers of the axis.
        groups: all that there may be, so that they have the same colours in several pictures; empty: those of the bars.
    """
    axis = TimeAxis(left=_LEFT, width=_WIDTH, duration=max((bar.value for bar in bars), default=0.0))
    bottom = _TOP + _ROW * len(bars) + _GAP
    present = list(dict.fromkeys(bar.group for bar in bars))
    colours = dict(zip(groups or present, _COLOURS, strict=False))
    body = [text(_LEGEND, 18, caption), *axis.ticks(_TOP, bottom, unit, stroke="#e2e2e2")]
    for row, bar in enumerate(bars):
        body += _row(bar, axis, _TOP + _GAP + row * _ROW, colours[bar.group])
    body += legend(_LEGEND, bottom + 24, {name: {"fill": colours[name]} for name in present}, letter=_LETTER)
    style = element("style", "text { font-family: sans-serif; font-size: 12px }")
    width = max(_LEFT + _WIDTH + _RIGHT, _LEGEND + _LETTER * len(caption))
    return canvas(width, bottom + 46, style, body)


def _row(bar: Bar, axis: TimeAxis, top: int, colour: str) -> Iterator[str]:
    base = top + _ROW - _GAP - 3
    yield text(_LEFT - 6, base, bar.name, text_anchor="end")
    yield rect(_LEFT, top, axis.length(bar.value), _ROW - _GAP, title(f"{bar.name}: {bar.value:.6g}"), fill=colour)
    yield text(axis.at(bar.value) + 5, base, bar.told)
