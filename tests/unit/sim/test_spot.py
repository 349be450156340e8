"""Spot machines come and go as those of a trace did."""

from __future__ import annotations

import statistics
from dataclasses import fields

import pytest

from holdfast.errors import ConfigError
from holdfast.sim.failures import parse_failures
from holdfast.sim.spot import KNOWN, Spot, fitted
from holdfast.sim.world import Kind, World, check

DAY = 86_400.0


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_drawn_is_like_what_it_was_fitted_to(name):
    spot = KNOWN[name]
    again = [fitted(spot.draw(spot.most, 20 * DAY, str(seed))) for seed in range(4)]
    for each in fields(Spot):
        value, found = getattr(spot, each.name), statistics.fmean(getattr(one, each.name) for one in again)
        assert found == pytest.approx(value, rel=0.3 if each.name in ("come", "spread") else 0.15), each.name


@pytest.mark.parametrize("machines", [3, 24, 200])
def test_there_never_are_more_machines_than_the_job_began_with_nor_none(machines):
    world = KNOWN["ec2-p3"].draw(machines, 2 * DAY, "0")
    counts = [count for _, count in check(world).available()]
    assert (max(counts), min(counts) > 0) == (machines, True)
    assert world == KNOWN["ec2-p3"].draw(machines, 2 * DAY, "0") != KNOWN["ec2-p3"].draw(machines, 2 * DAY, "1")


@pytest.mark.parametrize("machines", [8, 16, 64])
def test_each_machine_goes_as_often_as_those_did(machines):
    spot = KNOWN["ec2-p3"]

    def per_machine(of):
        world = spot.draw(of, 20 * DAY, "0")
        lost = sum(each.kind is Kind.LOST for each in world.happenings)
        return lost / world.mean_available() / world.lasts_s

    assert per_machine(machines) == pytest.approx(per_machine(spot.most), rel=0.25)


def test_machines_that_give_notice_leave():
    failures = parse_failures("spot:ec2-p3,notice=2m")
    assert failures.gap_s == KNOWN["ec2-p3"].gap_s, "by which `advise` knows for how long to simulate"
    world = failures.draw(24, DAY, "0")
    assert {each.kind for each in world.happenings} == {Kind.LEAVES, Kind.COMES}
    assert {each.grace_s for each in world.happenings if each.kind is Kind.LEAVES} == {120.0}


def test_a_trace_of_ones_own_is_fitted(tmp_path):
    trace = tmp_path / "mine.csv"
    rows = [f"{minute * 60_000},{available}" for minute, available in enumerate([8, 6, 7, 8, 5, 8, 7, 8] * 6)]
    trace.write_text("t_ms,available\n" + "\n".join(rows))
    spot = parse_failures(f"spot:{trace}").spot
    assert (spot.most, spot.gap_s) == (8, pytest.approx(67.5))  # twice eight follows eight
    assert spot.draw(8, DAY, "0").happenings
    trace.write_text("t_ms,available\n0,8\n60000,7\n")
    with pytest.raises(ConfigError, match="machines go and come at three instants or more"):
        parse_failures(f"spot:{trace}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("spot:mars", "expected spot: and one of ec2-p3, ec2-g4dn, gcp-a100, gcp-v100, or the path of a trace"),
        ("spot:", "expected such as spot:ec2-p3,notice=2m"),
        ("spot:ec2-p3,repair=1h", "expected such as spot:ec2-p3,notice=2m"),
        ("spot:ec2-p3,notice=soon", "expected a time such as"),
    ],
)
def test_what_is_none_is_told(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_failures(text)


def test_too_little_is_told():
    with pytest.raises(ConfigError, match="three instants"):
        fitted(World(machines=3, happenings=(), lasts_s=10.0))
