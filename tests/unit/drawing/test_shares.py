"""What things consist of, as parts of bars."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from holdfast.drawing.shares import shares_to_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_parts_are_as_long_as_their_numbers_and_lie_side_by_side():
    picture = ElementTree.fromstring(
        shares_to_svg({"a": {"x": 1.0, "y": 3.0}, "b": {"x": 2.0, "y": 0.0}}, "told", " s")
    )
    titled = [each for each in picture.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    placed = [(float(each.get("x")), float(each.get("width")), each.findtext(f"{SVG}title")) for each in titled]
    assert placed == [(150, 130, "x: 1 s"), (280, 390, "y: 3 s"), (150, 260, "x: 2 s"), (410, 0, "y: 0 s")]
    assert len({each.get("fill") for each in titled}) == 2
    assert {"told", "a", "b", "4 s", "2 s", "x", "y"} <= {each.text for each in picture.iter(f"{SVG}text")}


def test_nothing_can_be_drawn():
    ElementTree.fromstring(shares_to_svg({}, ""))
    ElementTree.fromstring(shares_to_svg({"a": {"x": 0.0}}, ""))
