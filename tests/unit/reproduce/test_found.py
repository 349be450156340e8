"""How a row ends, and how the report says it."""

from __future__ import annotations

import json
import math

import pytest

from holdfast.errors import ConfigError
from holdfast.reproduce.found import Constant, Found, Item, Origin, Row, Verdict
from holdfast.reproduce.registry import ELSEWHERE, ITEMS, wanted
from holdfast.reproduce.telling import section, to_json, to_markdown, to_page


@pytest.mark.parametrize(
    ("printed", "ours", "more", "verdict"),
    [
        (100.0, 104.9, {}, Verdict.MET),
        (100.0, 95.1, {}, Verdict.MET),
        (100.0, 106.0, {}, Verdict.NOT_MET),
        (100.0, 106.0, {"less_is_better": False}, Verdict.BETTER),
        (100.0, 106.0, {"less_is_better": True}, Verdict.NOT_MET),
        (100.0, 50.0, {"less_is_better": True}, Verdict.BETTER),
        (100.0, 101.0, {"within": 0.0}, Verdict.NOT_MET),
        (100.0, 100.0, {"within": 0.0}, Verdict.MET),
        (100.0, 50.0, {"at_most": True, "within": 0.0}, Verdict.MET),
        (100.0, 101.0, {"at_most": True, "within": 0.0}, Verdict.NOT_MET),
        (100.0, 106.0, {"reach": (90.0, 106.0)}, Verdict.NOT_MET),
        (100.0, 100.0, {"fitted": True}, Verdict.FITTED),
        (100.0, 10.0, {"missed": Verdict.NOTHING_CAN}, Verdict.NOTHING_CAN),
        (100.0, 99.0, {"missed": Verdict.NOTHING_CAN}, Verdict.MET),
        (None, 1.0, {}, Verdict.NOT_PRINTED),
        (0.0, 0.0, {}, Verdict.MET),
        (0.0, 0.1, {}, Verdict.NOT_MET),
        (13.9, math.inf, {}, Verdict.NOT_MET),
    ],
)
def test_a_row_ends_by_what_is_printed_and_was_chosen_before(printed, ours, more, verdict):
    assert Row(what="it", printed=printed, ours=ours, **more).verdict is verdict


def test_a_gap_is_a_share_of_what_is_printed():
    assert Row(what="it", printed=4.0, ours=5.0).gap == 0.25
    assert [
        Row(what="it", printed=printed, ours=ours).gap for printed, ours in ((None, 1), (0.0, 1), (1.0, math.inf))
    ] == [None] * 3


ROWS = (
    Row(what="a <cell>", printed=2.0, ours=2.001, unit="s"),
    Row(what="another", printed=1000.0, ours=1234.5, reach=(0.0, math.inf), why="of a reason"),
    Row(what="a third", printed=None, ours=math.inf, unit="x"),
)
FOUND = Found(
    rows=ROWS,
    constants=(Constant(name="a constant", value="3 s", origin=Origin.FITTED, why="to this"),),
    says=("It says `this` ([planner](planner.md)).",),
    pictures={"a-picture": "<svg>it</svg>"},
)
ITEM = Item(name="paper/table1", title="a table", find=lambda processes: FOUND)


def test_the_report_has_every_number_reason_constant_and_picture():
    text = to_markdown({ITEM: FOUND})
    assert section(ITEM, FOUND) in text
    assert "| a <cell> | 2 s | 2 s |  | +0.0 % | met |" in text
    assert "| another | 1,000 | 1,234 | 0 to none | +23.4 % | not met: of a reason |" in text
    assert "| a third |  | none |  |  |  |" in text
    assert "- a constant: 3 s (fitted; to this)" in text
    assert "![a-picture](pictures/a-picture.svg)" in text
    assert all(name in text for name in ELSEWHERE)
    assert "| paper/table1: a table | 1 |  |  | 1 |  |  |" in text


def test_the_page_stands_for_itself():
    page = to_page({ITEM: FOUND})
    assert "<svg>it</svg>" in page
    assert "a &lt;cell&gt;" in page
    assert "It says this (docs/planner.md)." in page
    assert "](" not in page
    assert not {"href", "src="} & set(page.split())


def test_programs_are_told_what_is_infinite_as_nothing():
    (rows,) = json.loads(to_json({ITEM: FOUND})).values()
    assert [row["ours"] for row in rows] == [2.001, 1234.5, None]
    assert rows[1]["range"] == [0.0, None]
    assert [row["verdict"] for row in rows] == ["met", "not met", "not printed"]


def test_names_mean_an_item_a_paper_or_all_and_come_in_the_reports_order():
    assert [item.name for item in wanted(["swift/table5", "slipstream/table1"])] == [
        "slipstream/table1",
        "swift/table5",
    ]
    assert {item.paper for item in wanted(["nicolae"])} == {"nicolae"}
    assert wanted(["all", "swift"]) == tuple(ITEMS.values())
    with pytest.raises(
        ConfigError, match=r"swift/table99: expected all, slipstream, oobleck, swift, nicolae, or one of"
    ):
        wanted(["swift/table5", "swift/table99"])
