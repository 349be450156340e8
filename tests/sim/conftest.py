"""Everything that holds for 1F1B, whose steps wait for their verdict, holds for the planner's staggered plans."""

from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.control.membership import finishing
from holdfast.planning.planner import Technique
from holdfast.testing.scenario import Scenario

NONE = SimpleNamespace(params={})
SYNCHRONOUS, STAGGERED = MODES = ("synchronous", "staggered")


@pytest.fixture(autouse=True, params=MODES)
def staggered(request, monkeypatch):
    """Every test runs with updates after the verdict, and ahead of it with the planner's plans."""
    staggers = request.param == STAGGERED
    defaults = Scenario.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "staggered", staggers)
    monkeypatch.setitem(defaults, "technique", Technique.STAGGERED if staggers else None)
    return staggers


def pytest_collection_modifyitems(config, items):
    """Of a test with several cases each runs in one of both ways, by turns; all of them in both with ``--soak``.

    So do whole tests of random seeds, from the one that is called ``start``.
    """
    if config.getoption("--soak"):
        return
    cases = defaultdict(dict)
    for item in items:
        if Path(__file__).parent in item.path.parents and "staggered" in getattr(item, "callspec", NONE).params:
            others = tuple(repr(value) for name, value in item.callspec.params.items() if name != "staggered")
            cases[item.path, item.originalname].setdefault(others, []).append(item)
    left_out, seeded = set(), Counter()
    for (path, _), found in cases.items():
        by_seeds = any("start" in item.callspec.params for both in found.values() for item in both)
        if len(found) > 1 or by_seeds:
            for number, both in enumerate(found.values(), seeded[path]):
                left_out |= {item.nodeid for item in both if item.callspec.params["staggered"] != MODES[number % 2]}
        seeded[path] += by_seeds
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.fixture(autouse=True)
def nothing_is_contradicted(monkeypatch):
    """What workers of ours tell of a step can always be; a real job would run it again whole."""

    def contradicted(state, error):
        raise error

    monkeypatch.setattr(finishing, "contradicted", contradicted)
