"""What a job is best told: the grids that are tried, how many machines are missing, and how often it is saved."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.unit.cli.test_simulate import JOB
from tests.unit.sim.test_engine import comes, lost, world

from holdfast.config.job import Cluster
from holdfast.config.load import load_job
from holdfast.errors import ConfigError
from holdfast.settings.planning import sums_of
from holdfast.sim.advice import AS_IT_IS, advise, missing_of
from holdfast.sim.failures import parse_failures
from holdfast.sim.prepare import profile_needed, speeds_of

SLOW = Cluster(start_s=60.0, detect_s=1.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("advice") / "job.yaml"
    found.write_text(JOB)
    return found


def advised(path, *overrides, trace="poisson:mtbf=1h,repair=30m", hours=1.5, **more):
    def job_with(settings):
        return load_job(path, [*overrides, *(f"{key}={value}" for key, value in settings)])

    job = job_with(())
    profile = profile_needed(job, 26)
    worlds = [
        parse_failures(trace).draw(job.num_workers // job.grid.workers_per_node, hours * 3600, str(run))
        for run in range(2)
    ]
    return advise(job_with, profile, worlds, speeds_of(profile, SLOW, sums=sums_of(job)), **more), job_with


@pytest.fixture(scope="module")
def plain(path):
    return advised(path)


def test_what_is_best_is_no_worse_than_what_is_and_trains_to_the_same_bits(plain):
    advice, job_with = plain
    assert advice.ranked[0][1].throughput >= advice.as_it_is.throughput
    assert all(one[1].throughput >= other[1].throughput for one, other in pairwise(advice.ranked))
    assert {each.row.name for each, _ in advice.ranked} == {
        "auto",
        "adaptive",
        "templates",
        "checkpoint-restart",
        "checkfreq",
    }
    assert "snapshot_every" in advice.refused["3 x 2, snapshots"]
    assert all(name.endswith(", snapshots") for name in advice.refused)
    for candidate, compared in advice.ranked:
        job = job_with(candidate.settings)
        assert (job.num_workers, job.samples_per_step) == (6, 24)
        assert len(compared.outcomes) == 2
    assert job_with(advice.changes) == job_with(advice.best.settings)
    assert AS_IT_IS not in {each.name for each, _ in advice.ranked}


def test_no_grid_is_tried_for_which_workers_have_no_memory(path, plain):
    free, _ = advised(path, memory_bytes=1e12, hours=1.0)
    assert not free.too_large
    shapes = {(each.shape.pipelines, each.shape.stages): each.shape for each, _ in free.ranked}
    assert (6, 1) in shapes, "of as many pipelines as workers nobody waits for another one"
    limit = shapes[6, 1].memory_bytes - 1
    bound, _ = advised(path, memory_bytes=limit, hours=1.0)
    assert {(each.pipelines, each.stages) for each in bound.too_large} >= {(6, 1)}
    assert all(each.shape.memory_bytes <= limit for each, _ in bound.ranked)
    assert dict(bound.best.settings).get("resilience.worker_memory", limit) == limit
    assert not bound.assumes_memory
    tried = {each.name: dict(each.settings)["logging.use"] for each, _ in bound.ranked}
    assert tried["1 x 6, adaptive"] == "auto", "what crosses its nodes is logged"
    assert tried["1 x 6, adaptive without logs"] == "off"
    assert {name for name in tried if name.endswith("without logs")} == {
        "1 x 6, adaptive without logs",
        "1 x 6, auto without logs",
    }
    as_if, _ = plain
    assert as_if.assumes_memory
    assert as_if.memory_bytes == 2 * as_if.own.memory_bytes


def test_workers_that_are_lost_together_count_together(path):
    pairs, _ = advised(path, "grid.workers_per_node=2", trace="periodic:30m,repair=10m", hours=1.5)
    assert pairs.missing.most == pairs.missing.mostly == 1
    tolerated = {each.shape.stages: dict(each.settings)["resilience.tolerate"] for each, _ in pairs.ranked}
    assert tolerated[2] == 1, "four of six workers are left, which are two pipelines"
    assert tolerated[1] == 2


def test_a_grid_of_unlike_pipelines_stays_as_it_is(path):
    layout = "grid.layout=[{stages: [13, 13], microbatches: 6}, {stages: [6, 7, 7, 6], microbatches: 6}]"
    advice, _ = advised(path, layout)
    assert {str(each.shape) for each, _ in advice.ranked} == {str(advice.own)}
    assert not any(key.startswith("grid.") for key, _ in advice.changes)


def test_who_goes_back_at_each_failure_is_saved_more_often(plain):
    advice, _ = plain
    every = {each.name: each.interval for each, _ in advice.ranked}
    often, seldom = (every[f"3 x 2, {name}"] for name in ("checkpoint-restart", "adaptive"))
    assert often.every < seldom.every
    assert every["3 x 2, checkfreq"].every == 0
    shape = advice.own
    assert often.every == round(math.sqrt(2 * shape.stall_s * often.between_s) / shape.step_s)


def test_a_job_that_cannot_be_simulated_is_told_why(path):
    with pytest.raises(ConfigError, match="audits are not simulated yet"):
        advised(path, "train.audit_every=9")


def test_missing_machines_are_counted_by_the_time_that_they_are_missing():
    hour = 3600.0
    brief = world(lost(0.1 * hour, 0), comes(0.9 * hour, 6), lost(5 * hour, 1), lost(5 * hour, 2), hours=1000)
    found = missing_of([replace(brief, machines=6)])
    assert (found.mostly, found.most) == (2, 2)
    gone = world(lost(0.1 * hour, 0), lost(0.2 * hour, 1), comes(0.21 * hour, 6), comes(0.9 * hour, 7), hours=100)
    found = missing_of([replace(gone, machines=6)] * 3)
    assert (found.mostly, found.most) == (0, 2)
    assert missing_of([world()]).most == 0


def test_nodes_are_grouped_where_logs_would_take_too_much(path):
    """A pipeline of six nodes, which is the only grid that workers have memory for."""
    flags = ("grid.pipelines=1", "grid.stages=6", "grid.microbatches=12")
    free, _ = advised(path, *flags, memory_bytes=1, hours=0.5)
    assert {str(each.shape) for each, _ in free.ranked} == {"1 x 6"}
    logged = next(each for each, _ in free.ranked if each.name == "1 x 6, adaptive")
    assert logged.grouping.groups == tuple((node,) for node in range(6))
    assert "logging.groups" not in dict(logged.settings)
    limit = logged.grouping.storage_bytes / 2
    bound, job_with = advised(path, *flags, memory_bytes=1, log_bytes=limit, hours=0.5)
    grouped = [each for each, _ in bound.ranked if each.grouping is not None]
    assert [each.row.name for each in grouped] == ["adaptive"], "the others that log make pipelines, and lack memory"
    for each in grouped:
        assert 0 < each.grouping.storage_bytes <= limit
        groups = dict(each.settings)["logging.groups"]
        assert groups == [list(group) for group in each.grouping.groups if len(group) > 1]
        assert job_with(each.settings).logging.groups == tuple(map(tuple, groups))
    none, _ = advised(path, *flags, memory_bytes=1, log_bytes=0, hours=0.5)
    assert all(each.grouping is None for each, _ in none.ranked)
    names = {each.name for each, _ in none.ranked}
    assert "1 x 6, adaptive without logs" in names
    assert "1 x 6, adaptive" not in names
