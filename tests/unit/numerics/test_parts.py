"""A stage that is visited on parts of its layers: coupled or split backward, kept or run again, the same bits."""

from __future__ import annotations

import os

import pytest
import torch

from holdfast.config.load import parse_job
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.errors import InternalError
from holdfast.runtime.engine.build import build_stage
from holdfast.runtime.engine.probing import probe
from holdfast.settings.planning import healthy_plan

JOB = {
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8, "dropout": 0.1},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 1, "stages": 1, "microbatches": 2, "microbatch_size": 2},
    "train": {"steps": 1, "seed": 1},
}
WHOLE = {0: [(0, LayerRange(0, 4))], 1: [(0, LayerRange(0, 4))]}
PARTS = {
    0: [(0, LayerRange(0, 2)), (1, LayerRange(2, 4))],
    1: [(1, LayerRange(0, 1)), (0, LayerRange(1, 4))],
}
"""For each micro-batch its visits: which of two workers that hold everything, and which layers."""


def test_who_has_no_place_keeps_the_model_for_the_place_that_it_will_have():
    job = parse_job(JOB)
    plan = healthy_plan(job, 4)
    spare = build_stage(job, plan, WorkerId(1, 0))
    assert (spare.stage.layers, spare.stage.reductions, len(spare.unused.layers)) == ((), (), 4)
    seated, fresh = (build_stage(job, plan, WorkerId(0, 0), model=model) for model in (spare.unused, None))
    assert seated.unused is fresh.unused is None
    digests = [[made.stage.layer_digest(layer) for layer in range(4)] for made in (seated, fresh)]
    assert digests[0] == digests[1]


def one_step(routes, kinds, again, *, layer_by_layer=False):
    """Runs a step and returns the digests of all layers of both workers."""
    torch.set_num_threads(1)
    tree = {**JOB, "model": {**JOB["model"], "checkpoint_activations": again}}
    job = parse_job(tree)
    boundaries = probe(job).boundaries
    plan = healthy_plan(job, len(boundaries))
    made = [build_stage(job, plan, WorkerId(0, 0), boundaries) for _ in range(2)]
    stages = [part.stage for part in made]
    for stage in stages:
        stage.begin(0)
    for microbatch, visits in routes.items():
        value = None
        for worker, layers in visits:
            value = stages[worker].forward(0, microbatch, None if value is None else value.clone(), layers)
        assert value is None, "the last layer hands nothing on"
        for kind in kinds:
            value = None
            for worker, layers in reversed(visits):
                for part in in_turn(kind, layers) if layer_by_layer else (None,):
                    value = stages[worker].backward(kind, 0, microbatch, value, part)
            assert value is None, "nor does layer 0"
    for reduction in stages[0].reductions:
        summed = add_up([stage.message(reduction) for stage in stages])
        for stage in stages:
            stage.accept(reduction, summed)
    verdict = stages[0].merge_votes(stages[0].vote(), stages[1].vote())
    digests = []
    for stage in stages:
        stage.conclude(verdict)
        for layer in stage.layer_steps():
            stage.update(layer)
            stage.swap(layer)
        digests.append([stage.layer_digest(layer) for layer in range(4)])
    return digests


def in_turn(kind, layers):
    """The parts of an operation that completes each layer by itself; I is never taken apart."""
    if kind is OpKind.I:
        return (layers,)
    return tuple(LayerRange(layer, layer + 1) for layer in reversed(layers.indices))


@pytest.mark.parametrize("kinds", [(OpKind.B,), (OpKind.I, OpKind.W)], ids=["coupled", "split"])
def test_an_operation_in_parts_has_the_bits_of_the_whole(kinds):
    assert one_step(PARTS, kinds, again=True, layer_by_layer=True) == one_step(WHOLE, (OpKind.B,), again=False)


@pytest.mark.parametrize("kind", [OpKind.B, OpKind.W])
@pytest.mark.parametrize("part", [LayerRange(0, 3), LayerRange(2, 3)])
def test_a_part_that_is_not_the_last_of_what_is_left_is_refused(kind, part):
    job = parse_job(JOB)
    stage = build_stage(job, healthy_plan(job, 4), WorkerId(0, 0)).stage
    stage.begin(0)
    stage.forward(0, 0, None)
    if kind is OpKind.W:
        stage.backward(OpKind.I, 0, 0, None)
    with pytest.raises(InternalError, match=f"{kind} of micro-batch 0 on layers {part}, and 0:4 are left"):
        stage.backward(kind, 0, 0, None, part)
    stage.backward(kind, 0, 0, None, LayerRange(0, 4))
    with pytest.raises(InternalError, match="without its"):
        stage.backward(kind, 0, 0, None)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "run again"])
@pytest.mark.parametrize("kinds", [(OpKind.B,), (OpKind.I, OpKind.W)], ids=["coupled", "split"])
def test_parts_have_the_bits_of_the_whole(kinds, again):
    whole = one_step(WHOLE, (OpKind.B,), again=False)
    parts = one_step(PARTS, kinds, again)
    assert parts == whole
    assert parts[0] == parts[1]
