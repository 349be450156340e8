"""Numbers as bars, and numbers along a run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from holdfast.drawing.bars import Bar, bars_to_svg
from holdfast.drawing.curves import curves_to_svg

SVG = "{http://www.w3.org/2000/svg}"


def words(picture):
    return [each.text for each in picture.iter(f"{SVG}text")]


def test_bars_are_as_long_as_their_numbers_and_told():
    bars = [Bar(name="a", value=2.0, group="x", told="+1 %"), Bar(name="b", value=1.0, group="y")]
    picture = ElementTree.fromstring(bars_to_svg(bars, "told", " s"))
    titled = [each for each in picture.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    assert [float(each.get("width")) for each in titled] == [420, 210]
    assert len({each.get("fill") for each in titled}) == 2
    assert {"told", "a", "b", "+1 %", "x", "y", "2 s"} <= set(words(picture))


def test_a_long_caption_is_shown_whole():
    picture = ElementTree.fromstring(bars_to_svg([Bar(name="a", value=1.0, group="x")], "a" * 130))
    caption = next(each for each in picture.iter(f"{SVG}text") if each.text == "a" * 130)
    assert float(picture.get("width")) >= float(caption.get("x")) + 7 * 130


def test_no_bars_and_bars_of_nothing_can_be_drawn():
    ElementTree.fromstring(bars_to_svg([], ""))
    ElementTree.fromstring(bars_to_svg([Bar(name="a", value=0.0, group="x")], ""))


def test_curves_points_and_marks_lie_where_they_are():
    text = curves_to_svg(
        {"line": [(0.0, 0.0), (4.0, 2.0)]}, "told", points={"seen": [(2.0, 1.0)]}, marks={"here": 1.0}, unit=" s"
    )
    picture = ElementTree.fromstring(text)
    line = [tuple(map(float, point.split(","))) for point in picture.find(f"{SVG}polyline").get("points").split()]
    assert line == [(70, 284), (710, 44)]
    circle = picture.find(f"{SVG}circle")
    assert (float(circle.get("cx")), float(circle.get("cy"))) == (390, 164)
    (mark,) = (each for each in picture.iter(f"{SVG}line") if each.get("stroke-dasharray"))
    assert float(mark.get("x1")) == 230
    assert {"told", "line", "seen", "here", "1 s"} <= set(words(picture))


def test_curves_of_nothing_can_be_drawn():
    ElementTree.fromstring(curves_to_svg({"line": []}, ""))
