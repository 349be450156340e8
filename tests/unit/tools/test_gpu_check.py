"""What is run where a GPU is at hand can be run: its jobs, faults and models are what they are meant to be."""

import pytest
import torch
from tools import gpu_check

from holdfast import Fault, parse_job
from holdfast.runtime.engine.datasets import build_dataset
from holdfast.runtime.engine.modules import build_model


@pytest.mark.parametrize(("overrides", "faults"), gpu_check.RUNS)
def test_every_run_can_be_asked_for(overrides, faults):
    job = parse_job(gpu_check.JOB, overrides)
    assert job.train.device == "cuda:0"
    for fault in map(Fault.parse, faults):
        assert fault.step < job.train.steps
        assert job.has(fault.worker)


@pytest.mark.parametrize("overrides", [[], gpu_check.TWO_BY_TWO])
def test_the_large_model_has_the_same_global_batch_on_both_grids(overrides):
    job = parse_job(gpu_check.LARGE, [*overrides, "model.arguments.blocks=1", "model.arguments.width=64"])
    assert job.global_microbatches == 8
    model = build_model(job)
    assert [tie.layers for tie in model.ties] == [(0, 2)]
    inputs, targets = (each[None, :32] for each in build_dataset(job)[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    output = inputs
    for layer in model.layers:
        output = layer(output)
        assert output.dtype == torch.bfloat16
    assert model.loss(output, targets).dtype == torch.float32


def test_every_part_is_there():
    assert all(callable(getattr(gpu_check, part)) for part in gpu_check.PARTS)
