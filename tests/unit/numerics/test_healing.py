"""Stages that take part in steps without any state, and get it later: they end in the bits of those that had it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.placement import LayerRange
from holdfast.core.schedule import OpKind
from holdfast.errors import CorruptBlob, InternalError
from holdfast.runtime.engine.emulated import EmulatedStage

from .numerics_grid import commit, convnet_job, gpt_job, reduce, run_microbatch

JOBS = {"gpt": (gpt_job, 5), "convnet": (convnet_job, 6)}


def run_step(job: Any, owner: Any, follower: Any, step: int) -> None:
    """One step in which the owner computes everything and both take part in the reductions."""
    for stage in (owner, follower):
        stage.begin(step)
    for microbatch in range(job.num_microbatches):
        run_microbatch([owner], step, microbatch)
    reduce([owner, follower])
    commit([owner, follower])


def follow(name: str, *, missed: int, clip_norm: float | None = None) -> tuple[Any, Any, Any, Any]:
    """The job, its owner, and a follower that entered before step 2 and, ``missed`` steps later, the state of then."""
    make, layers = JOBS[name]
    job = make(clip_norm=clip_norm)
    owner, follower = job.stages([(0, layers), (0, layers)])
    for step in range(2):
        owner.begin(step)
        for microbatch in range(job.num_microbatches):
            run_microbatch([owner], step, microbatch)
        reduce([owner])
        commit([owner])
    follower.begin_healing()
    pinned = {layer: owner.snapshot(layer) for layer in range(layers)}
    for step in range(2, 2 + missed):
        run_step(job, owner, follower, step)
    states = {layer: encode() for layer, encode in pinned.items()}
    return job, owner, follower, states


def digests(stage: Any) -> list[str]:
    return [stage.layer_digest(layer) for layer in stage.layer_range.indices]


@pytest.mark.parametrize("missed", [0, 1, 3])
@pytest.mark.parametrize("name", JOBS)
def test_catching_up_gives_the_bits_of_the_owner(name: str, missed: int) -> None:
    job, owner, follower, states = follow(name, missed=missed)
    assert follower.healing
    assert follower.layer_steps() == {}
    follower.heal(states)
    assert not follower.healing
    assert follower.layer_steps() == owner.layer_steps()
    assert digests(follower) == digests(owner)
    run_step(job, owner, follower, 2 + missed)
    assert digests(follower) == digests(owner), "from then on it goes with the others"


def test_steps_of_clipped_gradients_are_caught_up_with() -> None:
    """The verdict of each missed step counts, not that of the newest."""
    _, owner, follower, states = follow("gpt", missed=3, clip_norm=0.01)
    follower.heal(states)
    assert digests(follower) == digests(owner)


@pytest.mark.parametrize("name", JOBS)
def test_who_caught_up_can_compute_alone(name: str) -> None:
    job, owner, follower, states = follow(name, missed=2)
    follower.heal(states)
    for stage in (owner, follower):
        stage.begin(4)
        for microbatch in range(job.num_microbatches):
            run_microbatch([stage], 4, microbatch)
        reduce([stage])
        commit([stage])
    assert digests(follower) == digests(owner)


@pytest.mark.parametrize("name", JOBS)
def test_who_caught_up_can_take_a_step_back(name: str) -> None:
    _, owner, follower, states = follow(name, missed=2)
    follower.heal(states)
    for stage in (owner, follower):
        stage.take_back(3)
    assert digests(follower) == digests(owner)


def test_a_state_that_is_none_is_refused_and_can_be_given_again() -> None:
    _, owner, follower, states = follow("gpt", missed=1)
    with pytest.raises(CorruptBlob):
        follower.heal({0: b"not a state"})
    assert follower.healing
    follower.heal(states)
    assert digests(follower) == digests(owner)


def test_who_has_a_state_has_nothing_to_catch_up_with() -> None:
    (stage,) = gpt_job().stages([(0, 5)])
    with pytest.raises(InternalError, match="nothing to heal"):
        stage.heal({})


def emulated() -> EmulatedStage:
    return EmulatedStage(layers=LayerRange(0, 2), num_layers=2, num_microbatches=3)


def run_emulated(step: int, owner: EmulatedStage, *others: EmulatedStage) -> None:
    stages = (owner, *others)
    owner.begin(step)
    for microbatch in range(3):
        owner.forward(step, microbatch, None)
        owner.backward(OpKind.B, step, microbatch, None)
    for layer in range(2):
        total = sum((stage.message((layer,), 0) for stage in others), owner.message((layer,), 0))
        for stage in stages:
            stage.accept((layer,), total)
    for stage in stages:
        stage.conclude(torch.tensor([[1.0, 1.0, 0.0]] * 2, dtype=torch.float64))
        for layer in range(2):
            stage.update(layer)
            stage.swap(layer)


@pytest.mark.parametrize("missed", [0, 1, 3])
def test_the_emulated_stage_catches_up_too(missed: int) -> None:
    owner, follower = emulated(), emulated()
    run_emulated(0, owner)
    follower.begin_healing()
    pinned = {layer: owner.snapshot(layer) for layer in range(2)}
    for step in range(1, 1 + missed):
        run_emulated(step, owner, follower)
    assert (follower.healing, follower.layer_steps()) == (True, {})
    follower.heal({layer: encode() for layer, encode in pinned.items()})
    assert follower.layer_steps() == owner.layer_steps() == {0: 1 + missed, 1: 1 + missed}
    assert [follower.layer_digest(layer) for layer in range(2)] == [owner.layer_digest(layer) for layer in range(2)]
