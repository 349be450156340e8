"""Curves of time against bytes."""

import xml.etree.ElementTree as ElementTree

from holdfast.drawing.tradeoff import tradeoff_to_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_curves_go_through_their_points():
    picture = ElementTree.fromstring(tradeoff_to_svg({"best": [(4.0, 0), (2.0, 50), (1.0, 100)]}, (2.0, 50), "told"))
    line = picture.find(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert points == [(710, 304), (400, 174), (245, 44)]
    assert line.find(f"{SVG}title").text == "best"
    circle = picture.find(f"{SVG}circle")
    assert (float(circle.get("cx")), float(circle.get("cy"))) == (400, 174)
    assert {"told", "best"} <= {element.text for element in picture.iter(f"{SVG}text")}


def test_nothing_that_takes_anything_can_be_drawn():
    ElementTree.fromstring(tradeoff_to_svg({"best": [(0.0, 0.0)]}, (0.0, 0.0), ""))
