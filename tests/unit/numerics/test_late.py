"""Steps on a device that computes late: the CPU's bits, in whatever order its operations run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", minversion="2.13", reason="the hook for devices written in Python is of torch 2.13")

from tests.accelerator import Late, Race, running
from tests.wrong_devices import WRONG, ForgetsWhatIsSent
from torch import nn

from holdfast.devices.device import HOST, Device
from holdfast.errors import WorkFailed
from holdfast.optim.loss_scale import LossScaling
from holdfast.runtime.engine.stage import Stage

from .numerics_grid import Job, commit, convnet_job, digest, gpt_job, reduce, run_microbatch

ORDERS = int(os.environ.get("HOLDFAST_LATE_ORDERS", "500"))
STEPS = 2


def _gpt(**changes: Any) -> Job:
    from holdfast.models import gpt

    def layers() -> list[nn.Module]:
        return gpt.build(layers=1, width=16, heads=2, context=16, vocab=32, dropout=0.1)

    job = gpt_job(num_microbatches=2, **changes)
    job.layers = layers
    return job


def _convnet(**changes: Any) -> Job:
    from holdfast.models import convnet

    job = convnet_job(num_microbatches=2, **changes)
    job.layers = lambda: convnet.build(width=2, blocks=2)
    return job


def _trained(job: Job, *, split: bool, between: Callable[[list[Stage]], list[Stage]]) -> Any:
    """What two workers of two pipelines end in, each with all layers of a route of two visits, or one of them."""
    layers = len(job.layers())
    stages = job.stages([(0, 1), (1, layers), (0, layers)])
    losses = []
    for step in range(STEPS):
        for stage in stages:
            stage.begin(step)
        for microbatch, route in enumerate((stages[:2], stages[2:])):
            run_microbatch(route, step, microbatch, split)
        reduce(stages)
        losses.append([each for stage in stages if (each := stage.losses()) is not None])
        commit(stages)
        stages = between(stages)
    return digest(stages), losses


def _alone(stages: list[Stage]) -> list[Stage]:
    return stages


def _pinned_and_restored(stages: list[Stage]) -> list[Stage]:
    """The last worker is handed the state that others have pinned before they went on to compute."""
    first, last, joiner = stages
    pinned = {layer: stage.snapshot(layer) for stage in (first, last) for layer in stage.layers}
    step = joiner.layer_steps()[0]
    joiner.begin(step)
    run_microbatch([joiner], step, 0)  # nothing of this is kept
    for layer, encoded in random.sample(sorted(pinned.items()), len(pinned)):
        joiner.restore(layer, encoded())
    joiner.begin(step)
    return stages


CASES: dict[str, tuple[Callable[..., Job], dict[str, Any], dict[str, Any]]] = {
    "gpt": (_gpt, {}, {}),
    "gpt, split": (_gpt, {}, {"split": True}),
    "gpt, undone": (_gpt, {"commit": "undo"}, {}),
    "gpt, clipped": (_gpt, {"clip_norm": 0.01}, {}),
    "gpt, scaled": (_gpt, {"scaling": LossScaling(initial=2.0**10, growth_every=1)}, {}),
    "gpt, layers run again": (_gpt, {"checkpointed": frozenset({0, 1})}, {"split": True}),
    "gpt, handed over": (_gpt, {}, {"between": _pinned_and_restored}),
    "convnet": (_convnet, {}, {}),
    "convnet, split": (_convnet, {"clip_norm": 0.1}, {"split": True}),
    "convnet, handed over": (_convnet, {}, {"between": _pinned_and_restored}),
}


def _end(case: str, device: Device) -> Any:
    make, changes, more = CASES[case]
    return _trained(make(device=device, **changes), **{"split": False, "between": _alone, **more})


@pytest.mark.parametrize("case", CASES)
def test_any_order_of_the_device_has_the_bits_of_the_cpu(case: str) -> None:
    expected = _end(case, HOST)
    for order in range(max(1, ORDERS // len(CASES))):
        with running(order):
            assert _end(case, Late()) == expected, f"order {order}"


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("wrong", [each for each in WRONG if each is not ForgetsWhatIsSent])  # all is waited for here
def test_a_mark_that_is_missing_is_found_in_every_order(wrong: type[Late], order: int) -> None:
    with (
        pytest.raises((Race, WorkFailed), match=r"uses memory at the same time as|was freed before"),
        running(order),
    ):
        _end("gpt", wrong())
