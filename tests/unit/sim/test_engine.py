"""A whole job in virtual time: every second has its part, and what is lost is what actions and steps cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from holdfast.config.job import Cluster
from holdfast.core.placement import split_evenly
from holdfast.core.profile import LayerProfile, Link, Profile, costs_from_profile
from holdfast.errors import ConfigError
from holdfast.planning.replays import Logging
from holdfast.planning.reshaping import Shapes
from holdfast.planning.templates.stages import table_of
from holdfast.recovery.audit import Sampling
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.sim.engine import Prepared, simulate
from holdfast.sim.failures import parse_failures
from holdfast.sim.ledger import Part
from holdfast.sim.prepare import speeds_of
from holdfast.sim.world import Happening, Kind, World
from holdfast.strategies.registry import STRATEGIES
from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    Detected,
    FaultInjected,
    HandingOver,
    Installed,
    Notice,
    Parted,
    Replaying,
    Synced,
)

LAYERS, HOUR = 4, 3600.0
PROFILE = Profile(
    layers=tuple(
        LayerProfile(
            name=str(index),
            forward_s=0.1,
            backward_input_s=0.1,
            backward_weight_s=0.1,
            held_after_forward_bytes=8,
            held_after_input_bytes=4,
            boundary_bytes=1000,
            parameter_bytes=10**8,
            optimizer_bytes=2 * 10**8,
            optimizer_s=0.01,
        )
        for index in range(LAYERS)
    ),
    link=Link(latency_s=0.001, bytes_per_s=1e9),
)
PLAN = regular_plan(3, split_evenly(LAYERS, 2), 4)
COSTS = costs_from_profile(PROFILE)
SPEEDS = speeds_of(PROFILE, Cluster())
MACHINES = len(PLAN.workers)
EXACT = sorted(name for name, row in STRATEGIES.items() if row.exact)


def job(strategy="adaptive", **rules):
    known = {"steps": 10**9, "checkpoint_every": 50, "wait_s": 300.0}
    shapes = None
    if STRATEGIES[strategy].makes_pipelines:
        shapes = Shapes(costs=COSTS, minimum=1, state=(1,) * LAYERS, copy_s=(0.3,) * LAYERS, table=table_of(COSTS))
        known["weighs"] = True
    if STRATEGIES[strategy].keeps_steps:
        known["keeping"] = COSTS
    if STRATEGIES[strategy].takes_snapshots:
        known["snapshot_every"] = 5
    return Prepared(rules=JobRules(**{**known, "strategy": strategy, "shapes": shapes, **rules}), plan=PLAN)


def world(*happenings, hours=1.0, machines=MACHINES):
    return World(machines=machines, happenings=happenings, lasts_s=hours * HOUR)


def lost(at_s, machine):
    return Happening(at_s=at_s, kind=Kind.LOST, machine=machine)


def comes(at_s, machine):
    return Happening(at_s=at_s, kind=Kind.COMES, machine=machine)


def of(outcome, kind):
    return [(at, event) for at, event in outcome.events if isinstance(event, kind)]


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize(
    "failures", ["poisson:mtbf=20m,repair=15m", "racks:mtbf=1h,size=2,repair=30m", "periodic:25m,notice=1m,repair=10m"]
)
def test_every_second_has_its_part_and_nothing_is_drawn_twice(strategy, failures):
    for seed in range(2):
        drawn = parse_failures(failures).draw(MACHINES, 4 * HOUR, f"{seed}")
        outcome = simulate(job(strategy), drawn, SPEEDS)
        assert math.fsum(outcome.parts.values()) == pytest.approx(outcome.seconds)
        assert min(outcome.parts.values()) >= 0
        assert outcome.steps > 0
        assert outcome.failures <= drawn.failures
        assert simulate(job(strategy), drawn, SPEEDS) == outcome


def slows(at_s, machine, factor):
    return Happening(at_s=at_s, kind=Kind.SLOWS, machine=machine, factor=factor)


def test_all_wait_for_who_is_slow_while_it_is_there():
    healthy = simulate(job(), world(), SPEEDS)
    half = simulate(job(), world(slows(1800.0, 0, 2.0)), SPEEDS)
    assert half.healthy_s == healthy.healthy_s
    (_, nothing), (_, before), (at, slow) = half.rates
    assert (nothing, before, at) == (None, healthy.healthy_s, 1800.0)
    assert 1.5 * before < slow < 2 * before, "messages, and what it waits for, take no longer"
    assert half.steps == pytest.approx(healthy.steps * (1 + before / slow) / 2, abs=2)
    again = simulate(job(), world(slows(1800.0, 0, 2.0), slows(2700.0, 0, 1.0)), SPEEDS)
    assert [rate for _, rate in again.rates] == [None, before, slow, before]
    gone = simulate(job(), world(slows(1800.0, 0, 2.0), lost(2700.0, 0)), SPEEDS)
    without = simulate(job(), world(lost(2700.0, 0)), SPEEDS)
    assert gone.rates[-1][1] == without.rates[-1][1], "it is not waited for any more"
    assert [event.kind for _, event in of(gone, FaultInjected)] == ["slow", "kill"]


def test_one_that_is_slow_and_has_no_place_slows_nobody_down():
    spare = simulate(job(), world(slows(1800.0, MACHINES, 2.0), machines=MACHINES + 1), SPEEDS)
    assert [rate for _, rate in spare.rates] == [None, spare.healthy_s]


def test_where_nothing_fails_only_checkpoints_cost_anything():
    outcome = simulate(job(), world(), SPEEDS)
    parts = outcome.parts
    assert outcome.failures == parts[Part.REDO] == parts[Part.COPY] == parts[Part.IDLE] == 0
    assert parts[Part.RESTART] < 0.1, "all connect"
    assert outcome.goodput == pytest.approx(parts[Part.USEFUL] / outcome.seconds, abs=1e-3)
    written = of(outcome, Checkpointed)
    assert [event.step for _, event in written] == list(range(50, outcome.steps - 1, 50))[: len(written)]
    assert len(written) >= (outcome.steps - 2) // 50
    assert parts[Part.CHECKPOINT] == pytest.approx(len(written) * 6e8 / 4e9, rel=0.1)


def test_a_lost_worker_costs_what_it_did_until_another_has_caught_up():
    outcome = simulate(job(), world(lost(600.0, 1), comes(1800.0, MACHINES)), SPEEDS)
    ((detected, event),) = of(outcome, Detected)
    assert (detected, event.how) == (600.0 + 0.01, "node 1 is gone")
    ((synced, who),) = of(outcome, Synced)
    assert who.worker == event.worker
    assert 1800.0 + 5 + 6e8 / 350e6 <= synced <= 1800.0 + 30
    rates = [period for _, period in outcome.rates if period is not None]
    assert rates[0] == rates[-1] == outcome.healthy_s < max(rates)
    slower = outcome.parts[Part.USEFUL] / outcome.healthy_s - outcome.steps
    share = (synced - detected) * (1 - outcome.healthy_s / max(rates)) / outcome.healthy_s
    assert slower == pytest.approx(share, rel=0.05), "so many steps were not made meanwhile"


def test_whoever_gives_notice_loses_nothing():
    leaves = Happening(at_s=600.0, kind=Kind.LEAVES, machine=1, grace_s=60.0)
    with_notice = simulate(job(), world(leaves), SPEEDS)
    without = simulate(job(), world(lost(660.0, 1)), SPEEDS)
    assert len(of(with_notice, Parted)) == 1
    assert not of(with_notice, Detected)
    assert with_notice.parts[Part.REDO] == 0 < without.parts[Part.REDO]
    assert with_notice.failures == 0 < without.failures


def test_going_back_to_a_checkpoint_runs_steps_again():
    outcome = simulate(job("checkpoint-restart"), world(lost(600.0, 1), comes(700.0, MACHINES)), SPEEDS)
    parts = outcome.parts
    assert 0 < parts[Part.REDO] < 50 * outcome.healthy_s, "at most what lies between two checkpoints"
    assert parts[Part.IDLE] == pytest.approx(100.0, abs=1.0), "until somebody comes"
    assert parts[Part.RESTART] >= 5 + 6e8 / 500e6
    assert [event.strategy for _, event in of(outcome, Installed)] == ["", "checkpoint-restart", "checkpoint-restart"]
    impatient = simulate(job("checkpoint-restart", wait_s=30.0), world(lost(600.0, 1)), SPEEDS)
    assert impatient.parts[Part.IDLE] == pytest.approx(30.0, abs=0.5)
    assert [event.strategy for _, event in of(impatient, Installed)][-1] == "fallback"


def test_whoever_is_lost_while_steps_are_run_again_is_waited_for_as_the_first_one():
    gone = [lost(1000.0, 1), comes(1001.0, MACHINES), lost(1050.0, 2), comes(1060.0, MACHINES + 1)]
    outcome = simulate(job("checkpoint-restart", checkpoint_every=200), world(*gone), SPEEDS)
    (_, first), (_, second) = [(at, event.step) for at, event in of(outcome, Agreed)][1:]
    assert first == second == 200, "they had not got as far again as they had been"
    assert "fallback" not in [event.strategy for _, event in of(outcome, Installed)]


def test_a_job_that_has_ended_begins_again_from_what_was_saved():
    gone = [lost(600.0 + 10 * index, index) for index in range(MACHINES)]
    back = [comes(1200.0, MACHINES + index) for index in range(MACHINES)]
    outcome = simulate(job(wait_s=0.0), world(*gone, *back), SPEEDS)
    assert outcome.restarts == 1
    assert outcome.parts[Part.IDLE] > 500
    assert outcome.parts[Part.REDO] > 0
    never = simulate(job(wait_s=0.0), world(*gone), SPEEDS)
    assert never.restarts == 0
    assert never.steps < outcome.steps


def test_with_too_few_machines_a_job_begins_later():
    outcome = simulate(job(), world(comes(900.0, MACHINES - 1), machines=MACHINES - 1), SPEEDS)
    assert outcome.parts[Part.IDLE] == pytest.approx(900.0)
    assert outcome.steps > 0


def test_another_price_is_another_outcome():
    failing = world(lost(600.0, 1), comes(700.0, MACHINES))
    slow = speeds_of(PROFILE, Cluster(load=10e6, start_s=60.0))
    cheap, dear = (
        simulate(job("checkpoint-restart"), failing, speeds).parts[Part.RESTART] for speeds in (SPEEDS, slow)
    )
    assert dear - cheap == pytest.approx((60.0 - 5.0) * (1 + 0) + 6e8 / 10e6 - 6e8 / 500e6, rel=0.1)


def test_several_workers_of_one_machine_are_lost_together():
    two = replace(job(), workers_per_machine=2)
    outcome = simulate(two, world(lost(600.0, 1), comes(900.0, 3), machines=3), SPEEDS)
    assert len(of(outcome, Detected)) == 2
    assert outcome.failures == 1
    assert len(of(outcome, Synced)) == 2


def test_whoever_is_given_state_for_many_steps_computes_once_it_has_it():
    slow = speeds_of(PROFILE, Cluster(copy=5e6))  # 120 s, which are 28 steps
    outcome = simulate(job(), world(lost(600.0, 1), comes(700.0, MACHINES)), slow)
    ((synced, event),) = of(outcome, Synced)
    entered, whole = (at for at, each in of(outcome, Installed) if each.strategy == "boundary")
    assert 120 <= synced - entered < 130
    assert event.step - event.entered == pytest.approx(28, abs=2)
    assert entered < synced < whole < synced + 2 * max(period for _, period in outcome.rates if period)


def test_other_pipelines_are_asked_for_again_and_again_as_they_may_pay_later():
    """Nothing happens in between; the longer nothing fails, the longer nothing is expected to."""
    dear = job("templates", checkpoint_every=0)
    slower = replace(dear.rules.shapes, copy_s=(60.0,) * LAYERS)
    dear = replace(dear, rules=replace(dear.rules, shapes=slower))
    outcome = simulate(dear, world(lost(60.0, 1)), SPEEDS)
    (later, told), *_ = of(outcome, Notice)
    ((handed, _),) = of(outcome, HandingOver)
    assert "copying costs more before a failure" in told.text
    assert later < 61.0
    assert 100.0 < handed < 300.0


def test_of_one_pipeline_what_was_logged_is_replayed_and_the_others_wait():
    """Their share of a step is less than the step, and the more of them replay it, the less."""
    alone, failing = regular_plan(1, split_evenly(LAYERS, 4), 4), world(lost(600.0, 1), machines=4)

    def of_one(**rules):
        outcome = simulate(replace(job(wait_s=0.0, **rules), plan=alone), failing, SPEEDS)
        assert outcome.loads == 1
        return outcome

    back, replayed, helped = of_one(), of_one(logging=Logging()), of_one(logging=Logging(helpers=1))
    assert [each.parts[Part.REDO] > 0 for each in (back, replayed, helped)] == [True] * 3
    assert back.parts[Part.REDO] > replayed.parts[Part.REDO] > helped.parts[Part.REDO]
    assert [event.strategy for _, event in of(replayed, Installed)] == ["", "logging", "logging"]
    ((_, event),) = of(replayed, Replaying)
    resumed = of(replayed, Agreed)[-1][1].step
    assert (event.start, event.stop) == (resumed // 50 * 50, resumed), "since the newest checkpoint"
    at_last = simulate(replace(job(wait_s=0.0, logging=Logging(), checkpoint_every=0), plan=alone), failing, SPEEDS)
    assert at_last.restarts == at_last.loads == 0, "nothing can be replayed without a checkpoint"


def test_what_cannot_be_simulated_yet_is_told():
    with pytest.raises(ConfigError, match="audits are not simulated yet"):
        simulate(job(sampling=Sampling(seed=0, every=10)), world(), SPEEDS)


def test_a_checkpoint_that_is_complete_only_after_a_loss_is_of_use_at_the_next():
    """It is of a later step than those that are run again meanwhile: they need not be run any further."""
    slow = speeds_of(PROFILE, Cluster(save=5e6))
    period = simulate(job("checkpoint-restart"), world(), slow).healthy_s
    first = 100.5 * period + 2  # the checkpoint of step 100 is being written
    once = simulate(job("checkpoint-restart"), world(lost(first, 1), comes(first + 1, 6)), slow)
    ((complete, _),) = [row for row in of(once, Checkpointed) if row[1].step == 100]
    again = complete + period / 2
    resumed = of(once, Agreed)[-1]
    assert first < resumed[0] < again < resumed[0] + (100 - resumed[1].step) * period, "step 100 is not reached again"
    failing = world(lost(first, 1), comes(first + 1, 6), lost(again, 2), comes(again + 1, 7))
    outcome = simulate(job("checkpoint-restart"), failing, slow)
    assert [event.step for _, event in of(outcome, Agreed)][1:] == [resumed[1].step, 100]
