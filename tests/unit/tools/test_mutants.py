"""What the tool behind `make mutate` changes, and what it leaves alone."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT))
    yield importlib.import_module("tools.mutate.mutants")
    sys.path.remove(str(ROOT))


SOURCE = '''
"""A docstring is left alone."""
LIMIT = 62


def check(state: int | None, others: tuple[int, ...]) -> bool:
    """Nor are types and messages."""
    if state is None:
        raise ValueError(f"{1 + 1} is no state")
    for other in others:
        if other < LIMIT and state:
            continue
        os.fsync(other)
    return replace(state, lost=others)
'''


def keys(tool, source=SOURCE):
    return [mutant.key.removeprefix("m.py ") for mutant in tool.mutants_of("m.py", source)]


def test_what_is_changed(tool):
    assert keys(tool) == [
        "<module>: LIMIT = 62 => LIMIT = 63",
        "check: if state is None: raise ValueError(f'{1 + 1} is no state') => (dropped)",
        "check: state is None => state is not None",
        "check: if other < LIMIT and state: continue => (dropped)",
        "check: other < LIMIT and state => other < LIMIT or state",
        "check: other < LIMIT and state => state",
        "check: other < LIMIT and state => other < LIMIT",
        "check: other < LIMIT => other <= LIMIT",
        "check: os.fsync(other) => (dropped)",
        "check: return replace(state, lost=others) => return",
        "check: lost=others => (dropped)",
    ]


def test_every_mutant_is_another_program(tool):
    changed = [tool.apply(mutant, SOURCE) for mutant in tool.mutants_of("m.py", SOURCE)]
    assert len({*changed, SOURCE}) == len(changed) + 1
    for text in changed:
        compile(text, "m.py", "exec")


def test_a_change_elsewhere_moves_no_key_and_draws_no_other(tool):
    moved = SOURCE.replace("LIMIT = 62", "LIMIT = 62\nOTHER = 'é'\n\n\ndef more():\n    return OTHER")
    assert set(keys(tool)) < set(keys(tool, moved))
    first, again = (tool.sample(tool.mutants_of("a/m.py", text), 5, seed=3) for text in (SOURCE, moved))
    assert len({mutant.key for mutant in first} & {mutant.key for mutant in again}) >= 4


def test_of_equal_changes_each_has_a_key_of_its_own(tool):
    source = "def f(a, b):\n    return g(a < b) + h(a < b)\n"
    assert [key for key in keys(tool, source) if "=> a <= b" in key] == ["f: a < b => a <= b", "f: a < b => a <= b #2"]


def test_each_package_has_its_share(tool):
    files = {"a/x.py": "X = 1\n" * 30, "b/y.py": "Y = 1\n" * 10}
    mutants = [mutant for path, source in files.items() for mutant in tool.mutants_of(path, source)]
    drawn = [mutant.path for mutant in tool.sample(mutants, 8, seed=1)]
    assert (drawn.count("a/x.py"), drawn.count("b/y.py")) == (6, 2)
    assert [len(tool.sample(mutants, count, seed=1)) for count in range(41)] == list(range(41))
    assert tool.sample(mutants, 8, seed=1) != tool.sample(mutants, 8, seed=2)
