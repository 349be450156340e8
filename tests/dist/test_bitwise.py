"""Real processes, really killed: the weights end bitwise equal to those of the run in which nothing failed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.soak import some

from holdfast.control.chain.opening import plans_in
from holdfast.core.ids import WorkerId
from holdfast.errors import StateUnavailable
from holdfast.optim.digest import load_layer
from holdfast.telemetry.events import Agreed, FaultInjected, Installed, JobEnded, StepOps, read_events

pytestmark = pytest.mark.dist

POINTS = ["start", "forward", "backward", "reduce", "verdict", "update", "commit"]
MODELS = ["gpt", "convnet", "bert", "vit"]


def each_by_turns(values):
    """All values with the GPT, and by turns one with each other model, which test_pairwise has at every point, too."""
    gpt = [("gpt", value) for value in values]
    return some([*gpt, *((name, values[turn % len(values)]) for turn, name in enumerate(MODELS[1:], 1))], gpt)


@pytest.mark.parametrize(("name", "point"), each_by_turns(POINTS))
def test_one_kill_at_each_point_of_a_step(runs, name, point):
    summary = runs.survives(name, f"kill:1.2@2:{point}")
    assert summary.generations == 2
    (failure,) = summary.report.failures
    assert failure.detected_s is not None
    assert 0 < failure.detected_s < failure.resumed_s


@pytest.mark.parametrize("name", ["resnet", "nt3"])
def test_one_kill_of_other_models(runs, name):
    runs.survives(name, "kill:1.2@2:backward")


@pytest.mark.parametrize(("name", "point"), each_by_turns(["forward", "backward", "reduce"]))
def test_only_what_the_lost_worker_had_run_is_run_again(runs, name, point):
    summary, agreed = survived_in_step_2(runs, name, point)
    plan = plans_in(summary.run_dir / "control.db")[1]
    layers = plan.placement.layers_of(WorkerId(1, 2))
    numbers = {each.number for each in plan.routes.microbatches if each.pipeline == 1}
    assert agreed.goes_on
    assert {*agreed.redone, *agreed.regenerated} <= {(layer, number) for layer in layers for number in numbers}
    assert agreed.redone or agreed.concluded or point == "reduce"
    assert not agreed.regenerated or point != "forward", (
        "only of a layer whose sum all had, beside one whose sum they lack"
    )
    (failure,) = summary.report.failures
    lost = len(agreed.redone) + len(agreed.regenerated)
    assert failure.recomputed_microbatches - agreed.dropped == lost
    assert failure.recomputed_at_most >= failure.recomputed_microbatches


def survived_in_step_2(runs, name, point):
    """A run in which all survivors were in the step of the loss.

    On a busy machine one may still wait for a sum of the step before, which the others have used, and keep no more:
    then that step is run again whole. Or others have ended this one, by what the lost had contributed, and one waits
    for a sum of it: then what they had of it is run again.
    """
    for _ in range(3):
        summary = runs.survives(name, f"kill:1.2@2:{point}")
        events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
        (agreed,) = [event for event in events if isinstance(event, Agreed) and event.generation == 2]
        before = events[: events.index(agreed)]
        ended = any(isinstance(event, StepOps) and event.step == 2 for event in before)
        if agreed.step == 2 and (agreed.concluded or not ended):
            return summary, agreed
    raise AssertionError(f"in none of three runs all were in step 2: {agreed}")


@pytest.mark.parametrize(("name", "worker"), each_by_turns(["0.0", "2.1", "1.3"]))
def test_first_middle_and_last_stage(runs, name, worker):
    runs.survives(name, f"kill:{worker}@1:backward")


TIED = list(itertools.product(["gpt", "bert"], ["0.0", "1.3"], ["update", "commit"]))


@pytest.mark.parametrize(("name", "worker", "point"), some(TIED, [TIED[1], TIED[2], TIED[4], TIED[7]]))
def test_half_done_updates_at_both_ends_of_the_tied_weight(runs, name, worker, point):
    runs.survives(name, f"kill:{worker}@1:{point}")


def test_kill_in_the_first_and_in_the_last_step(runs):
    runs.survives("gpt", "kill:1.1@0:start", "kill:0.2@3:commit")


@pytest.mark.parametrize("name", some(["gpt", "vit"], ["gpt"]))
def test_two_kills_in_one_step_in_different_stages(runs, name):
    runs.survives(name, "kill:0.1@2:forward", "kill:2.3@2:forward")


@pytest.mark.parametrize("name", some(["gpt", "convnet"], ["convnet"]))
def test_two_kills_in_one_step_in_the_same_stage(runs, name):
    runs.survives(name, "kill:0.2@2:forward", "kill:1.2@2:forward")


@pytest.mark.parametrize(("name", "point"), each_by_turns(["detect", "install", "replay"]))
def test_kill_during_the_recovery_of_another(runs, name, point):
    # when half of its sums are made, all are in this step, and none can finish it
    summary = runs.survives(name, "kill:1.2@2:gradients:50", f"kill:0.1@2:{point}")
    assert summary.generations == 3, "the second failure is one more generation"


@pytest.mark.parametrize("name", some(["gpt", "convnet"], ["convnet"]))
def test_eight_of_twelve_lost_one_after_another(runs, name):
    victims = ["0.0", "1.1", "2.2", "0.3", "1.0", "2.1", "0.2", "1.3"]
    faults = [f"kill:{worker}@{step}:{POINTS[step % 7]}" for step, worker in enumerate(victims)]
    summary = runs.survives(name, *faults, overrides=("train.steps=10",))
    installed = [e for _, e in read_events(summary.run_dir / "events.jsonl") if isinstance(e, Installed)]
    assert len(installed[-1].workers) == 4, "one survivor per stage"
    assert summary.generations == 9


@pytest.mark.parametrize(("name", "grid"), each_by_turns([(1, 4, 9), (1, 1, 9), (3, 2, 3)]))
def test_the_same_hash_from_every_grid_of_the_same_global_batch(runs, name, grid):
    pipelines, stages, microbatches = grid
    other = (f"grid.pipelines={pipelines}", f"grid.stages={stages}", f"grid.microbatches={microbatches}")
    assert runs.healthy(name, other).weights_sha256 == runs.healthy(name).weights_sha256
    assert runs.healthy(name, other).state_sha256 == runs.healthy(name).state_sha256


@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_three_by_four_two_by_two_and_one_by_one(runs, name):
    """Twelve micro-batches, split three ways."""
    hashes = set()
    for pipelines, stages in [(3, 4), (2, 2), (1, 1)]:
        grid = (f"grid.pipelines={pipelines}", f"grid.stages={stages}", f"grid.microbatches={12 // pipelines}")
        summary = runs.healthy(name, (*grid, "train.steps=3"))
        hashes.add((summary.weights_sha256, summary.state_sha256, summary.final_loss))
    assert len(hashes) == 1


def test_different_seeds_give_different_hashes(runs):
    """The oracle can tell runs apart."""
    assert runs.healthy("gpt", ("train.seed=8",)).weights_sha256 != runs.healthy("gpt").weights_sha256


def test_micro_batches_in_other_chunks_are_summed_to_other_bits_the_same_on_every_grid(runs):
    chunks = ("train.sum_chunks=3", "train.steps=3")
    alone = runs.healthy("gpt", (*chunks, "grid.pipelines=1", "grid.stages=1", "grid.microbatches=12"))
    shared = (*chunks, "grid.pipelines=3", "grid.stages=1", "grid.microbatches=4")
    runs.survives("gpt", "kill:1.0@1:backward", overrides=shared, healthy=alone)
    plain = runs.healthy("gpt", ("grid.pipelines=1", "grid.stages=1", "grid.microbatches=12", "train.steps=3"))
    assert alone.weights_sha256 != plain.weights_sha256


def test_gpipe_ends_in_the_same_bits(runs):
    assert runs.healthy("gpt", ("train.technique=gpipe",)).weights_sha256 == runs.healthy("gpt").weights_sha256


@pytest.mark.parametrize(("technique", "point"), [("1f1b", "verdict"), ("staggered", "reduce")])
def test_clipping_and_schedules_are_exact_too(runs, technique, point):
    """The norm is that of all stages: the first, a middle and the last one lose a worker around it.

    Where a verdict comes after the update, whoever hears of it first rolls all back, often before 1.0 has heard of it.
    """
    overrides = ("train.clip_norm=0.05", "optimizer.schedule=cosine", "optimizer.warmup_steps=2")
    faults = (f"kill:1.0@1:{point}", "kill:0.1@2:commit", "kill:2.3@3:update")
    healthy = runs.healthy("gpt", overrides)
    runs.survives("gpt", *faults, overrides=(*overrides, f"train.technique={technique}"), healthy=healthy)
    assert runs.healthy("gpt", overrides).weights_sha256 != runs.healthy("gpt").weights_sha256


def test_fast_numerics_survive_too(runs):
    summary = runs.train("gpt", "kill:1.2@2:backward", overrides=("train.numerics=fast",))
    assert summary.report.fired == ("kill:1.2@2:backward",)
    healthy = runs.healthy("gpt", ("train.numerics=fast",))
    assert summary.final_loss == pytest.approx(healthy.final_loss, rel=1e-4)


def test_no_owner_left_saves_what_lives_and_names_the_layers(runs, executed_as_ordered):
    faults = ["kill:0.1@1:start", "kill:1.1@2:start", "kill:2.1@3:start"]
    with pytest.raises(StateUnavailable) as caught:
        runs.train("gpt", *faults)
    folder = Path(_folder_in(str(caught.value)))
    events = [event for _, event in read_events(folder.parent / "events.jsonl")]
    assert [event.spec for event in events if isinstance(event, FaultInjected)] == faults
    executed_as_ordered(folder.parent)
    assert caught.value.layers == (2,)
    saved = sorted(folder.glob("layer-*.safetensors"))
    assert [path.stem for path in saved] == ["layer-0000", "layer-0001", "layer-0003", "layer-0004"]
    (ended,) = (event for event in events if isinstance(event, JobEnded))
    assert {load_layer(path).step for path in saved} == {ended.step}
    assert ended.step in (2, 3), "the others may not have heard yet, as 2.1 dies, that step 2 is settled"


def _folder_in(message: str) -> str:
    return message.rsplit(" in ", 1)[1]
