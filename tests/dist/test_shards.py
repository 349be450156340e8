"""Stages of several GPUs with fast numerics: a worker that is several processes, over which FSDP2 shards its layers."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from tests.soak import some

from holdfast.control.chain.opening import plans_in
from holdfast.errors import ConfigError
from holdfast.optim.digest import layer_file, load_layer
from holdfast.optim.loss_scale import LossScale
from holdfast.runtime.node.forks import is_gone
from holdfast.telemetry.events import HandingOver, Notice, Synced, WorkerReady, read_events

pytestmark = pytest.mark.dist

FAST = ("train.numerics=fast", "train.steps=10", "model.dropout=0")
"""Ranks draw other random numbers than one process does."""
ALONE = (*FAST, "grid.layout=[{stages: [6], microbatches: 8}]")
"""One process, which has all layers and all micro-batches."""
WIDE = (*FAST, "grid.layout=[{stages: [3, 3], gpus: [1, 2], microbatches: 5}, {stages: [6], microbatches: 3}]")
"""A stage of two GPUs beside two of one, with the last layer, whose weight is tied to the first one's."""
FAST_HALVED = ("control.hang_s=15", "train.numerics=fast", "train.steps=10", "grid.microbatch_size=2")
NEAR = {"rel": 1e-5}


def of_stages(sizes, gpus, microbatches=8):
    return (*FAST, f"grid.layout=[{{stages: {sizes}, gpus: {gpus}, microbatches: {microbatches}}}]")


def companions_of(folder, worker):
    """The processes of a worker, but for the one that the agent knows."""
    events = [event for _, event in read_events(folder / "events.jsonl") if isinstance(event, WorkerReady)]
    (pid,) = [event.pid for event in events if event.worker == worker]
    return psutil.Process(pid).children()


GRIDS = {
    "one end": WIDE,
    "all layers": of_stages([6], [2]),
    "the middle": of_stages([2, 2, 2], [1, 2, 1]),
    "decoupled": (*of_stages([3, 3], [2, 2]), "train.technique=decoupled"),
    "run again": (*of_stages([3, 3], [2, 1]), "model.checkpoint_activations=true", "train.technique=gpipe"),
    "all stages": (
        *FAST,
        "grid.layout=[]",
        "grid.pipelines=2",
        "grid.stages=2",
        "grid.microbatches=4",
        "grid.gpus_per_stage=2",
    ),
}


@pytest.mark.parametrize("grid", some(GRIDS, ["one end", "the middle", "decoupled", "run again"]))
def test_the_losses_are_those_of_one_process(runs, grid):
    summary = runs.train("unlike", overrides=GRIDS[grid])
    assert summary.steps == 10
    assert summary.final_loss == pytest.approx(runs.healthy("unlike", ALONE).final_loss, **NEAR)
    assert runs.distance(summary, runs.healthy("unlike", ALONE)) < 1e-3


def test_an_update_ahead_of_its_verdict_is_made_again(runs):
    """What FSDP2 had gathered of the first update must not be used any more."""
    clipped = ("train.clip_norm=0.5",)
    overrides = (*of_stages([3, 3], [2, 2]), *clipped, "train.technique=staggered")
    summary = runs.train("unlike", overrides=overrides)
    assert summary.generations > 1, "some update did not stand"
    assert summary.final_loss == pytest.approx(runs.healthy("unlike", (*ALONE, *clipped)).final_loss, **NEAR)


def test_a_scale_of_the_loss_grows_alike_on_all_ranks(runs):
    """In so many steps that it is doubled twice; with a kill of a leader, whose layers another one has whole."""
    scaled = ("train.loss_scale={initial: 1024, growth_every: 4}",)
    alone = runs.healthy("unlike", (*ALONE, *scaled))
    for grid, faults in ((of_stages([3, 3], [2, 2]), ()), (WIDE, ("kill:0.1@6:backward",))):
        summary = runs.train("unlike", *faults, overrides=(*grid, *scaled))
        assert summary.unfired == ()
        assert summary.final_loss == pytest.approx(alone.final_loss, **NEAR)
        assert runs.distance(summary, alone) < 1e-3
        files = [load_layer(layer_file(folder / "final", 0)) for folder in (alone.run_dir, summary.run_dir)]
        assert files[0].loss_scale == files[1].loss_scale == LossScale(value=4096.0, streak=2)


def test_parameters_of_fewer_bits_are_trained_as_by_one_process(runs):
    """They are summed as float32; a kill has their layers come whole from another pipeline."""
    alone = runs.healthy("halved", (*FAST_HALVED, "grid.layout=[{stages: [5], microbatches: 8}]"))
    wide = "grid.layout=[{stages: [2, 3], gpus: [1, 2], microbatches: 5}, {stages: [5], microbatches: 3}]"
    for faults in ((), ("kill:0.1@6:backward",)):
        summary = runs.train("halved", *faults, overrides=(*FAST_HALVED, wide))
        assert summary.unfired == ()
        assert summary.final_loss == pytest.approx(alone.final_loss, rel=0.02)
        assert runs.distance(summary, alone) < 0.01
        state = load_layer(layer_file(summary.run_dir / "final", 2))
        assert {str(value.dtype) for value in state.parameters.values()} == {"torch.bfloat16"}


