"""Everything that holds for steps that wait for their verdict holds for steps that do not."""

import pytest

from holdfast.testing.virtual import VirtualCluster


@pytest.fixture(autouse=True, params=[False, True], ids=["synchronous", "staggered"])
def _commit(request, monkeypatch):
    """Every test runs twice: with updates after the verdict, and ahead of it."""
    monkeypatch.setitem(VirtualCluster.__init__.__kwdefaults__, "staggered", request.param)
