"""Answers to losses are prepared beside everything else that the coordinator does."""

import asyncio
import threading
import time

import pytest
from tests.decisions import leading_in
from tests.waiting import LIMIT_S

from holdfast.control import coordinator as module
from holdfast.control.coordinator import Coordinator
from holdfast.control.membership import GridState, Membership, Phase, plan_recovery
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.planning.planner import Technique
from holdfast.planning.training import Terms, replanned
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import EventLog

TERMS = Terms(technique=Technique.STAGGERED, costs=unit_costs(4), in_flight=4)
PLAN = replanned(regular_plan(2, split_evenly(4, 2), 2), TERMS)


@pytest.fixture
def coordinator(tmp_path):
    membership = Membership(
        grid=GridState(baseline=PLAN),
        rules=JobRules(terms=TERMS, steps=3, directory="out"),
        phase=Phase.RUNNING,
    )
    leading = leading_in(tmp_path / "control.db")
    made = Coordinator(
        membership=membership,
        leading=leading,
        log=EventLog(tmp_path / "events.jsonl"),
        clock=time.monotonic,
        awake=time.monotonic,
    )
    yield made
    leading.chain.close()
    made.decider.log.close()


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_time_passes_while_a_plan_is_made(coordinator, monkeypatch):
    held, begun = threading.Event(), threading.Event()

    def slow(state, lost):
        begun.set()
        assert held.wait(LIMIT_S)
        return plan_recovery(state, lost)

    monkeypatch.setattr(module, "plan_recovery", slow)

    async def run():
        running = asyncio.create_task(coordinator.run())
        await until(begun.is_set)
        before = coordinator.decider.membership.watch.now
        await until(lambda: coordinator.decider.membership.watch.now not in (None, before))
        assert coordinator.decider.membership.prospects.planned == {}
        held.set()
        await until(lambda: len(coordinator.decider.membership.prospects.planned) == len(PLAN.workers))
        coordinator._agents_here.set()
        coordinator._goodbye.set()
        await running

    asyncio.run(run())
    for lost, prepared in coordinator.decider.membership.prospects.planned.items():
        assert prepared == plan_recovery(coordinator.decider.membership, lost)


def test_a_bug_in_planning_is_not_kept_quiet(coordinator, monkeypatch):
    def broken(state, lost):
        raise ZeroDivisionError

    monkeypatch.setattr(module, "plan_recovery", broken)
    coordinator._agents_here.set()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(coordinator.run(), LIMIT_S))
