"""How tests are run against a mutant: real runs of pytest, over files of tests that a mutant changes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest
from subject import LIMITS

@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit(limit):
    assert limit < 100

def test_there_is_one():
    assert LIMITS
"""
RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tools.mutate.runs import collect, try_mutant
here = Path.cwd()
if sys.argv[1] == "collect":
    sys.exit(collect(here, here, here / "names.json"))
sys.exit(try_mutant(here, here / "src", sys.argv[1:], here, here / "killed-by.txt"))
"""
CHOSEN = [f"tests/test_limits.py::{name}" for name in ("test_a_limit[1]", "test_a_limit[2]", "test_there_is_one")]


@pytest.fixture
def tried(tmp_path):
    """A function from the mutant's text to the status of the run and the test that saw it."""
    for folder in ("src", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests" / "test_limits.py").write_text(TESTS)
    (tmp_path / "run.py").write_text(RUN.format(root=str(ROOT)))

    def run(text, *arguments):
        (tmp_path / "src" / "subject.py").write_text(text)
        command = [sys.executable, "run.py", *(arguments or CHOSEN)]
        status = subprocess.run(command, cwd=tmp_path, check=False).returncode
        by = tmp_path / "killed-by.txt"
        return status, by.read_text() if by.exists() else ""

    return run


def test_a_mutant_survives_that_no_test_sees(tried):
    assert tried("LIMITS = (1, 2)") == (0, "")


def test_a_red_test_sees_it(tried):
    assert tried("LIMITS = (1, 2, 100)") == (0, "")
    status, by = tried("LIMITS = ()")
    assert status != 0
    assert by.startswith("tests/test_limits.py::")


@pytest.mark.parametrize(("text", "gone"), [("LIMITS = (1, 3)", CHOSEN[1]), ("LIMITS = (3, 4)", CHOSEN[0])])
def test_a_test_that_is_gone_has_seen_it(tried, text, gone):
    assert tried(text) == (5, gone)


def test_when_none_is_left_the_mutant_is_seen_as_well(tried):
    assert tried("LIMITS = (3, 4)", *CHOSEN[:2]) == (5, CHOSEN[0])


def test_the_tests_that_there_are(tried, tmp_path):
    assert tried("LIMITS = (1, 2)", "collect") == (0, "")
    names = json.loads((tmp_path / "names.json").read_text())
    assert names == CHOSEN


def test_tests_of_this_project_are_collected_without_xdist():
    """As the tool runs them: a hook of a plugin that is missing has ended it before it tried anything."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    found = subprocess.run([*command, __file__], cwd=ROOT, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert Path(__file__).name in found.stdout
