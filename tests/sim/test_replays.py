"""One pipeline, every layer with one owner: whoever dies is replayed from logs, and the others keep their state."""

from __future__ import annotations

import os
import random
from functools import cache

import pytest
import torch

from holdfast.config.load import parse_job
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.runtime.engine.build import build_stage
from holdfast.runtime.engine.probing import probe
from holdfast.schedule.builders import regular_plan
from holdfast.settings.planning import healthy_plan
from holdfast.telemetry.events import Agreed, Notice, Replaying, Synced
from holdfast.telemetry.report import report
from holdfast.testing.scenario import Delays, Scenario
from holdfast.testing.virtual import VirtualCluster

STAGES, STEPS, EVERY = 4, 12, 5
SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
POINTS = ["start", "forward", "backward", "reduce", "verdict", "update", "commit"]


def run(*faults, seed=0, microbatches=4, plan=None, **options):
    plan = plan or regular_plan(1, split_evenly(2 * STAGES, STAGES), microbatches)
    parsed = tuple(Fault.parse(text) for text in faults)
    options = {"checkpoint_every": EVERY, "logs": True, **options}
    return VirtualCluster(Scenario(plan=plan, steps=STEPS, seed=seed, faults=parsed, **options)).run()


@cache
def healthy():
    return run()


def of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def check(result, *faults, like=healthy):
    assert result.outcome == "done", result.detail
    assert sorted(result.fired) == sorted(str(Fault.parse(text)) for text in faults)
    assert result.digest == like().digest


def replayed_alone(result):
    """Nobody went back to a checkpoint: what was lost was replayed."""
    assert of(result, Replaying)
    assert not [each for each in of(result, Notice) if "cannot be replayed" in each.text]
    steps = [event.step for event in of(result, Agreed)]
    assert steps == sorted(steps), "everybody went forward"


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("worker", ["0.0", "0.1", "0.3"])
def test_neighbours_replay_and_keep_what_was_lost(worker, point):
    fault = f"kill:{worker}@8:{point}"
    result = run(fault)
    check(result, fault)
    replayed_alone(result)
    assert [(event.start, event.stop - event.start > 1) for event in of(result, Replaying)] == [(5, True)]
    assert [failure.strategy for failure in report(result.events).failures] == ["logging"]


@pytest.mark.parametrize("point", POINTS)
def test_a_spare_replays(point):
    fault = f"kill:0.2@8:{point}"
    result = run(fault, spares=((0.0, WorkerId(1, 0)),))
    check(result, fault)
    replayed_alone(result)
    assert [event.workers for event in of(result, Replaying)] == [("1.0",)]


@pytest.mark.parametrize("point", POINTS)
def test_whoever_comes_while_all_wait_replays(point):
    faults = f"kill:0.1@8:{point}", "join:0.1@7"
    result = run(*faults, wait_for_replacement=30.0)
    check(result, *faults)
    replayed_alone(result)
    assert [event.workers for event in of(result, Replaying)] == [("0.1",)]


def test_two_neighbours_at_once_are_replayed_together():
    fault = "kill-node:1@8:backward"
    result = run(fault, workers_per_node=2, spares=((0.0, WorkerId(1, 0)), (0.0, WorkerId(1, 1))))
    check(result, fault)
    replayed_alone(result)
    assert [(event.layers, event.workers) for event in of(result, Replaying)] == [((4, 8), ("1.0", "1.1"))]


def test_two_apart_are_replayed_by_themselves():
    faults = "kill:0.0@8:forward", "kill:0.2@8:forward"
    result = run(*faults, spares=((0.0, WorkerId(1, 0)), (0.0, WorkerId(1, 1))))
    check(result, *faults)
    replayed_alone(result)
    last = max(event.generation for event in of(result, Replaying))
    found = sorted(event.layers for event in of(result, Replaying) if event.generation == last)
    assert found in ([(0, 2), (4, 6)], [(4, 6)], [(0, 2)])


def test_helpers_share_the_micro_batches():
    fault = "kill:0.1@8:forward"
    result = run(fault, spares=((0.0, WorkerId(1, 0)),), helpers=2)
    check(result, fault)
    replayed_alone(result)
    assert [event.workers for event in of(result, Replaying)] == [("0.0", "0.3", "1.0")], "neighbours last"


