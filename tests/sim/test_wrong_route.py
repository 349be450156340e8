"""The hash of a real model tells a wrong route: an activation that is taken for another micro-batch's."""

from __future__ import annotations

import os

import pytest
import torch

from holdfast.config.load import parse_job
from holdfast.core.ids import WorkerId
from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.errors import LedgerError
from holdfast.runtime.engine.build import build_stage
from holdfast.runtime.engine.probing import probe
from holdfast.settings.planning import healthy_plan

JOB = {
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8, "dropout": 0.1},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 1, "stages": 2, "microbatches": 2, "microbatch_size": 2},
    "train": {"steps": 1, "seed": 1},
}


def one_step(route: dict[int, int]) -> list[str]:
    """Runs a step on two stages; micro-batch ``m`` of the first is taken for ``route[m]`` by the second."""
    torch.set_num_threads(1)
    job = parse_job(JOB)
    found = probe(job)
    plan = healthy_plan(job, len(found.boundaries))
    first, second = (build_stage(job, plan, WorkerId(0, s), found.boundaries).stage for s in range(2))
    for microbatch, taken_for in route.items():
        second.forward(0, taken_for, first.forward(0, microbatch, None).clone())
        first.backward(OpKind.B, 0, microbatch, second.backward(OpKind.B, 0, taken_for, None).clone())
    for stage in (first, second):
        for layer in stage.layer_steps():
            stage.accept((layer,), add_up([stage.message((layer,))]))
    for tie in found.ties:
        summed = add_up([first.message(tie), second.message(tie)])
        for stage in (first, second):
            stage.accept(tie, summed)
    verdict = first.merge_votes(first.vote(), second.vote())
    digests = []
    for stage in (first, second):
        stage.conclude(verdict)
        for layer in stage.layer_steps():
            stage.update(layer)
            stage.swap(layer)
            digests.append(stage.layer_digest(layer))
    return digests


def test_a_wrong_route_changes_the_bits():
    right = one_step({0: 0, 1: 1})
    assert one_step({1: 1, 0: 0}) == right, "the order of micro-batches does not matter"
    wrong = one_step({0: 1, 1: 0})
    assert all(a != b for a, b in zip(right, wrong, strict=True)), "but what is taken for which does"


def test_the_ledger_does_not_let_one_be_taken_twice():
    with pytest.raises(LedgerError) as caught:
        one_step({0: 0, 1: 0})
    assert (caught.value.microbatch, caught.value.count) == (0, 2)
