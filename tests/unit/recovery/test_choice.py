"""Which way a job recovers, and by which figures: grids with and without replicas, and the paper's models."""

from __future__ import annotations

import doctest
import math
from collections import Counter
from dataclasses import replace

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import group_into_nodes, split_evenly
from holdfast.core.profile import uniform_profile
from holdfast.errors import ConfigError
from holdfast.recovery import choice
from holdfast.recovery.choice import (
    FAR,
    Circumstances,
    Sizes,
    Way,
    choose,
    circumstances_of,
    crossing_bytes,
    sizes_of,
)
from holdfast.schedule.builders import adaptive_plan, regular_plan

GIGA = 1e9
FLOAT = 4
SIZE = 1000
VIT = {"samples": 4096, "tokens": 49, "hidden": 1024}
BERT = {"samples": 512, "tokens": 128, "hidden": 1024}
# SWIFT, table 2 (parameters; more than the table's for BERT-128, whose layers alone have 1.61e9), section 7.1 (stages,
# optimizers), table 4 (hours and iterations): what a step of each is like. 12 GB/s: PCIe 3.0 x16 of its V100s.
PAPER = {
    "ViT-128/32": {
        "size": VIT,
        "parameters": 1.64e9,
        "moments": 1,
        "step_s": 85.6 * 3600 / 93_600,
        "microbatches": 256,
    },
    "BERT-128": {
        "size": BERT,
        "parameters": 1.61e9,
        "moments": 2,
        "step_s": 461.1 * 3600 / 500_000,
        "microbatches": 128,
    },
}
STAGES, BANDWIDTH = 128, 12e9


def boundary_bytes(samples, tokens, hidden):
    """What crosses a boundary in a step: what is handed on, and its gradient."""
    return 2 * FLOAT * samples * tokens * hidden


def of_paper(name, groups=16):
    facts = PAPER[name]
    boundary = boundary_bytes(**facts["size"])
    return Circumstances(
        alone=tuple(range(STAGES)),
        spares=0,
        crossing_bytes=(groups - 1) * boundary,
        state_bytes=FLOAT * facts["parameters"] * (1 + facts["moments"]),
        copy_s=boundary / 2 / BANDWIDTH,
        bubble_s=(STAGES - 1) / (facts["microbatches"] + STAGES - 1) * facts["step_s"],
    )


def profile_of(layers=8):
    """A second each for F, I and W, and 1000 bytes across a boundary."""
    plain = uniform_profile(layers, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, boundary_bytes=SIZE)
    return replace(
        plain, layers=tuple(replace(each, parameter_bytes=5000, optimizer_bytes=5000) for each in plain.layers)
    )


def grid(pipelines=2, stages=4, microbatches=4, layers=8):
    return regular_plan(pipelines, split_evenly(layers, stages), microbatches)


def found_for(plan, per_node, bandwidth=1e12, **options):
    nodes = group_into_nodes(plan.workers, per_node)
    return circumstances_of(plan, nodes, profile_of(), bandwidth=bandwidth, **options)


@pytest.mark.parametrize(
    ("name", "groups", "printed"),
    [("ViT-128/32", 16, 24.66), ("ViT-128/32", 8, 11.51), ("BERT-128", 16, 8.05), ("BERT-128", 8, 3.76)],
)
def test_table_3_of_the_paper_exactly(name, groups, printed):
    assert round(of_paper(name, groups).crossing_bytes / GIGA, 2) == printed


def test_its_bandwidths_are_these_sizes_over_one_time_for_both_models():
    """All four rows are their size by 107 s, within their rounding: no bubble of either model was measured for them."""
    sizes = [of_paper(name, groups).crossing_bytes / GIGA for name in PAPER for groups in (16, 8)]
    digits = [2, 2, 3, 3]
    assert [round(size / 107, n) for size, n in zip(sizes, digits, strict=True)] == [0.23, 0.11, 0.075, 0.035]


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_transformers_are_logged(name):
    chosen = choose(of_paper(name))
    assert chosen.way is chosen.advised is Way.LOG
    assert len(chosen.reasons) == 3