def test_with_random_numbers_it_is_the_same_every_time(runs):
    overrides = (*of_stages([3, 3], [2, 1]), "model.dropout=0.1")
    one, other = (runs.train("unlike", overrides=overrides) for _ in range(2))
    assert (one.weights_sha256, one.final_loss) == (other.weights_sha256, other.final_loss)
    assert one.weights_sha256 != runs.train("unlike", overrides=of_stages([3, 3], [2, 1])).weights_sha256


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_companion_is_lost_and_so_its_worker(runs, number):
    """It has the layers of another pipeline's worker, which goes on; and nothing is left of it."""
    folder, struck = runs.folder() / "run", []

    def strike(progress):
        if progress.step >= 2 and not struck:
            (companion,) = companions_of(folder, "0.1")
            struck.append(companion.pid)
            os.kill(companion.pid, number)

    steps = "train.steps=60"
    limit = ("control.hang_s=2",) if number == signal.SIGSTOP else ()
    summary = runs.train("unlike", overrides=(*WIDE, steps, *limit), run_dir=folder, on_progress=strike)
    assert len(struck) == 1
    assert is_gone(struck[0])
    assert [failure.worker for failure in summary.report.failures] == ["0.1"]
    assert (summary.steps, summary.generations) == (60, 2)
    assert summary.final_loss == pytest.approx(runs.healthy("unlike", (*ALONE, steps)).final_loss, **NEAR)
    told = [event.text for _, event in read_events(folder / "events.jsonl") if isinstance(event, Notice)]
    assert any("GPU 1 of its stage" in text for text in told) == (number == signal.SIGKILL)


def test_companions_end_with_their_worker(runs):
    folder, seen = runs.folder() / "run", []

    def look(progress):
        if not seen:
            seen.extend(each.pid for each in companions_of(folder, "0.1"))

    summary = runs.train("unlike", "kill:0.1@4:backward", overrides=WIDE, run_dir=folder, on_progress=look)
    assert summary.report.fired == ("kill:0.1@4:backward",)
    assert len(seen) == 1
    assert is_gone(seen[0])
    assert summary.final_loss == pytest.approx(runs.healthy("unlike", ALONE).final_loss, **NEAR)


def test_one_comes_back_and_gets_its_layers_from_a_worker_of_one_gpu(runs):
    steps = "train.steps=60"
    summary = runs.train("unlike", "kill:0.1@2:commit", "join:0.1@4", overrides=(*WIDE, steps))
    assert sorted(summary.report.fired) == ["join:0.1@4", "kill:0.1@2:commit"]
    synced = [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, Synced)]
    assert [event.worker for event in synced] == ["0.1"]
    assert summary.final_loss == pytest.approx(runs.healthy("unlike", (*ALONE, steps)).final_loss, **NEAR)


TWO_EACH = ("grid.pipelines=2", "grid.stages=3", "grid.microbatches=4", "grid.gpus_per_stage=2", "train.steps=20")


def test_workers_of_two_gpus_each_become_other_pipelines(runs):
    """Two of three stages: one is lost, and the others are two and three, each in the process that it was."""
    overrides = (*FAST, "grid.layout=[]", *TWO_EACH, "resilience.strategy=templates", "resilience.smallest_pipeline=2")
    summary = runs.train("unlike", "kill:1.1@2:backward", overrides=overrides)
    assert summary.report.fired == ("kill:1.1@2:backward",)
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    assert [event for event in events if isinstance(event, HandingOver)], "layers have gone over"
    assert len([event for event in events if isinstance(event, WorkerReady)]) == 6
    plans = plans_in(summary.run_dir / "control.db")
    assert sorted({len(route.workers) for route in plans[max(plans)].routes.routes}) == [2, 3]
    assert summary.final_loss == pytest.approx(runs.healthy("unlike", (*ALONE, TWO_EACH[-1])).final_loss, **NEAR)


def test_a_spare_has_as_many_gpus_as_all_others(runs):
    folder, seen = runs.folder() / "run", []

    def look(progress):
        if not seen:
            seen.extend(each.pid for each in companions_of(folder, "2.0"))

    overrides = (*FAST, "grid.layout=[]", *TWO_EACH, "resilience.spares=1")
    summary = runs.train("unlike", "kill:1.1@2:backward", overrides=overrides, run_dir=folder, on_progress=look)
    assert len(seen) == 1
    assert [(each.worker, each.replaced_by) for each in summary.report.failures] == [("1.1", "2.0")]
    assert summary.final_loss == pytest.approx(runs.healthy("unlike", (*ALONE, TWO_EACH[-1])).final_loss, **NEAR)


@pytest.mark.parametrize("wide_first", [True, False], ids=["to one GPU", "to several"])
def test_a_checkpoint_goes_on_with_other_numbers_of_gpus(runs, wide_first):
    first, then = (WIDE, ALONE) if wide_first else (ALONE, WIDE)
    begun = runs.train("unlike", overrides=(*first, *runs.EVERY_STEP, "checkpoint.keep=10"))
    ended = runs.train("unlike", overrides=then, resume=f"{begun.run_dir}@5", accept=("grid.layout",))
    assert ended.resumed_from == 5
    assert ended.final_loss == pytest.approx(runs.healthy("unlike", ALONE).final_loss, **NEAR)


def test_what_several_gpus_cannot_share_is_refused_before_anybody_trains(runs):
    wide = ("train.numerics=fast", "grid.gpus_per_stage=2")
    with pytest.raises(
        ConfigError, match=r"layer 0 \(.*batch-norm is over all samples of a micro-batch; expected one GPU"
    ):
        runs.train("convnet", overrides=wide)
