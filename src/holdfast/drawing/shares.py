"""Draws what things consist of: one bar for each, its parts beside one another, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.drawing.axis import TimeAxis
from holdfast.drawing.svg import canvas, element, legend, rect, text, title

__all__ = ["shares_to_svg"]

_LEFT, _TOP, _WIDTH, _RIGHT, _ROW, _GAP = 150, 34, 520, 90, 24, 6
_LEGEND, _LETTER = 20, 7
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#b7791f", "#6b46c1", "#a0aec0", "#4a5568")


def shares_to_svg(things: Mapping[str, Mapping[str, float]], caption: str, unit: str = "") -> str:
    """Returns a picture of bars, one below the other.

    Args:
        things: the parts of each, by name, 0 or more; all have the same ones, at most seven.
        caption: stands above.
        unit: stands behind the numbers.
    """
    totals = {name: sum(parts.values()) for name, parts in things.items()}
    axis = TimeAxis(left=_LEFT, width=_WIDTH, duration=max(totals.values(), default=0.0))
    bottom = _TOP + _ROW * len(things) + _GAP
    names = list(dict.fromkeys(part for parts in things.values() for part in parts))
    colours = dict(zip(names, _COLOURS, strict=False))
    body = [text(_LEGEND, 18, caption), *axis.ticks(_TOP, bottom, unit, stroke="#e2e2e2")]
    for row, (name, parts) in enumerate(things.items()):
        top = _TOP + _GAP + row * _ROW
        body += _row(parts, colours, axis, top, unit)
        body.append(text(_LEFT - 6, top + _ROW - _GAP - 5, name, text_anchor="end"))
        body.append(text(axis.at(totals[name]) + 5, top + _ROW - _GAP - 5, f"{totals[name]:.3g}{unit}"))
    body += legend(_LEGEND, bottom + 24, {name: {"fill": colour} for name, colour in colours.items()}, letter=_LETTER)
    style = element("style", "text { font-family: sans-serif; font-size: 12px }")
    return canvas(_LEFT + _WIDTH + _RIGHT, bottom + 46, style, body)


def _row(parts: Mapping[str, float], colours: Mapping[str, str], axis: TimeAxis, top: int, unit: str) -> Iterator[str]:
    at = 0.0
    for name, value in parts.items():
        told = title(f"{name}: {value:.4g}{unit}")
        yield rect(axis.at(at), top, axis.length(value), _ROW - _GAP, told, fill=colours[name])
        at += value