@pytest.mark.parametrize(("neighbour", "step"), [("0.0", 5), ("0.0", 7), ("0.2", 6)])
def test_where_a_step_is_missing_in_a_log_all_go_back_to_the_checkpoint(neighbour, step):
    fault, gap = "kill:0.1@8:backward", (WorkerId.parse(neighbour), step)
    result = run(fault, log_gaps=(gap,))
    assert result.outcome == "done", result.detail
    assert sorted(result.fired) == [fault, f"lose-log:{neighbour}@{step}"]
    assert result.digest == healthy().digest
    told = [each.text for each in of(result, Notice) if "cannot be replayed" in each.text]
    assert told
    assert "go back to the last checkpoint" in told[0]
    assert f"of step {step}" in told[0]
    assert of(result, Agreed)[-1].step == 5


def test_a_gap_that_a_checkpoint_lies_behind_costs_nothing():
    fault = "kill:0.1@8:backward"
    result = run(fault, log_gaps=((WorkerId(0, 0), 3),))
    assert sorted(result.fired) == [fault, "lose-log:0.0@3"]
    assert result.digest == healthy().digest
    replayed_alone(result)


@pytest.mark.parametrize("point", ["detect", "replay", "install"])
@pytest.mark.parametrize("other", ["0.0", "0.2"])
def test_a_neighbour_dies_while_the_other_recovers(other, point):
    step = 6 if point == "replay" else 8
    faults = "kill:0.1@8:forward", f"kill:{other}@{step}:{point}"
    result = run(*faults, helpers=3)
    check(result, *faults)


def test_the_replacement_dies_as_it_replays():
    faults = "kill:0.1@8:forward", "kill:1.0@6:replay"
    result = run(*faults, spares=((0.0, WorkerId(1, 0)), (0.0, WorkerId(1, 1))))
    check(result, *faults)
    assert len(of(result, Replaying)) == 2


def test_helpers_begin_anew_with_whoever_comes_in_the_place_of_one_who_died():
    """They were further: but all who share a replay begin with the checkpoint."""
    faults = "kill:0.1@8:forward", "kill:1.0@7:replay"
    result = run(*faults, spares=((0.0, WorkerId(1, 0)), (0.0, WorkerId(1, 1))), helpers=2)
    check(result, *faults)
    assert [(event.workers, event.start) for event in of(result, Replaying)] == [
        (("0.0", "0.3", "1.0"), 5),
        (("0.0", "0.3", "1.1"), 5),
    ]


def test_layers_of_one_node_are_replayed_together_though_one_process_died():
    fault = "kill:0.2@8:forward"
    result = run(fault, workers_per_node=2, spares=((0.0, WorkerId(1, 0)),))
    check(result, fault)
    replayed_alone(result)
    assert [event.layers for event in of(result, Replaying)] == [(4, 8)]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("first", ["0.0", "0.1", "0.2", "0.3"])
def test_the_next_loss_finds_what_was_replayed_and_gone_on_with(first, point):
    """The one who has replayed is lost next, and then its neighbour, with no checkpoint in between."""
    neighbour = "0.2" if first != "0.2" else "0.1"
    faults = f"kill:{first}@6:{point}", "kill:1.0@8:backward", f"kill:{neighbour}@9:forward"
    spares = tuple((0.0, WorkerId(1, index)) for index in range(3))
    result = run(*faults, spares=spares)
    check(result, *faults)
    replayed_alone(result)


