"""The elements of SVG pictures."""

import doctest
import xml.etree.ElementTree as ElementTree

from holdfast.drawing import svg


def test_the_examples_hold():
    assert doctest.testmod(svg).failed == 0


def test_words_and_attributes_are_text_whatever_they_say():
    element = ElementTree.fromstring(svg.text(1, 2, "a <b> & c", class_='"<&>"'))
    assert (element.text, element.get("class")) == ("a <b> & c", '"<&>"')


def test_a_canvas_is_white_and_has_its_parts_in_their_order():
    parts = [svg.rect(1, 2, 3, 4), svg.text(5, 6, "a")]
    root = ElementTree.fromstring(svg.canvas(100, 50, svg.element("style", "text {}"), parts, font_size=9))
    assert {key: root.get(key) for key in ("width", "height", "viewBox", "font-size")} == {
        "width": "100",
        "height": "50",
        "viewBox": "0 0 100 50",
        "font-size": "9",
    }
    style, white, *drawn = root
    assert (style.text, white.get("fill"), white.get("width")) == ("text {}", "white", "100%")
    assert [each.tag.rpartition("}")[2] for each in drawn] == ["rect", "text"]


def test_a_legend_has_its_entries_side_by_side():
    parts = [ElementTree.fromstring(part) for part in svg.legend(10, 8, {"one": {"fill": "#111"}, "two": {}})]
    assert [part.text for part in parts if part.tag == "text"] == ["one", "two"]
    assert [int(part.get("x")) for part in parts] == [10, 26, 62, 78]
    assert parts[0].get("fill") == "#111"
