"""``holdfast reproduce``: what it prints, what it writes, and what it says to what cannot be."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from holdfast.cli.commands import run_command
from holdfast.reproduce.registry import ITEMS


def test_without_a_name_it_lists_what_there_is(capsys):
    assert run_command(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(ITEMS)


def test_it_prints_what_is_asked_for_and_the_same_each_time(capsys):
    texts = []
    for _ in range(2):
        assert run_command(["reproduce", "swift/table5", "nicolae", "--quiet"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert [line[3:].partition(":")[0] for line in texts[0].splitlines() if line.startswith("## ")] == [
        "swift/table5",
        "nicolae/figure2",
        "nicolae/figure3",
    ]


def test_programs_get_numbers(capsys):
    assert run_command(["reproduce", "swift/table3", "--format", "json", "--jobs", "1"]) == 0
    found = capsys.readouterr()
    rows = json.loads(found.out)["swift/table3"]
    assert {row["verdict"] for row in rows} == {"met"}
    assert found.err.startswith("1 of 1: swift/table3, ")


def test_a_report_is_written_with_its_page_and_pictures(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert run_command(["reproduce", "swift/figure13", "oobleck/figure11", "--out", str(out), "--quiet"]) == 0
    assert capsys.readouterr().out == f"written to {out}: reproduction.md, reproduction.html and pictures\n"
    text = (out / "reproduction.md").read_text()
    pictures = {path.name for path in (out / "pictures").iterdir()}
    assert pictures == {"swift-figure13.svg", "oobleck-figure11.svg"}
    for name in pictures:
        assert f"](pictures/{name})" in text
        ElementTree.fromstring((out / "pictures" / name).read_text())
    assert (out / "reproduction.html").read_text().count("<svg") == 2


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_where_nothing_can_be_written_nothing_is_computed(place, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_command(["reproduce", "swift/table5", "--out", str(tmp_path / place)]) == 2
    told = capsys.readouterr().err
    assert "cannot be made" in told
    assert "of 1" not in told


def test_an_unknown_name_is_one_line(capsys):
    assert run_command(["reproduce", "swift/table99"]) == 2
    found = capsys.readouterr()
    assert found.err.count("\n") == 1
    assert found.err.startswith("holdfast: swift/table99: expected all, slipstream")
    assert not found.out
