"""What happens to machines: drawn or read; the same for the same seed, and nobody is lost who is not there."""

from __future__ import annotations

import random
import re
import statistics

import pytest

from holdfast.errors import ConfigError
from holdfast.sim.failures import FORMS, Failures, parse_failures
from holdfast.sim.traces import read_trace
from holdfast.sim.world import Happening, Kind, World, check

HOUR = 3600.0
EVENTS = "0,add,a\n0,add,b\n60000,remove,a\n60000,add,c\n\n120000,remove,c\n"


def written(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_of_events_is_read_as_it_is_written(tmp_path):
    world = check(read_trace(written(tmp_path, EVENTS)))
    assert (world.machines, world.lasts_s, world.failures) == (2, 120.0, 1)
    assert [(each.at_s, each.kind, each.machine) for each in world.happenings] == [
        (60.0, Kind.LOST, 0),
        (60.0, Kind.COMES, 2),
    ]
    assert world.available() == ((0.0, 2), (60.0, 2))
    longer = read_trace(written(tmp_path, EVENTS), lasts_s=200.0)
    assert longer.available()[-1] == (120.0, 1)
    assert longer.mean_available() == pytest.approx((120 * 2 + 80) / 200)


def test_a_trace_tells_who_is_slow_and_until_when(tmp_path):
    world = check(read_trace(written(tmp_path, "0,add,a\n0,add,b\n1000,slow=2.5,b\n3000,slow=1,b\n"), lasts_s=9.0))
    assert [(each.at_s, each.kind, each.machine, each.factor) for each in world.happenings] == [
        (1.0, Kind.SLOWS, 1, 2.5),
        (3.0, Kind.SLOWS, 1, 1.0),
    ]
    assert world.available() == ((0.0, 2),)


def test_a_trace_begins_when_the_first_machine_is_there(tmp_path):
    world = read_trace(written(tmp_path, "480000,add,a\n540000,add,b\n600000,remove,b\n"), lasts_s=1000.0)
    assert world.machines == 1
    assert [each.at_s for each in world.happenings] == [60.0, 120.0]


def test_of_numbers_it_is_drawn_who_is_lost(tmp_path):
    path = written(tmp_path, "t_ms,available\n0,9\n1000,4\n2000,6\n3000,0\n")
    worlds = [check(read_trace(path, lasts_s=10.0, seed=seed)) for seed in (1, 1, 2)]
    assert worlds[0] == worlds[1] != worlds[2]
    assert worlds[0].available() == ((0.0, 9), (1.0, 4), (2.0, 6), (3.0, 0))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0,add,a\n5,drop,a\n", r"trace.csv:2: expected t_ms,add\|remove\|slow=FACTOR,NAME, got '5,drop,a'"),
        ("0,add,a\n5,slow,a\n", r"trace.csv:2: expected t_ms,add\|remove\|slow=FACTOR,NAME"),
        ("0,add,a\n5,remove=2,a\n", r"trace.csv:2: expected t_ms,add\|remove\|slow=FACTOR,NAME"),
        ("0,add,a\n5,slow=0,a\n", "trace.csv:2: slow=: expected a number above 0, got '0'"),
        ("0,add,a\n5,slow=2,b\n", "trace.csv:2: slows b, which is not there"),
        ("0,add,a\n5,remove\n", "trace.csv:2: expected t_ms"),
        ("0,add,a\n5,remove,b\n", "trace.csv:2: removes b, which is not there"),
        ("0,add,a\n\n5,add,a\n", "trace.csv:3: adds a again"),
        ("0,add,a\n5,remove,a\n3,add,b\n", "trace.csv:3: time goes back from 5 to 3"),
        ("-1,add,a\n", "trace.csv:1: expected milliseconds, a whole number from 0, got '-1'"),
        ("nan,add,a\n", "trace.csv:1: expected milliseconds"),
        ("t_ms,available\n0,4\n5,many\n", "trace.csv:3: expected t_ms,available, two whole numbers, got '5,many'"),
        ("t_ms,available\n9,4\n5,3\n", "trace.csv:3: time goes back from 9 to 5"),
        ("t_ms,available\n0,0\n", "expected machines, got none"),
        ("", "expected lines such as"),
        ("\x00\n", "expected t_ms"),
    ],
)
def test_what_is_wrong_in_a_trace_is_told_with_its_line(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told):
        read_trace(written(tmp_path, text))


def test_a_trace_that_is_not_there_or_no_text_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"gone.csv: cannot be read: No such file"):
        read_trace(tmp_path / "gone.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes.csv: cannot be read"):
        read_trace(tmp_path / "bytes.csv")


@pytest.mark.parametrize(
    "text",
    [
        "periodic:30m",
        "periodic:30m,repair=1h",
        "poisson:mtbf=20m,repair=1h,notice=2m",
        "weibull:mtbf=20m,shape=0.6,repair=10m",
        "racks:mtbf=1h,size=3,repair=2h",
        "poisson:mtbf=2h,repair=1h,notice=2m,stragglers=10m,factor=3,stay=1h",
        "spot:ec2-p3,stragglers=10m,factor=3,stay=1h",
    ],
)
def test_whatever_is_drawn_makes_sense_and_is_the_same_for_the_same_seed(text):
    failures = parse_failures(text)
    for seed in range(6):
        world = check(failures.draw(9, 48 * HOUR, f"{seed}"))
        assert world == failures.draw(9, 48 * HOUR, f"{seed}")
        assert all(0 < each.at_s < world.lasts_s for each in world.happenings)
        assert all(count >= 0 for _, count in world.available())
    assert failures.draw(9, 48 * HOUR, "0") != failures.draw(9, 48 * HOUR, "1")


