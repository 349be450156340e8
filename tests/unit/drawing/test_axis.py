"""Where times are in a picture."""

import xml.etree.ElementTree as ElementTree

import pytest

from holdfast.drawing.axis import TimeAxis, ticks


@pytest.mark.parametrize(
    ("end", "found"), [(0, [0]), (8, [0, 1, 2, 3, 4, 5, 6, 7, 8]), (33, [0, 5, 10, 15, 20, 25, 30]), (0.02, [0, 0.002])]
)
def test_ticks_are_round_and_few(end, found):
    assert ticks(end)[: len(found)] == pytest.approx(found)
    assert len(ticks(end)) <= 11


AXIS = TimeAxis(left=50, width=400, duration=8.0, begin=2.0)


def test_times_are_in_proportion_from_the_beginning_on():
    assert [AXIS.at(time) for time in (2, 4, 10)] == [50, 150, 450]
    assert AXIS.length(3) == 150


def test_what_takes_no_time_is_at_the_beginning():
    assert TimeAxis(left=50, width=400, duration=0.0).at(0.0) == 50


def test_ticks_count_from_the_beginning_and_stand_below_their_lines():
    parts = [ElementTree.fromstring(part) for part in AXIS.ticks(30, 90, " s", stroke="#222", class_="small")]
    lines, labels = parts[::2], parts[1::2]
    places = [float(line.get("x1")) for line in lines]
    assert places == [float(label.get("x")) for label in labels] == [50 + 50 * number for number in range(9)]
    assert {(line.get("class"), line.get("y1"), line.get("y2")) for line in lines} == {("tick", "30", "90")}
    assert [label.text for label in labels] == [f"{number} s" for number in range(9)]
    assert {(label.get("class"), label.get("y")) for label in labels} == {("small", "102")}
