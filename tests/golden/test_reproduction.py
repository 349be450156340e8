"""The report of the documentation is what the command makes: all of it is there, and what takes no time is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.reproduce.registry import ELSEWHERE, FIRST, ITEMS
from holdfast.reproduce.telling import section

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reproduction.md"
SLOW = {
    "slipstream/table1",
    "slipstream/table3",
    "slipstream/figure8",
    "slipstream/figure9",
    "oobleck/table3",
    "oobleck/rates",
}
"""Half a minute and more each, or seconds of planning, which are never the same."""


def test_everything_is_in_it():
    headings = [line[3:].partition(":")[0] for line in PAGE.read_text().splitlines() if line.startswith("## ")]
    assert headings == [*ITEMS, "Not computed", "Sources"]
    assert all(f"| {name} |" in PAGE.read_text() for name in ELSEWHERE)
    assert set(ITEMS) > SLOW
    assert all(f"| {name} | {what} |" in PAGE.read_text() for name, what in FIRST)


@pytest.mark.parametrize("name", [name for name in ITEMS if name not in SLOW])
def test_it_says_what_comes_out(name):
    found = ITEMS[name].find(1)
    assert f"\n{section(ITEMS[name], found)}\n" in PAGE.read_text()
    for picture, svg in found.pictures.items():
        assert (DOCS / "pictures" / f"{picture}.svg").read_text() == svg
