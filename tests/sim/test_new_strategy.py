"""What CONTRIBUTING says of a new strategy is true: one pure function and one row, and it is carried out."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from holdfast.core.faults import Fault
from holdfast.core.placement import split_evenly
from holdfast.recovery.actions import RecoveryPlan, Spawn
from holdfast.recovery.view import ClusterView
from holdfast.schedule.builders import regular_plan
from holdfast.strategies import registry
from holdfast.strategies.adaptive import adaptive
from holdfast.strategies.strategy import Strategy
from holdfast.telemetry.events import Installed, Synced
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

STEPS = 20


def refill(view: ClusterView) -> RecoveryPlan:
    """As adaptive; besides, a process is started at once for every place that is empty."""
    answer = adaptive(view)
    if not answer.keeps_state:
        return answer
    vacant = Spawn(workers=tuple(sorted(view.lost - view.entering)))
    abort, install, *rest = answer.actions
    return replace(answer, strategy="refill", actions=(abort, install, vacant, *rest))


@pytest.fixture
def refilling(monkeypatch):
    row = Strategy(name="refill", answer=refill)
    monkeypatch.setattr(registry, "STRATEGIES", MappingProxyType({**registry.STRATEGIES, row.name: row}))


@pytest.mark.usefixtures("refilling")
@pytest.mark.parametrize("point", ["start", "forward", "backward", "reduce", "update", "commit", "install"])
def test_a_strategy_is_a_function_and_a_row(point):
    plan = regular_plan(3, split_evenly(4, 2), 2)
    whole = VirtualCluster(Scenario(plan=plan, steps=STEPS)).run()
    faults = [Fault.parse("kill:1.1@2:backward"), Fault.parse(f"kill:0.0@6:{point}")]
    if point == "install":  # of the recovery from the first
        faults[1] = Fault.parse("kill:0.0@2:install")
    result = VirtualCluster(Scenario(plan=plan, steps=STEPS, strategy="refill", faults=faults)).run()
    assert (result.outcome, result.digest) == ("done", whole.digest), result.detail
    assert sorted(result.fired) == sorted(map(str, faults))
    assert result.lost == (), "whoever was lost has come back by itself"
    assert {event.worker for _, event in result.events if isinstance(event, Synced)} == {"0.0", "1.1"}
    assert "refill" in {event.strategy for _, event in result.events if isinstance(event, Installed)}
