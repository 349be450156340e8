"""Systems that have no runtime here: every second has its part, and each row does what its authors say."""

from __future__ import annotations

import math

import pytest
from tests.unit.sim.test_engine import comes, lost, slows

from holdfast.sim.failures import parse_failures
from holdfast.sim.ledger import Part
from holdfast.sim.systems.rows import SYSTEMS, Facts
from holdfast.sim.systems.system import Seats, simulate_system
from holdfast.sim.world import Happening, Kind, World

PLACES, STEP_S = 12, 10.0


def facts(**more):
    """Three pipelines of four machines; a step of fewer takes as much longer as they are fewer."""
    known = {
        "pipelines_of": tuple(frozenset([place // 4]) for place in range(PLACES)),
        "pipelines": 3,
        "job_s": STEP_S,
        "healthy_s": STEP_S,
        "of_pipelines": lambda count: STEP_S * 3 / count if count else None,
        "of_grids": lambda machines: STEP_S * 3 / (machines // 4) if machines >= 4 else None,
        "of_templates": lambda machines: STEP_S * PLACES / machines if machines >= 3 else None,
        "detect_s": 1.0,
        "start_s": 60.0,
        "load_s": 5.0,
        "save_s": 2.0,
        "pin_s": 0.5,
    }
    return Facts(**{**known, **more})


def of(name, *happenings, lasts_s=10_000.0, machines=PLACES, **more):
    world = World(machines=machines, happenings=happenings, lasts_s=lasts_s)
    return simulate_system(SYSTEMS[name](facts(**more)), world, places=PLACES, healthy_s=STEP_S)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_second_has_its_part_and_nothing_is_drawn_twice(name):
    for text in ("poisson:mtbf=20m,repair=15m", "racks:mtbf=1h,size=2,repair=30m", "periodic:25m,notice=1m,repair=10m"):
        for seed in range(4):
            drawn = parse_failures(text).draw(PLACES, 40_000.0, f"{seed}").happenings
            outcome = of(name, *drawn, lasts_s=40_000.0)
            assert math.fsum(outcome.parts.values()) == pytest.approx(40_000.0)
            assert min(outcome.parts.values()) >= 0
            assert 0 < outcome.steps * STEP_S < 40_000.0
            assert of(name, *drawn, lasts_s=40_000.0) == outcome


@pytest.mark.parametrize("name", SYSTEMS)
def test_all_wait_for_the_slowest_that_has_a_place(name):
    healthy = of(name, lasts_s=100_000.0)
    slowed = (slows(50_000.0, 3, 2.0), slows(75_000.0, 3, 1.0), slows(80_000.0, PLACES, 4.0))
    slow = of(name, *slowed, lasts_s=100_000.0, machines=PLACES + 1)
    assert slow.steps == pytest.approx(healthy.steps * 7 / 8, rel=0.01)


@pytest.mark.parametrize("name", SYSTEMS)
def test_where_nothing_fails_only_checkpoints_and_redundancy_cost_anything(name):
    outcome, row = of(name), SYSTEMS[name](facts())
    period = row.step_s(Seats(places=PLACES))
    each = period + (row.checkpoint_s / row.every if row.every else 0.0)
    assert outcome.steps == pytest.approx(10_000.0 / each, abs=1)
    assert outcome.parts[Part.REDO] == outcome.parts[Part.RESTART] == outcome.parts[Part.IDLE] == 0
    assert all((row.costs, row.source, row.assumed)), "who says so, and what nobody says"


def test_varuna_restarts_from_its_checkpoint_with_a_pipeline_less():
    """Ten steps and a checkpoint take 102 s; the loss comes 4.3 steps after the second one."""
    outcome = of("varuna", lost(247.0, 5), lasts_s=1000.0)
    parts = outcome.parts
    assert parts[Part.RESTART] == 1 + 60 + 5
    assert parts[Part.REDO] == pytest.approx(3.0 + 4 * 15), "what was under way, then four steps by two pipelines"
    assert outcome.rates == ((0.0, 10.0), (247.0, 15.0))
    with_notice = Happening(at_s=217.0, kind=Kind.LEAVES, machine=5, grace_s=30.0)
    told = of("varuna", with_notice, lasts_s=1000.0)
    assert told.parts[Part.REDO] == pytest.approx(1.0 + 3 * 15), "since the notice only, at which step 21 had begun"
    late = of("varuna", with_notice, lasts_s=1000.0, save_s=31.0)
    assert (late.loads, late.parts[Part.REDO]) == (1, 10 * 15.0), "there is no time for another, nor to end this one"


def test_varuna_begins_anew_for_whoever_makes_another_pipeline():
    back = of("varuna", lost(247.0, 5), comes(500.0, PLACES), lasts_s=1000.0)
    assert back.rates[-1] == (500.0, 10.0)
    assert back.parts[Part.RESTART] == (1 + 60 + 5) + (2 + 60 + 5)
    more = of("varuna", comes(500.0, PLACES), lasts_s=1000.0)
    assert more.parts[Part.RESTART] == 0, "there is no place for it"


def test_bamboo_goes_on_but_for_two_beside_each_other():
    one = of("bamboo", lost(250.0, 1), lost(300.0, 3), lasts_s=1000.0)
    assert one.loads == 0
    assert one.rates[-1][1] == pytest.approx(10 / 0.71 * 1.5)
    two = of("bamboo", lost(250.0, 1), lost(300.0, 2), lasts_s=1000.0)
    assert two.loads == 1
    assert two.rates[-1][1] == pytest.approx(15 / 0.71), "the others go on without that pipeline, and miss nobody"
    apart = of("bamboo", lost(250.0, 3), lost(300.0, 4), lasts_s=1000.0)
    assert apart.loads == 0, "they are of two pipelines"


def test_oobleck_stands_still_at_each_change():
    outcome = of("oobleck", lost(105.0, 1), comes(505.0, PLACES), lasts_s=1000.0)
    assert outcome.parts[Part.RESTART] == (1 + 10) + 10
    assert [period for _, period in outcome.rates] == pytest.approx([10.0, 120 / 11, 10.0])


@pytest.mark.parametrize("name", ["elastic-batching", "torchft", "elastic-horovod"])
def test_pipelines_that_miss_somebody_are_dropped(name):
    outcome = of(name, lost(105.0, 1), lost(205.0, 2), lost(305.0, 4), lost(405.0, 8), lasts_s=1000.0)
    assert [period for _, period in outcome.rates] == [10.0, 15.0, 30.0, None], "two of the first are one"
    assert outcome.parts[Part.IDLE] > 500.0
    assert (outcome.loads > 0) == (name == "elastic-horovod")


def test_a_step_that_has_been_run_for_longer_than_it_takes_from_now_on_ends_at_once():
    """Begun by two pipelines, which take 15 s, and 13 s old as the third comes, with which it would take 10."""
    outcome = of("torchft", lost(105.0, 1), comes(123.0, PLACES), lasts_s=131.0)
    assert (outcome.steps, outcome.parts[Part.USEFUL]) == (11, 100.0 + 13.0 + 8.0)


def test_a_spare_takes_a_place_and_without_one_nobody_trains():
    spared = of("spare-nodes", lost(105.0, 1), machines=PLACES + 1, lasts_s=1000.0)
    assert (spared.parts[Part.IDLE], spared.parts[Part.RESTART], spared.failures) == (0.0, 66.0, 1)
    none = of("spare-nodes", lost(105.0, 1), comes(405.0, PLACES), lasts_s=1000.0)
    assert none.parts[Part.IDLE] == pytest.approx(300.0 - 66.0)
    assert none.parts[Part.RESTART] == 2 * 66.0
