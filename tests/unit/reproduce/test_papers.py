"""What computations come to beside the papers' numbers, where that is known for sure or was worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.config.profiles import load_profile
from holdfast.reproduce import here, oobleck, slipstream, swift
from holdfast.reproduce.facts import facts
from holdfast.reproduce.found import Verdict
from holdfast.reproduce.gpt3 import SHAPES, estimate
from holdfast.reproduce.jobs import HOUR_S, Experiment, come_and_go, one_by_one
from holdfast.reproduce.registry import ITEMS
from holdfast.sim.systems.rows import oobleck as published
from holdfast.sim.world import World


def rows(name):
    return {row.what: row for row in ITEMS[name].find(1).rows}


def by_verdict(name):
    found = {}
    for row in ITEMS[name].find(1).rows:
        found.setdefault(row.verdict, []).append(row.what)
    return found


def test_the_running_example_is_exact():
    found = rows("slipstream/example")
    assert [row.ours for row in found.values()] == [27, 36, 29, 27, 19]


def test_swifts_logs_and_whole_runs_come_out():
    assert set(by_verdict("swift/table3")) == {Verdict.MET}
    found = by_verdict("swift/table5")
    assert found[Verdict.NOT_MET] == ["Wide-ResNet-50: CheckFreq", "Wide-ResNet-50: Elastic Horovod"]
    assert found[Verdict.FITTED] == ["Wide-ResNet-50: SWIFT"]
    assert all(abs(row.gap) < 0.01 for row in rows("swift/table5").values() if row.verdict is Verdict.MET)


def test_the_formula_is_the_mean_of_what_failures_at_random_cost():
    """450,360 steps of 3.832 s with 28 failures between two checkpoints each, as in the paper; each drawn."""
    run, drawn = swift._run("Wide-ResNet-50"), random.Random(0)
    hours = []
    for _ in range(400):
        lost = sum(drawn.random() * run.every * run.step_s + 100.0 for _ in range(run.failures))
        hours.append(run.hours + run.steps / run.every * run.save_s / 3600 + lost / 3600)
    mean = sum(hours) / len(hours)
    spread = math.sqrt(sum((each - mean) ** 2 for each in hours) / len(hours))
    assert mean == pytest.approx(run.hours_with(1.0), abs=4 * spread / 20)
    assert spread / math.sqrt(10) == pytest.approx(run.error_h(1.0), rel=0.15)


@pytest.mark.parametrize("again", [1.0, 0.237])
def test_no_other_interval_is_better_than_the_best(again):
    run = swift._run("BERT-128")
    best = run.best_hours(again)
    others = [replace(run, every=50 * 1.2**power).hours_with(again) for power in range(40)]
    assert best <= min(others) + 1e-9
    assert min(others) < best * 1.0001


def test_one_of_swifts_groups_comes_of_neither_rule():
    found = rows("swift/table7")
    assert (found["rows that the authors' own rule makes"].ours, found["rows that section 5.3's rule makes"].ours) == (
        12,
        4,
    )
    others = [row for row in found.values() if row.unit == "s"]
    assert len(others) == 13
    assert {row.verdict for row in others} == {Verdict.MET, Verdict.BETTER}


def test_oobleck_comes_out_within_a_percent_of_its_authors_simulator():
    found = rows("oobleck/table2")
    theirs = {what: row for what, row in found.items() if what.endswith(": Oobleck")}
    assert len(theirs) == 15
    assert all(abs(row.gap) < 0.02 for row in theirs.values())
    assert found["GPT-3 6.7b, 10m: Varuna"].ours == 0
    ratio = found["GPT-3 6.7b, 10m: Oobleck over Varuna"]
    assert ratio.ours == math.inf
    assert ratio.reach[0] == pytest.approx(15.5, abs=0.1)


def test_an_average_of_the_measured_rates_is_the_column_without_losses():
    """Fifteen intervals on 30 to 16 nodes, without standing still."""
    for model, measured in facts("oobleck")["samples_per_s_by_nodes"]["oobleck"].items():
        mean = sum(measured[1:]) / 15
        assert mean == pytest.approx(facts("oobleck")["table2"]["rows"][model]["Oobleck"][0], rel=0.006)


def test_a_line_is_fitted_so_that_the_worst_point_is_as_near_as_can_be():
    assert oobleck._fit([1.0, 2.0, 4.0], [5.0, 7.0, 11.0])[0] < 1e-6
    off, line = oobleck._fit([1.0, 2.0, 3.0], [10.0, 12.0, 10.0])  # level, it is 1 of 11 off at each
    assert off == pytest.approx(1 / 11, rel=1e-4)
    assert line == pytest.approx([120 / 11] * 3, rel=1e-3)


def test_a_stall_gives_back_what_it_was_computed_from():
    lasts_s, losses = 6 * HOUR_S, 12
    ours = 0.9 * (lasts_s - losses * 10.0) / lasts_s
    stall = slipstream._stall_for(0.6, ours)
    assert 0.9 * (lasts_s - losses * stall) / lasts_s == pytest.approx(0.6)


def test_machines_come_and_go_as_in_the_trace():
    trace = facts("oobleck")["come_and_go_minute_come_gone"]["gcp"]
    world = come_and_go(trace, 45 * 60.0, 6 * HOUR_S)
    assert world.machines == 24
    counts = [count for _, count in world.available()]
    assert (max(counts), min(counts)) == (24, 15)
    assert sum(after < before for before, after in pairwise(counts)) == 20
    assert sum(after > before for before, after in pairwise(counts)) == 18
    assert world.mean_available() / 24 == pytest.approx(0.86, abs=0.005)


def test_losses_come_one_by_one_and_the_same_are_lost_however_often():
    often, rarely = (one_by_one(8, every, 60.0, seed="x") for every in (10.0, 20.0))
    assert [each.at_s for each in often.happenings] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert [each.machine for each in rarely.happenings] == [each.machine for each in often.happenings][:3]
    assert one_by_one(2, 10.0, 60.0, first_s=10.0).happenings[0].at_s == 10.0
    assert len(one_by_one(2, 10.0, 60.0).happenings) == 2


def test_a_job_of_a_paper_is_simulated_as_itself_and_by_other_systems():
    experiment = Experiment(profile=estimate(SHAPES[0]), grid=(3, 2, 4))
    ways = experiment.ways({"oobleck": published})
    whole, one_less = one_by_one(6, 1e9, 3600.0, first_s=1e9), one_by_one(6, 1e9, 3600.0)
    for become in ways.values():
        assert experiment.throughput(become(whole)) > experiment.throughput(become(one_less)) > 0.5
    assert ways["adaptive"](one_less).failures == 1
    assert experiment.adaptive.library is not None


def test_profiles_are_those_in_the_repository():
    for shape in SHAPES:
        assert estimate(shape) == load_profile(Path(__file__).parents[3] / "profiles" / f"{shape.name}.json")


@pytest.mark.parametrize("model", facts("swift")["table4"])
def test_what_runs_here_is_as_long_without_losses_as_the_papers_runs(model):
    steps, _, hours = facts("swift")["table4"][model]
    step_s = hours * HOUR_S / steps
    experiment = here._of_swift(model, step_s)
    job = experiment.job("adaptive", train={"steps": 1, "seed": 0, "technique": "1f1b"})
    found = experiment.become(job, World(machines=math.prod(experiment.grid[:2]), happenings=(), lasts_s=60.0))
    assert step_s <= found.healthy_s < 1.12 * step_s, "but for what travels between machines"


def test_what_runs_here_loses_to_failures_what_lies_between_checkpoints_or_next_to_nothing():
    printed = facts("swift")["table5"]["Wide-ResNet-50"][1:3]
    hours = [here._hours(("Wide-ResNet-50", name, 1)) for name in here._WAYS]
    assert hours == [pytest.approx(each, rel=share) for each, share in zip(printed, (0.08, 0.005), strict=True)]
