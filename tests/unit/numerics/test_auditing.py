"""A layer's pass that another owner computes a second time has the same bits, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.core.schedule import OpKind
from holdfast.data.items import spec_of
from holdfast.errors import InternalError
from holdfast.optim.loss_scale import LossScaling
from holdfast.protocol.auditing import TIMES
from holdfast.runtime.engine.stage import Stage

from .numerics_grid import Job, commit, convnet_job, digest, gpt_job, reduce, run_microbatch, train

JOBS: dict[str, tuple[Callable[..., Job], int, dict[str, Any]]] = {
    "gpt": (gpt_job, 5, {}),
    "checkpointed": (gpt_job, 5, {"checkpointed": frozenset(range(5))}),
    "scaled": (gpt_job, 5, {"scaling": LossScaling(initial=1024.0, growth_every=2)}),
    "batch-norm": (convnet_job, 6, {}),
}


def job_of(name: str) -> tuple[Job, int]:
    """A job that knows what its layers return."""
    make, layers, changes = JOBS[name]
    value, outputs = make().load(0, 0)[0], []
    for module in make().layers():
        value = module(value)
        outputs.append(spec_of(value))
    return make(outputs=outputs, **changes), layers


def audited(runner: Stage, auditor: Stage, layer: int, microbatch: int, times: int = 1) -> bool:
    """Whether another owner says the same, each time."""
    message = runner.audit_message(times)
    assert message.numel() == auditor.audit_bytes(layer)
    theirs, ours = auditor.audit(layer, microbatch, message, times)
    assert (len(theirs), len(ours)) == (times, times)
    return len({*theirs, *ours}) == 1


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", JOBS)
def test_every_layer_of_sound_workers_has_the_same_bits_and_nothing_else_changes(name: str, split: bool) -> None:
    job, layers = job_of(name)
    reference, _ = train(job, [(0, layers)] * 2, [[0], [1]], 2)
    stages = job.stages([(0, layers)] * 2)
    for step in range(2):
        for stage in stages:
            stage.begin(step)
        for microbatch in range(job.num_microbatches):
            runner, auditor = stages[microbatch % 2], stages[1 - microbatch % 2]
            layer = (microbatch + step) % layers
            runner.watch(layer, microbatch)
            run_microbatch([runner], step, microbatch, split)
            assert audited(runner, auditor, layer, microbatch, times=1 + step * (TIMES - 1)), f"layer {layer}"
        reduce(stages)
        commit(stages)
    assert digest(stages) == digest(reference)


@pytest.mark.parametrize("layer", range(5))
def test_one_bit_of_a_weight_shows(layer: int) -> None:
    job, layers = job_of("gpt")
    runner, auditor = job.stages([(0, layers)] * 2)
    for stage in (runner, auditor):
        stage.begin(0)
    auditor.export(layer).parameters[next(iter(auditor.export(layer).parameters))].view(torch.int32).view(-1)[:] ^= (
        1 << 16
    )
    runner.watch(layer, 3)
    run_microbatch([runner], 0, 3)
    assert not audited(runner, auditor, layer, 3)


def test_only_what_is_watched_is_kept_and_for_one_step() -> None:
    job, layers = job_of("gpt")
    (stage,) = job.stages([(0, layers)])
    stage.begin(0)
    with pytest.raises(InternalError, match="no sample is watched"):
        stage.audit_message(1)
    stage.watch(2, 3)
    run_microbatch([stage], 0, 3)
    assert stage.audit_message(1) is stage.audit_message(1), "for any number of auditors"
    stage.begin(0)
    with pytest.raises(InternalError, match="no sample is watched"):
        stage.audit_message(1)


def test_a_second_time_needs_a_step() -> None:
    job, layers = job_of("gpt")
    runner, auditor = job.stages([(0, layers)] * 2)
    runner.begin(0)
    runner.watch(2, 3)
    stage_output = runner.forward(0, 3, None)
    assert stage_output is None
    runner.backward(OpKind.B, 0, 3, None)
    with pytest.raises(InternalError, match="no step is running"):
        auditor.audit(2, 3, runner.audit_message(1), 1)