@pytest.mark.parametrize("start", range(0, SEEDS, 10))
def test_anybody_at_any_effect(start):
    """One to three workers die at any effect, with spares, helpers, nodes and verdicts that refuse now and then."""
    died = replays = 0
    for seed in range(start, start + 10):
        source = random.Random(f"replays {seed}")
        counts = healthy().effects
        victims = source.sample(sorted(counts), source.randint(1, 3))
        deaths = tuple((worker, source.randrange(40, counts[worker] + 60)) for worker in victims)
        options = {
            "workers_per_node": source.choice([1, 1, 2]),
            "helpers": source.choice([0, 0, 1, 3]),
            "wait_for_replacement": source.choice([0.0, 3.0]),
            "spares": tuple((source.uniform(0, 3), WorkerId(1, i)) for i in range(source.randint(0, 2))),
        }
        if source.random() < 0.4:
            options["coordinator_deaths"] = ((source.uniform(1, 6), source.uniform(0.1, 1)),)
        if source.random() < 0.4:
            whose = sorted(set(counts) - {worker for worker, _ in deaths})
            options["broken_streams"] = tuple((source.uniform(0.5, 6), source.choice(whose)) for _ in range(3))
        try:
            result = run(seed=seed, kill_at_effect=deaths, **options)
            assert result.outcome == "done", result.detail
            assert result.digest == healthy().digest
        except BaseException:
            print(f"seed {seed}: {deaths} {options}")
            raise
        died += sum(text.startswith("kill:") for text in result.fired)
        replays += len(of(result, Replaying))
    assert died > 5
    assert replays > 3


WIDE = regular_plan(2, split_evenly(8, 4), 4)


@cache
def wide():
    return run(plan=WIDE)


def run_wide(*faults, **options):
    result = run(*faults, plan=WIDE, **options)
    check(result, *faults, like=wide)
    return result


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_stage_that_all_pipelines_lost_is_replayed_by_its_neighbours(stage, point):
    """Since the first one is gone, what is sent to the other is logged."""
    result = run_wide(f"kill:1.{stage}@2", f"kill:0.{stage}@8:{point}")
    replayed_alone(result)
    (last,) = of(result, Replaying)
    assert last.layers == (2 * stage, 2 * stage + 2)
    beside = [other for other in (stage - 1, stage + 1) if 0 <= other < 4]
    assert last.workers == tuple(f"{pipeline}.{other}" for pipeline in range(2) for other in beside)


def test_who_is_lost_beside_keeps_its_place_for_somebody_who_comes_later():
    soon = Delays(start=(0.05, 0.05))  # before the last step
    result = run_wide("kill:1.1@2", "kill:1.3@3", "kill:0.1@8:forward", "join:1.3@9", delays=soon)
    replayed_alone(result)
    assert [event.workers for event in of(result, Replaying)] == [("0.0", "0.2", "1.0", "1.2")]
    came = [event for event in of(result, Synced) if event.worker == "1.3"]
    assert [event.entered > 8 for event in came] == [True]


GPT = {
    "model": {"kind": "gpt", "layers": 4, "width": 8, "heads": 2, "context": 8, "dropout": 0.1},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 1, "stages": 4, "microbatches": 4, "microbatch_size": 1},
    "train": {"steps": STEPS, "seed": 1, "clip_norm": 0.5},
}


@pytest.fixture(scope="module")
def gpt():
    """Its first and its last layer share a weight."""
    torch.set_num_threads(1)
    job = parse_job(GPT)
    found = probe(job)
    plan = healthy_plan(job, len(found.boundaries))

    def stage(worker, plan):
        return build_stage(job, plan, worker, found.boundaries).stage

    @cache
    def run(*faults, **options):
        scenario = Scenario(
            plan=plan, steps=STEPS, seed=0, stage=stage, ties=found.ties, checkpoint_every=EVERY, logs=True,
            faults=tuple(map(Fault.parse, faults)), **options,
        )  # fmt: skip
        result = VirtualCluster(scenario).run()
        assert result.outcome == "done", result.detail
        assert sorted(result.fired) == sorted(faults)
        return result

    assert found.ties == ((0, 5),)
    return run


@pytest.mark.parametrize("point", POINTS)
def test_where_both_ends_of_a_tie_are_lost_they_are_replayed_side_by_side(gpt, point):
    result = gpt(f"kill:0.0@8:{point}", f"kill:0.3@8:{point}")
    assert result.digest == gpt().digest
    replayed_alone(result)
    ends = {end for event in of(result, Replaying) for end in event.layers}
    assert {0, 6} <= ends


def test_who_replayed_one_end_has_its_sums_for_whoever_replays_the_other(gpt):
    result = gpt("kill:0.0@8:forward", "kill:0.3@9:forward")
    assert result.digest == gpt().digest
    replayed_alone(result)
    assert len(of(result, Replaying)) == 2
