"""docs/job_file.md is what config/job.py says of every key; what documents point to is there; decisions are listed."""

import re
from pathlib import Path

import msgspec
import pytest
from tools.job_file import TARGET, attributes, page

from holdfast.config import job

ROOT = Path(__file__).parents[3]
STRUCTS = [
    each
    for each in vars(job).values()
    if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == job.__name__
]
RECORDS = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("struct", STRUCTS, ids=[each.__name__ for each in STRUCTS])
def test_each_key_is_described_once_and_nothing_else(struct):
    assert set(attributes(struct)) == {field.name for field in msgspec.structs.fields(struct)}


def test_the_page_is_made_of_the_code():
    assert TARGET.read_text() == page(), "python -m tools.job_file writes it"


def test_the_page_has_every_key():
    rows = set(re.findall(r"^\| `(\w+)` \|", TARGET.read_text(), re.MULTILINE))
    assert rows == {field.name for struct in STRUCTS for field in msgspec.structs.fields(struct)}


def anchors(path):
    """The headings of a document, as links name them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("text", TEXTS, ids=[str(path.relative_to(ROOT)) for path in TEXTS])
def test_what_a_document_points_to_is_there(text):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)", text.read_text()):
        path = (text.parent / target).resolve() if target else text
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("record", RECORDS, ids=[path.stem for path in RECORDS])
def test_a_decision_has_its_row_which_names_what_supersedes_it(record):
    lines = (record.parent / "README.md").read_text().splitlines()
    rows = [line for line in lines if f"]({record.name})" in line]
    assert len(rows) == 1, f"docs/adr/README.md: {len(rows)} rows of {record.name}, not 1"
    number, _, decided, status = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert number == str(int(record.name[:4]))
    assert decided
    assert status.startswith(("in force", "superseded by "))
    superseding = re.findall(r"^Superseded by \[ADR (\d+)\]", record.read_text(), re.MULTILINE)
    assert all(f"superseded by {by}" in status for by in superseding), f"superseded by {superseding}: {status}"