@pytest.mark.parametrize("text", ["poisson:mtbf=30m,repair=1m", "weibull:mtbf=30m,shape=0.7,repair=1m"])
def test_failures_are_as_far_apart_as_was_asked_for(text):
    counts = [parse_failures(text).draw(9, 100 * HOUR, f"{seed}").failures for seed in range(20)]
    assert statistics.fmean(counts) == pytest.approx(200, rel=0.1)


def test_a_rack_is_lost_whole_and_without_repair_nobody_comes():
    world = parse_failures("racks:mtbf=1h,size=3").draw(9, 24 * HOUR, "0")
    lost = [each.machine for each in world.happenings]
    assert {each.kind for each in world.happenings} == {Kind.LOST}
    assert sorted(lost) == list(range(9)), "until nobody is left"
    assert all(lost[i] // 3 == lost[i + 1] // 3 == lost[i + 2] // 3 for i in range(0, 9, 3))


def test_whoever_gives_notice_is_gone_later():
    world = parse_failures("periodic:1h,notice=5m").draw(4, 2.5 * HOUR, "0")
    assert [(each.kind, each.grace_s) for each in world.happenings] == [(Kind.LEAVES, 300.0)] * 2
    assert world.available() == ((0.0, 4), (HOUR + 300, 3), (2 * HOUR + 300, 2))


def test_stragglers_are_slow_for_as_long_as_they_are_there_and_change_nothing_else():
    losses = parse_failures("poisson:mtbf=2h,repair=1h").draw(9, 48 * HOUR, "0")
    world = parse_failures("poisson:mtbf=2h,repair=1h,stragglers=30m,factor=3,stay=1h").draw(9, 48 * HOUR, "0")
    assert tuple(each for each in world.happenings if each.kind is not Kind.SLOWS) == losses.happenings
    assert (world.failures, world.available()) == (losses.failures, losses.available())
    slow, lost_while_slow, lasted = {}, 0, []
    for each in world.happenings:
        if each.kind is Kind.SLOWS and each.factor == 1.0:
            lasted.append(each.at_s - slow.pop(each.machine))
        elif each.kind is Kind.SLOWS:
            assert each.factor == 3.0
            assert each.machine not in slow, "one that is slow already is not drawn"
            slow[each.machine] = each.at_s
        elif each.goes:
            lost_while_slow += slow.pop(each.machine, None) is not None
    assert lasted == pytest.approx([HOUR] * len(lasted))
    assert lost_while_slow
    assert len(lasted) + lost_while_slow + len(slow) == pytest.approx(96, rel=0.2)


@pytest.mark.parametrize(
    "text",
    [
        "poisson",
        "poisson:",
        "poisson:mtbf=1x",
        "poisson:mtbf=-1h",
        "poisson:mtbf=1h,shape=2",
        "poisson:mtbf=1h,again=2h",
        "weibull:mtbf=1h",
        "weibull:mtbf=1h,shape=nan",
        "racks:mtbf=1h",
        "periodic:1h,repair=0h",
        "periodic:inf",
        "hourly:1h",
        "poisson:mtbf=1h,stragglers=1h,factor=x,stay=1h",
    ],
)
def test_what_is_no_way_to_fail_is_told_with_what_is(text):
    with pytest.raises(ConfigError, match=f"{re.escape(FORMS)}|expected a (time|number)|cannot be read"):
        parse_failures(text).draw(3, HOUR, "0")


def test_a_world_that_makes_no_sense_is_refused():
    def world(*happenings):
        return World(machines=2, happenings=happenings, lasts_s=10.0)

    def lost(at, machine):
        return Happening(at_s=at, kind=Kind.LOST, machine=machine)

    with pytest.raises(ConfigError, match="machine 0 is lost at 2 s, and is not there"):
        check(world(lost(1, 0), lost(2, 0)))
    with pytest.raises(ConfigError, match="time goes back from 2 s to 1 s"):
        check(world(lost(2, 0), lost(1, 1)))
    with pytest.raises(ConfigError, match="machine 1 comes at 1 s, and has been there before"):
        check(world(Happening(at_s=1, kind=Kind.COMES, machine=1)))
    assert Failures(kind="periodic", gap_s=random.Random(0).uniform(1, 2)).draw(1, 5.0, "").failures == 1


def test_bursts_come_when_they_are_said_to_and_are_as_dense():
    """A failure every 20 h, and for one hour in eight one every 2 minutes."""
    failures = parse_failures("bursts:mtbf=20h,every=8h,lasts=1h,burst=2m,repair=10m")
    worlds = [check(failures.draw(64, 24 * HOUR, str(seed))) for seed in range(20)]
    lost = [each.at_s / HOUR for world in worlds for each in world.happenings if each.kind is Kind.LOST]
    within = [at for at in lost if at % 8 >= 7]
    assert len(within) / 20 == pytest.approx(3 * 30, rel=0.1)
    assert (len(lost) - len(within)) / 20 == pytest.approx(21 / 20, rel=0.5)
    assert failures.draw(64, 24 * HOUR, "3") == worlds[3]


@pytest.mark.parametrize(
    "text",
    [
        "bursts:mtbf=20h,every=8h,lasts=8h,burst=2m",
        "bursts:mtbf=20h,every=8h,lasts=1h",
        "poisson:mtbf=20h,burst=2m",
        "weibull:mtbf=17h",
        "racks:mtbf=17h,shape=2",
        "poisson:mtbf=17h,stragglers=1h,factor=2",
        "poisson:mtbf=17h,stragglers=1h,factor=1,stay=1h",
    ],
)
def test_what_does_not_go_together_is_told(text):
    with pytest.raises(ConfigError, match=re.escape(f"--trace {text}: ")):
        parse_failures(text)
