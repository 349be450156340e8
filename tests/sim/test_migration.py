"""Workers change places while training goes on, in virtual time: whatever happens meanwhile, the bits stay."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import cache

import pytest

from holdfast.control.membership import moving
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.slots import exchanged
from holdfast.planning.migration import Migration
from holdfast.planning.training import Rerouted, rerouted
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.telemetry.events import Agreed, Installed, Migrating, Parted, StepOps, Synced
from holdfast.testing.scenario import Delays, Scenario
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6")) // 5
PIPELINES, STAGES, MICROBATCHES, STEPS = 3, 3, 3, 14
LOST, ALSO_LOST, MOVER = WorkerId(0, 1), WorkerId(1, 1), WorkerId(2, 2)
DEATHS = ["kill:0.1@2:backward", "kill:1.1@3:forward"]


class Moving:
    """Once both are lost, proposes that the worker takes the place of one of them; asks for it once, or ever again."""

    def __init__(self, lost=frozenset({LOST, ALSO_LOST}), moves=((MOVER, LOST),)):
        self._lost, self._moves = lost, moves
        self.proposals = 0

    def __call__(self, state):
        if (
            state.absent != self._lost
            or state.grid.baseline.placement.layers_of(self._moves[0][0])[0] != 2 * STAGES - 2
        ):
            return None
        self.proposals += 1
        there = exchanged(state.grid.baseline, self._moves)
        lost = state.absent | {worker for worker, _ in self._moves}
        meanwhile = self._answer(state, there, lost)
        return Migration(
            moves=self._moves,
            baseline=there,
            meanwhile=meanwhile,
            afterwards=replace(self._answer(state, there, state.absent), period=1.0),
            before_s=2.0,
            copy_s=0.1,
        )

    def _answer(self, state, there, lost):
        if state.rules.terms is None:
            return Rerouted(plan=adaptive_plan(there, lost))
        return rerouted(there, lost, state.rules.terms)


def run(*faults, seed=0, steps=STEPS, **options):
    plan = regular_plan(PIPELINES, split_evenly(2 * STAGES, STAGES), MICROBATCHES)
    parsed = [Fault.parse(text) for text in faults]
    return VirtualCluster(Scenario(plan=plan, steps=steps, seed=seed, faults=parsed, **options)).run()


@cache
def undisturbed():
    return run(staggered=False, technique=None).digest


def check(result, *faults, kills=(), deaths=()):
    assert result.outcome == "done", result.detail
    planned = [*(str(Fault.parse(text)) for text in faults), *(f"kill:{worker}#{count}" for worker, count in kills)]
    planned += [f"kill-coordinator#{at}" for at, _ in deaths]
    assert sorted(result.fired) == sorted(planned)
    assert result.digest == undisturbed()


def events_of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def last_order_of(result, worker):
    """How many operations a worker ran in the last step."""
    ran = [event for event in events_of(result, StepOps) if event.worker == str(worker) and event.step == STEPS - 1]
    return len(ran[-1].ops) if ran else 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_worker_takes_the_place_of_a_lost_one(seed):
    """Nothing is aborted for it; afterwards two workers share what one had to do alone."""
    result = run(*DEATHS, seed=seed, better=Moving())
    check(result, *DEATHS)
    (moved,) = events_of(result, Migrating)
    assert moved.moves == ((str(MOVER), str(LOST)),)
    (synced,) = events_of(result, Synced)
    assert synced.worker == str(MOVER)
    assert synced.bytes > 0
    assert len(events_of(result, Agreed)) == 1 + len(DEATHS), "going over needs no agreement"
    assert [e.strategy for e in events_of(result, Installed)].count("boundary") == 2, "to enter, and to compute"
    alone = WorkerId(2, 1)
    assert 0 < last_order_of(result, MOVER) < 3 * PIPELINES * MICROBATCHES
    assert last_order_of(result, MOVER) + last_order_of(result, alone) in (2 * 9, 3 * 9), "all of the stage's work"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whoever_returns_sits_where_the_mover_has_left(seed):
    faults = [*DEATHS, "join:0.1@9", "join:1.1@9"]
    result = run(*faults, seed=seed, steps=30, better=Moving())
    assert result.outcome == "done", result.detail
    assert sorted(result.fired) == sorted(str(Fault.parse(text)) for text in faults)
    assert events_of(result, Migrating)
    assert not result.lost
    ran = {e.worker for e in events_of(result, StepOps) if e.step == 29 and e.ops}
    assert ran == {str(WorkerId(p, s)) for p in range(3) for s in range(3)}, "all compute again"
    assert result.digest == run(seed=seed, steps=30, staggered=False, technique=None).digest


@pytest.mark.parametrize("seed", range(3 * SEEDS))
def test_anybody_dies_at_any_moment_of_it(seed):
    """The worker, whoever gives it state, or anybody else; layers always have an owner left."""
    draw = random.Random(seed)
    victim = draw.choice([MOVER, WorkerId(0, 0), WorkerId(1, 0), WorkerId(1, 2), WorkerId(0, 2)])
    kills = [(victim, draw.randrange(120, 420))]
    result = run(*DEATHS, seed=seed, kill_at_effect=kills, better=Moving())
    check(result, *DEATHS, kills=kills)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_coordinator_dies_meanwhile(seed):
    draw = random.Random(seed)
    deaths = [(draw.uniform(1.4, 2.4), draw.uniform(0.01, 0.4))]
    kills = [(WorkerId(0, 0), draw.randrange(150, 420))] if seed % 2 else []
    result = run(*DEATHS, seed=seed, coordinator_deaths=deaths, kill_at_effect=kills, better=Moving())
    check(result, *DEATHS, kills=kills, deaths=deaths)
    assert kills or events_of(result, Migrating)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_mover_is_told_to_leave_and_another_comes(seed):
    """Whatever it is doing at that moment, it leaves, when it has its state; nobody counts as lost for that."""
    draw = random.Random(seed)
    faults = [*DEATHS, f"leave:{MOVER}@{draw.randrange(5, 12)}:{draw.choice(['start', 'reduce'])}", "join:1.1@14"]
    result = run(*faults, seed=seed, steps=30, better=Moving())
    assert result.outcome == "done", result.detail
    assert sorted(result.fired) == sorted(str(Fault.parse(text)) for text in faults)
    assert result.digest == run(seed=seed, steps=30, staggered=False, technique=None).digest
    assert events_of(result, Migrating)
    assert [event.worker for event in events_of(result, Parted)] == [str(MOVER)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_two_move_at_once(seed):
    """Two places of one stage are filled, from another: which of the two a worker takes is all the same."""
    moves = ((MOVER, LOST), (WorkerId(1, 2), ALSO_LOST))
    draw = random.Random(seed)
    kills = [(WorkerId(0, 0), draw.randrange(120, 420))] if seed % 2 else []
    result = run(*DEATHS, seed=seed, kill_at_effect=kills, better=Moving(moves=moves))
    check(result, *DEATHS, kills=kills)
    assert kills or events_of(result, Migrating)


def test_a_death_is_answered_before_it_is_known_that_all_have_gone_over(monkeypatch):
    """Messages are slow and deaths are seen at once, so the answer is about places that the worker has left by then."""
    found = []
    recover = moving.recover
    monkeypatch.setattr(moving, "recover", lambda state: found.append(state) or recover(state))
    delays = Delays(detect=(0.0, 0.001), control=(0.0, 0.05), put=(0.0, 0.0))
    counts = iter(range(160, 300, 2))
    while not found:  # ends with StopIteration if the moment is never met
        kills = [(WorkerId(0, 0), next(counts))]
        check(run(*DEATHS, seed=0, delays=delays, kill_at_effect=kills, better=Moving()), *DEATHS, kills=kills)
    assert all(state.roster.arriving == {MOVER} for state in found)