def test_vit_told_in_full():
    assert str(choose(of_paper("ViT-128/32"))) == (
        "log\n"
        "  no other node has an owner of layer(s) 0-127\n"
        "  24.66 GB cross nodes in a step, 1.88 times the 13.12 GB of the model; up to 10 times are worth it\n"
        "  copying takes the most pressed sender 0.0685 s of a step, in which it has nothing else to do for 1.09 s"
    )


def test_the_papers_data_parallel_model_has_replicas():
    """Wide-ResNet-50 on two machines of four GPUs each."""
    plan = grid(pipelines=8, stages=1, microbatches=1)
    found = found_for(plan, 4)
    assert found.alone == ()
    assert found.crossing_bytes == 0
    assert choose(found).way is Way.REROUTE
    assert choose(replace(found, spares=1)).way is Way.REPLICATE
    assert str(choose(replace(found, spares=1))) == (
        "replicate\n  every layer has owners on several nodes\n  1 process(es) wait to take a lost one's place"
    )


def test_replicas_on_the_same_node_are_none():
    """As in the paper's figure 2: stages lie on two machines, all copies of each on one."""
    plan = grid(pipelines=2, stages=4)
    nodes = tuple(tuple(WorkerId(p, s) for p in range(2) for s in stages) for stages in ((0, 1), (2, 3)))
    found = circumstances_of(plan, nodes, profile_of(), bandwidth=1e12)
    assert found.alone == tuple(range(8))
    assert choose(found).way is Way.LOG
    assert found_for(plan, 4).alone == (), "a pipeline per node"
    assert found_for(plan, 8).alone == tuple(range(8)), "all on one node"


def test_one_node_logs_nothing():
    chosen = choose(found_for(grid(), 8))
    assert chosen.way is Way.CHECKPOINT
    assert chosen.reasons[1] == "nothing crosses nodes on its way to them, so there is nothing to log"


def test_each_side_of_each_bound():
    found = of_paper("ViT-128/32")
    limit = FAR * found.state_bytes
    assert choose(replace(found, crossing_bytes=limit)).way is Way.LOG
    assert choose(replace(found, crossing_bytes=limit * 1.001)).way is Way.CHECKPOINT
    assert choose(replace(found, copy_s=found.bubble_s)).way is Way.LOG
    assert choose(replace(found, copy_s=found.bubble_s * 1.001)).way is Way.CHECKPOINT
    assert choose(replace(found, state_bytes=0)).way is Way.CHECKPOINT


def test_what_somebody_has_decided_is_done_and_the_figures_are_told_all_the_same():
    chosen = choose(of_paper("BERT-128"), Way.CHECKPOINT)
    assert (chosen.way, chosen.advised) == (Way.CHECKPOINT, Way.LOG)
    assert str(chosen).startswith("checkpoint (as told; the figures speak for log)\n  no other node")


def test_bytes_of_a_pipeline_over_four_nodes():
    """One direction each way: who hands on logs activations, who hands back logs gradients."""
    plan = grid(pipelines=1, stages=4, microbatches=6)
    found = found_for(plan, 1)
    assert found.crossing_bytes == 6 * 3 * 2 * SIZE
    assert found.state_bytes == 8 * 10_000
    node_of = {worker: worker.stage for worker in plan.workers}
    sent = crossing_bytes(plan, node_of, (SIZE,) * 8, tuple(range(8)))
    ends, middle = 6 * SIZE, 12 * SIZE
    assert [sent[WorkerId(0, stage)] for stage in range(4)] == [ends, middle, middle, ends]


