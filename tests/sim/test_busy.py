"""Under a virtual clock: whoever is busy for long with others is waited for, and one that is so alone is not."""

from __future__ import annotations

from functools import cache

import pytest

from holdfast.core.faults import Fault
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Notice
from holdfast.testing.scenario import Delays, Scenario, VirtualResult
from holdfast.testing.virtual import VirtualCluster
from holdfast.testing.virtual_worker import HANG_S

OPERATION_S = 0.02
DELAYS = Delays(compute=(OPERATION_S, OPERATION_S))
STEPS = 7
LONG = 250
"""So many times as long as before: 5 seconds, of which a worker may be stuck for 2."""


def run(grid, *faults) -> VirtualResult:
    pipelines, stages = grid
    plan = regular_plan(pipelines, split_evenly(2 * stages, stages), 2)
    parsed = [Fault.parse(fault) for fault in faults]
    result = VirtualCluster(Scenario(plan=plan, steps=STEPS, delays=DELAYS, faults=parsed)).run()
    assert set(result.fired) == {str(each) for each in parsed}
    assert (result.outcome, result.step, result.digest) == ("done", STEPS, healthy(grid)), result.detail
    return result


@cache
def healthy(grid) -> str:
    pipelines, stages = grid
    plan = regular_plan(pipelines, split_evenly(2 * stages, stages), 2)
    return VirtualCluster(Scenario(plan=plan, steps=STEPS, delays=DELAYS)).run().digest


def told(result, of):
    return [event.text for _, event in result.events if isinstance(event, Notice) and of in event.text]


@pytest.mark.parametrize("grid", [(1, 1), (4, 1), (2, 2), (3, 2)])
def test_when_all_are_busy_for_long_they_are_waited_for(grid):
    """One step after the other takes as long as that, which is slow the first time only."""
    workers = [f"{pipeline}.{stage}" for pipeline in range(grid[0]) for stage in range(grid[1])]
    result = run(grid, *(f"slow:{worker}@4:{LONG}x" for worker in workers))
    assert result.seconds > 2 * LONG * OPERATION_S
    assert [event for _, event in result.events if isinstance(event, Detected)] == []
    assert told(result, "waiting for"), "they were overdue"
    assert 0 < len(told(result, "is slow")) <= 2 * len(workers)


@pytest.mark.parametrize("grid", [(4, 1), (2, 2), (3, 2)])
def test_when_all_owners_of_one_layer_are_busy_for_long_they_are_waited_for(grid):
    result = run(grid, *(f"slow:{pipeline}.0@4:{LONG}x" for pipeline in range(grid[0])))
    assert [event for _, event in result.events if isinstance(event, Detected)] == []
    assert told(result, "waiting for")


@pytest.mark.parametrize("grid", [(4, 1), (2, 2), (3, 2)])
def test_one_that_is_busy_for_long_alone_is_lost_as_soon_as_ever(grid):
    result = run(grid, "stall:1.0@4:forward")
    ((at, lost),) = [(at, event) for at, event in result.events if isinstance(event, Detected)]
    assert (lost.worker, "stuck" in lost.how) == ("1.0", True)
    (stood,) = [at for at, event in result.events if getattr(event, "kind", "") == "stall"]
    assert HANG_S < at - stood < HANG_S + 0.6
    assert told(result, "waiting for") == []
    assert len(told(result, "is slow")) == 1
