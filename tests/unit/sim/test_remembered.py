"""Plans that simulated jobs go by: made once, and what a job that trains would prove."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
from tests.unit.sim.test_engine import COSTS, EXACT, HOUR, MACHINES, PLAN, SPEEDS, job

from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError, StateUnavailable
from holdfast.planning.maker import PROVING, PlanMaker
from holdfast.planning.planner import Technique
from holdfast.planning.training import Terms
from holdfast.sim import remembered
from holdfast.sim.compare import compare
from holdfast.sim.engine import simulate
from holdfast.sim.failures import parse_failures
from holdfast.sim.remembered import RememberedPlans

TERMS = Terms(technique=Technique.DECOUPLED, costs=COSTS, in_flight=4)
LOST = [frozenset({WorkerId(0, 0)}), frozenset({WorkerId(1, 0), WorkerId(1, 1)}), frozenset({WorkerId(2, 1)})]
BURSTS = parse_failures("weibull:mtbf=20m,shape=0.6,repair=15m")


class Proved(RememberedPlans):
    """The same plans, each proved right, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.proved = 0

    def prove(self, plan, terms=None, ties=()):
        self.proved += 1
        PlanMaker.prove(self, plan, terms, ties)

    def remainder(self, plan, progress, **more):
        self.proved += 1
        return PlanMaker.remainder(self, plan, progress, **more)


@pytest.mark.parametrize("terms", [None, TERMS], ids=["1f1b", "planner"])
def test_a_plan_is_that_of_training_and_is_made_once(terms):
    plans = RememberedPlans()
    for lost in LOST:
        found = plans.without(PLAN, lost, terms)
        assert found == PROVING.without(PLAN, lost, terms)
        assert plans.without(PLAN, sorted(lost), terms) is found
    assert plans.scheduled(PLAN, terms) == PROVING.scheduled(PLAN, terms)
    assert plans.without(PLAN, LOST[0], None) == PROVING.without(PLAN, LOST[0], None)


def test_what_cannot_be_is_said_again():
    plans = RememberedPlans()
    for _ in range(2):
        with pytest.raises(StateUnavailable):
            plans.without(PLAN, [WorkerId(pipeline, 0) for pipeline in range(3)], None)


def test_the_oldest_are_forgotten_once_they_are_too_many(monkeypatch):
    plans = RememberedPlans()
    monkeypatch.setattr(remembered, "_MOST_OPERATIONS", 2 * sum(len(row) for _, row in PLAN.orders.rows))
    first, _, third = (plans.without(PLAN, lost, None) for lost in LOST)
    assert plans.without(PLAN, LOST[2], None) is third
    assert plans.without(PLAN, LOST[0], None) is not first


@pytest.mark.parametrize("strategy", EXACT)
def test_whatever_is_simulated_could_be_proved(strategy):
    prepared, world = job(strategy), BURSTS.draw(MACHINES, 6 * HOUR, "proved")
    outcome = simulate(prepared, world, SPEEDS)
    plans = Proved()
    assert simulate(replace(prepared, plans=plans), world, SPEEDS) == outcome
    assert plans.proved > 0
    assert outcome.failures > 0


def test_several_processes_find_what_one_does():
    jobs = {name: partial(simulate, job(name), speeds=SPEEDS) for name in ("adaptive", "checkpoint-restart")}
    worlds = [BURSTS.draw(MACHINES, 3 * HOUR, str(run)) for run in range(3)]
    said = []
    found = compare(jobs, worlds, 12, processes=2, said=lambda *done: said.append(done))
    assert found == compare(jobs, worlds, 12)
    assert said == [(done, 6) for done in range(7)]


def test_a_process_that_is_ended_is_told():
    worlds = [BURSTS.draw(MACHINES, HOUR, str(run)) for run in range(2)]
    with pytest.raises(ConfigError, match="one of 2 processes that simulated side by side was ended"):
        compare({"adaptive": lambda world: os._exit(9)}, worlds, 12, processes=2)
