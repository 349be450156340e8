"""What the documents tell people to run is there, and its job files can be read."""

import re
from pathlib import Path

import pytest

from holdfast.config.load import load_job

ROOT = Path(__file__).parents[3]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
JOBS = sorted((ROOT / "examples").rglob("*.yaml"))
_NAMED = re.compile(
    r"holdfast (?:train|plan|profile|study|groups|simulate) (?!(?:JOB|job)\b)([\w./-]+\.yaml)"
    r"|\b(examples/[\w./-]+\.(?:yaml|py))"
)


@pytest.mark.parametrize("path", JOBS, ids=[path.name for path in JOBS])
def test_a_job_file_among_the_examples_can_be_read(path):
    assert load_job(path).train.steps > 0


@pytest.mark.parametrize("text", TEXTS, ids=[path.name for path in TEXTS])
def test_what_a_document_names_is_there(text):
    named = {job or example for job, example in _NAMED.findall(text.read_text())}
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_documents_name_something():
    assert len({each for text in TEXTS for each in _NAMED.findall(text.read_text())}) >= 5
