"""Real processes, really killed, whose steps are taken back by inverting them: the end is within a stated tolerance.

While nothing fails the bits are those of ``shadow``. A step that was inverted and made again leaves all weights together
within a relative L2 distance of TOLERANCE of the run in which nothing failed, and the loss within ten times that.
"""

from __future__ import annotations

import pytest
import torch

from holdfast.core.faults import Fault
from holdfast.optim.digest import load_layer

pytestmark = pytest.mark.dist

TOLERANCE = 1e-5
UNDO = "resilience.commit=undo"
OPTIMIZERS = {
    "default": (),
    "momentum": ("optimizer.kind=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.nesterov=true"),
    "adam": ("optimizer.kind=adam",),
    "lamb": ("optimizer.kind=lamb", "optimizer.lr=0.01"),
}


def distance(summary, healthy) -> float:
    """Relative L2 distance of all weights, read from the two runs' files."""
    pairs = list(zip(*(sorted((s.run_dir / "final").glob("layer-*")) for s in (summary, healthy)), strict=True))
    assert pairs
    layers = [(load_layer(one), load_layer(other)) for one, other in pairs]
    assert {state.step for pair in layers for state in pair} == {healthy.steps}
    ours, theirs = (
        torch.cat([value.double().flatten() for pair in layers for value in pair[side].parameters.values()])
        for side in (0, 1)
    )
    return float((ours - theirs).norm() / theirs.norm())


def survives(runs, name, *faults, overrides=()) -> float:
    """One run with faults that all fired, close to the run without; returns how close."""
    healthy = runs.healthy(name, overrides)
    summary = runs.train(name, *faults, overrides=(*overrides, UNDO))
    assert summary.unfired == ()
    assert sorted(summary.report.fired) == sorted(str(Fault.parse(text)) for text in faults)
    assert summary.generations == 1 + len(faults)
    assert summary.steps == healthy.steps
    assert summary.final_loss == pytest.approx(healthy.final_loss, rel=10 * TOLERANCE)
    found = distance(summary, healthy)
    assert found <= TOLERANCE
    return found


@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_without_failures_the_bits_are_those_of_shadow(runs, name):
    undo, shadow = runs.healthy(name, (UNDO,)), runs.healthy(name)
    assert undo.weights_sha256 == shadow.weights_sha256
    assert undo.state_sha256 == shadow.state_sha256


@pytest.mark.parametrize("point", ["update", "commit"])
@pytest.mark.parametrize("worker", ["0.0", "1.2", "1.3"])
@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_a_kill_in_the_middle_of_the_update(runs, name, worker, point):
    survives(runs, name, f"kill:{worker}@2:{point}")


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "lamb"])
def test_every_optimizer_survives_a_half_done_commit(runs, optimizer):
    survives(runs, "gpt", "kill:1.2@2:commit", overrides=OPTIMIZERS[optimizer])


def test_a_kill_in_the_first_update_and_in_the_last(runs):
    survives(runs, "gpt", "kill:1.1@0:commit", "kill:0.2@3:commit")


def test_clipping_and_a_schedule(runs):
    overrides = ("train.clip_norm=0.05", "optimizer.schedule=cosine", "optimizer.warmup_steps=2")
    survives(runs, "gpt", "kill:1.2@2:commit", overrides=overrides)


def test_a_kill_that_leaves_nothing_to_invert_is_bitwise(runs):
    """At `forward` every layer is at the same step."""
    healthy = runs.healthy("gpt")
    summary = runs.train("gpt", "kill:1.2@2:forward", overrides=(UNDO,))
    assert summary.report.fired == ("kill:1.2@2:forward",)
    assert summary.weights_sha256 == healthy.weights_sha256
