"""Stages of several GPUs with exact numerics: workers that hold the same layers and take micro-batches by turns."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.dist

ALONE = "grid.layout=[{stages: [6], microbatches: 8}]"
"""One worker, which has all layers and all micro-batches."""
WIDE = (
    "grid.layout=[{stages: [1, 4, 1], gpus: [1, 2, 1], microbatches: 5}, {stages: [6], microbatches: 3}]",
    "grid.workers_per_node=4",
)
"""Node 0 has the first pipeline, whose middle stage has two GPUs; node 1 the second."""


@pytest.mark.parametrize("technique", ["gpipe", "1f1b", "decoupled", "staggered"])
def test_the_bits_are_those_of_one_worker(runs, technique):
    summary = runs.train("unlike", overrides=(*WIDE, f"train.technique={technique}"))
    alone = runs.healthy("unlike", (ALONE,))
    assert (summary.weights_sha256, summary.state_sha256) == (alone.weights_sha256, alone.state_sha256)
    assert summary.final_loss == alone.final_loss


@pytest.mark.parametrize(
    "faults", [("kill:0.1@1:backward",), ("kill-node:0@2:forward",)], ids=["one lane", "the node of the stage"]
)
def test_a_lane_or_its_node_is_lost(runs, faults):
    runs.survives("unlike", *faults, overrides=WIDE, healthy=runs.healthy("unlike", (ALONE,)))


def test_one_pipeline_alone_survives_the_loss_of_a_lane(runs):
    layout = "grid.layout=[{stages: [3, 3], gpus: [2, 2], microbatches: 8}]"
    summary = runs.survives(
        "unlike",
        "kill:0.3@1:reduce",
        overrides=(layout, "grid.workers_per_node=2", "resilience.tolerate=1"),
        healthy=runs.healthy("unlike", (ALONE,)),
    )
    assert summary.generations == 2


def test_a_checkpoint_goes_on_with_other_numbers_of_gpus(runs):
    alone = runs.healthy("unlike", (ALONE,))
    begun = runs.train("unlike", overrides=(*WIDE, *runs.EVERY_STEP))
    other = ("grid.layout=[{stages: [2, 4], gpus: [2, 1], microbatches: 8}]", "grid.workers_per_node=3")
    ended = runs.train("unlike", overrides=other, resume=f"{begun.run_dir}@2")
    assert (ended.weights_sha256, ended.state_sha256) == (alone.weights_sha256, alone.state_sha256)