def test_what_crosses_is_as_large_as_what_the_layer_before_the_cut_hands_on():
    plan = grid(pipelines=1, stages=4, microbatches=6)
    node_of = {worker: worker.stage for worker in plan.workers}
    sent = crossing_bytes(plan, node_of, tuple(10**layer for layer in range(8)), tuple(range(8)))
    cuts = [10**1, 10**3, 10**5]
    assert [sent[WorkerId(0, stage)] for stage in range(4)] == [
        6 * cuts[0],
        6 * (cuts[0] + cuts[1]),
        6 * (cuts[1] + cuts[2]),
        6 * cuts[2],
    ]


def test_only_what_reaches_layers_that_nobody_else_has_is_logged():
    """The last stage of pipeline 1 is lost: only what is sent to the other one, and back to it nothing, is logged."""
    plan = adaptive_plan(grid(pipelines=2, stages=2, microbatches=3), {WorkerId(1, 1)})
    node_of = {worker: index for index, worker in enumerate(plan.workers)}
    found = circumstances_of(plan, tuple((each,) for each in plan.workers), profile_of(), bandwidth=1e12)
    assert found.alone == (4, 5, 6, 7)
    sent = crossing_bytes(plan, node_of, (10,) * 8, found.alone)
    assert sent == Counter({WorkerId(0, 0): 30, WorkerId(1, 0): 30})


def test_the_most_pressed_sender_counts():
    """Those in the middle send twice as much as those at the ends; a slow disk makes logging not worth it."""
    plan = grid(pipelines=1, stages=4, microbatches=4)
    fast = found_for(plan, 1, bandwidth=1e12)
    assert 0 < fast.copy_s < fast.bubble_s
    slow = found_for(plan, 1, bandwidth=fast.copy_s * 1e12 / (2 * fast.bubble_s))
    assert slow.copy_s == pytest.approx(2 * slow.bubble_s)
    assert choose(slow).way is Way.CHECKPOINT


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spares": -1}, "spares = -1 is impossible: expected a number from 0"),
        ({"copy_s": math.nan}, "copy_s = nan is impossible"),
        ({"state_bytes": math.inf}, "state_bytes = inf is impossible"),
        ({"bubble_s": None}, "and bubble_s = None say nothing: expected both times, or none"),
    ],
)
def test_impossible_circumstances(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        replace(of_paper("BERT-128"), **changes)


def test_sizes_are_of_the_same_layers():
    with pytest.raises(ConfigError, match="2 boundaries and 1 states cannot be those of the same layers"):
        Sizes(boundary_bytes=(1, 2), state_bytes=(3,))


def test_sizes_alone_give_the_figures_of_a_profile_but_for_times():
    plan = grid(pipelines=1)
    nodes = group_into_nodes(plan.workers, 1)
    found = circumstances_of(plan, nodes, sizes_of(profile_of()), bandwidth=1.0)
    assert found == replace(found_for(plan, 1), copy_s=None, bubble_s=None)
    assert choose(found).way is Way.LOG
    assert choose(replace(found, crossing_bytes=FAR * found.state_bytes * 1.001)).way is Way.CHECKPOINT


def test_impossible_nodes_and_bandwidths():
    plan = grid()
    with pytest.raises(ConfigError, match="bandwidth of 0 is impossible"):
        found_for(plan, 1, bandwidth=0)
    with pytest.raises(ConfigError, match=r"worker 0\.0 is on no node"):
        circumstances_of(plan, (), profile_of(), bandwidth=1.0)


@pytest.mark.parametrize("microbatches", [4, 12])
def test_bubbles_of_1f1b_are_those_of_the_formula(microbatches):
    stages, busy = 4, 6.0 * microbatches
    found = found_for(grid(pipelines=1, stages=stages, microbatches=microbatches), 1)
    share = (stages - 1) / (microbatches + stages - 1)  # SWIFT, section 2.1
    assert found.bubble_s == pytest.approx(share / (1 - share) * busy)


def test_examples_in_docstrings():
    assert doctest.testmod(choice).failed == 0
