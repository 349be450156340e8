"""What CI does about red stages and tests: real runs of pytest over small files of tests."""

import sys

import pytest
from tools.ci import Stage, read_report, run_all

TESTS = """
from pathlib import Path
import pytest

TRIED = Path(__file__).with_name("tried")

def test_good():
    pass

def test_flaky():
    was_tried = TRIED.exists()
    TRIED.touch()
    assert was_tried, "it is the first time"

def test_broken():
    assert 1 + 1 == 3

@pytest.mark.parametrize("number", range(6))
def test_many(number):
    raise ValueError("%d is wrong" % number)

@pytest.fixture
def torn():
    yield
    raise OSError("cannot be taken down")

def test_torn(torn):
    raise KeyError("and is wrong, too")
"""


@pytest.fixture
def ended(tmp_path, capfd):
    """A function from stages of tests, as ``-k`` takes them, to the exit status and all that was printed."""
    (tmp_path / "test_it.py").write_text(TESTS)

    def end(*chosen, stages=()):
        pytest_on = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--report-log={report}", "-k")
        made = [Stage(name=f"stage-{i}", command=(*pytest_on, words)) for i, words in enumerate(chosen)]
        code = run_all([*stages, *made], cwd=tmp_path, reports=tmp_path / "reports")
        return code, capfd.readouterr().out

    return end


def last_of(out):
    """The lines of the summary."""
    return out.split("== what became of it\n")[1].splitlines()


def test_a_run_is_green_if_all_is(ended):
    code, out = ended("good")
    assert code == 0
    assert not [line for line in last_of(out) if "red" in line or "flaky" in line or "FAILED" in line]


def test_what_is_broken_is_named_once_with_its_error_and_the_stages_behind_it_run(ended):
    code, out = ended("broken", "good")
    assert code == 1
    named = [line for line in last_of(out) if "test_broken" in line]
    assert named == ["FAILED test_it.py::test_broken - assert (1 + 1) == 3"]
    rows = {line.split()[0]: line for line in last_of(out)}
    assert rows["stage-0"].endswith("red, 1 failed")
    assert rows["stage-1"].endswith("green")


def test_what_is_green_when_it_is_run_again_is_told_and_does_not_make_the_run_red(ended):
    code, out = ended("flaky or good")
    assert code == 0
    assert [line for line in last_of(out) if line.startswith("flaky: test_it.py::test_flaky - ")]
    assert "it is the first time" in out
    assert "FAILED" not in "".join(last_of(out))


def test_one_that_is_red_twice_makes_a_run_red_in_which_others_are_flaky(ended):
    code, out = ended("flaky", "broken")
    assert code == 1
    assert sorted(line.split()[0] for line in last_of(out) if "::" in line) == ["FAILED", "flaky:"]


def test_what_is_left_out_when_it_is_to_be_run_again_stays_red(ended, tmp_path):
    """A test is flaky only if it was seen to be green."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n"
        "    if all('broken' in each.name or 'flaky' in each.name for each in items):\n"
        "        items[:] = [each for each in items if 'broken' not in each.name]\n"
    )
    code, out = ended("flaky", "broken or good")
    assert code == 1
    assert sorted(line.split()[0] for line in last_of(out) if "::" in line) == ["FAILED", "flaky:"]


def test_many_red_ones_are_not_run_again(ended):
    code, out = ended("many or broken")
    assert code == 1
    assert "again" not in out.split("== what became of it\n")[0]
    assert len([line for line in last_of(out) if line.startswith("FAILED")]) == 7
    assert last_of(out)[-1].startswith("7 failed, more than 5")


def test_one_that_fails_and_cannot_be_taken_down_is_named_once(ended):
    code, out = ended("torn")
    assert code == 1
    assert len([line for line in last_of(out) if line.startswith("FAILED")]) == 1


def test_a_stage_that_names_no_test_makes_the_run_red(ended):
    stages = [Stage(name="format", command=(sys.executable, "-c", "raise SystemExit(3)"))]
    code, out = ended("flaky", stages=stages)
    assert code == 1
    assert "error: format ended with 3; its output is above" in last_of(out)


def test_a_stage_whose_tests_were_never_over_makes_the_run_red(ended, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import os, pytest\n@pytest.hookimpl(trylast=True)\ndef pytest_runtest_logreport(report):\n"
        "    if report.when == 'teardown': os._exit(1)\n"
    )
    code, out = ended("flaky")
    assert code == 1
    assert any(line.startswith("error: stage-0") for line in last_of(out))


def test_a_torn_line_is_the_end_of_a_report():
    report = read_report('{"nodeid": "a", "outcome": "failed", "longrepr": "E  told\\nmore"}\n{"nodeid": "b", "out')
    assert report.failed == {"a": "told"}
    assert report.ended is None
