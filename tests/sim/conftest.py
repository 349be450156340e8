"""Everything that holds for 1F1B, whose steps wait for their verdict, holds for the planner's staggered plans."""

import pytest

from holdfast.control.membership import finishing
from holdfast.planning.planner import Technique
from holdfast.testing.scenario import Scenario


@pytest.fixture(autouse=True, params=[False, True], ids=["synchronous", "staggered"])
def staggered(request, monkeypatch):
    """Every test runs twice: with updates after the verdict, and ahead of it with the planner's plans."""
    defaults = Scenario.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "staggered", request.param)
    monkeypatch.setitem(defaults, "technique", Technique.STAGGERED if request.param else None)
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_contradicted(monkeypatch):
    """What workers of ours tell of a step can always be; a real job would run it again whole."""

    def contradicted(state, error):
        raise error

    monkeypatch.setattr(finishing, "contradicted", contradicted)
