"""Stages that take part in steps without any state, and get it later: they end in the bits of those that had it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.core.placement import LayerRange
from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
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
    follower.follow(range(layers), 2)
    pinned = {layer: owner.snapshot(layer) for layer in range(layers)}
    for step in range(2, 2 + missed):
        run_step(job, owner, follower, step)
    states = {layer: encode() for layer, encode in pinned.items()}
    return job, owner, follower, states


def digests(stage: Any) -> list[str]:
    return [stage.layer_digest(layer) for layer in stage.layers]


@pytest.mark.parametrize("missed", [0, 1, 3])
@pytest.mark.parametrize("name", JOBS)
def test_catching_up_gives_the_bits_of_the_owner(name: str, missed: int) -> None:
    job, owner, follower, states = follow(name, missed=missed)
    assert follower.followed == set(follower.layers)
    assert follower.layer_steps() == {}
    follower.heal(states)
    assert not follower.followed
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
    assert follower.followed
    follower.heal(states)
    assert digests(follower) == digests(owner)


def test_who_has_a_state_has_nothing_to_catch_up_with() -> None:
    (stage,) = gpt_job().stages([(0, 5)])
    with pytest.raises(InternalError, match="nothing to heal"):
        stage.heal({0: b""})


def emulated() -> EmulatedStage:
    return EmulatedStage(layers=range(2), num_layers=2, num_microbatches=3)


def run_emulated(step: int, owner: EmulatedStage, *others: EmulatedStage) -> None:
    stages = (owner, *others)
    for stage in stages:
        stage.begin(step)
    for microbatch in range(3):
        owner.forward(step, microbatch, None)
        owner.backward(OpKind.B, step, microbatch, None)
    for layer in range(2):
        total = add_up([stage.message((layer,), 0) for stage in stages])
        for stage in stages:
            stage.accept((layer,), total)
    for stage in stages:
        stage.conclude(np.array([[1.0, 1.0, 0.0]] * 2))
        for layer in range(2):
            stage.update(layer)
            stage.swap(layer)


@pytest.mark.parametrize("missed", [0, 1, 3])
def test_the_emulated_stage_catches_up_too(missed: int) -> None:
    owner, follower = emulated(), emulated()
    run_emulated(0, owner)
    follower.follow(range(2), 1)
    pinned = {layer: owner.snapshot(layer) for layer in range(2)}
    for step in range(1, 1 + missed):
        run_emulated(step, owner, follower)
    assert (follower.followed, follower.layer_steps()) == ({0, 1}, {})
    follower.heal({layer: encode() for layer, encode in pinned.items()})
    assert follower.layer_steps() == owner.layer_steps() == {0: 1 + missed, 1: 1 + missed}
    assert [follower.layer_digest(layer) for layer in range(2)] == [owner.layer_digest(layer) for layer in range(2)]


@pytest.mark.parametrize("missed", [0, 2])
@pytest.mark.parametrize("name", JOBS)
def test_one_that_takes_layers_over_computes_the_ones_that_it_holds_meanwhile(name: str, missed: int) -> None:
    """The end of a model, with a tie to its beginning, goes from one to the other; the bits are those of one alone."""
    make, layers = JOBS[name]
    job = make(clip_norm=0.05)
    cut = layers - 2
    (alone,) = job.stages([(0, layers)])
    giver, before, taker = job.stages([(cut, layers), (0, cut), (0, layers)])

    def step_of(step: int, *others: Any, route: list[Any]) -> None:
        stages = [alone, *route, *others]
        for stage in stages:
            stage.begin(step)
        for microbatch in range(job.num_microbatches):
            run_microbatch([alone], step, microbatch)
            activation = None
            for stage in route:
                own = range(cut) if stage is taker and giver in route else stage.layers
                activation = stage.forward(step, microbatch, activation, LayerRange(own[0], own[-1] + 1))
            gradient = None
            for stage in reversed(route):
                gradient = stage.backward(OpKind.B, step, microbatch, gradient)
        for some in ([alone], [*route, *others]):
            reduce(some)
            commit(some)

    step_of(0, route=[before, giver])
    taker.inherit(before)
    taker.follow(range(cut, layers), 1)
    pinned = {layer: giver.snapshot(layer) for layer in range(cut, layers)}
    for step in range(1, 1 + missed):
        step_of(step, route=[taker, giver])
        assert taker.layer_steps() == dict.fromkeys(range(cut), step + 1)
    taker.heal({layer: encode() for layer, encode in pinned.items()})
    assert not taker.followed
    step_of(1 + missed, route=[taker, giver])
    assert digests(taker) == digests(alone)
    step_of(2 + missed, route=[taker])
    assert digests(taker) == digests(alone), "alone, too"
    (smaller,) = job.stages([(1, 3)])
    smaller.inherit(taker)
    assert digests(smaller) == digests(alone)[1:3], "others are let go of"


def test_what_is_still_followed_stays_so_in_another_stage() -> None:
    make, layers = JOBS["gpt"]
    job = make()
    owner, first = job.stages([(0, layers), (0, layers)])
    first.follow(range(layers), 0)
    pinned = {layer: owner.snapshot(layer) for layer in range(layers)}
    run_step(job, owner, first, 0)
    (second,) = job.stages([(0, layers - 1)])
    second.inherit(first)
    assert second.followed == set(range(layers - 1))
    second.heal({layer: pinned[layer]() for layer in (1, 2)})
    assert second.layer_steps() == {1: 1, 2: 1}
    second.heal({layer: pinned[layer]() for layer in (0, 3)})
    assert digests(second) == digests(owner)[: layers - 1]


def test_steps_that_are_run_again_are_not_made_up_for_twice() -> None:
    """The others went back to a snapshot; what was kept of the steps since then is of no use any more."""
    make, layers = JOBS["gpt"]
    job = make()
    owner, follower = job.stages([(0, layers), (0, layers)])
    follower.follow(range(layers), 0)
    first = {layer: owner.snapshot(layer)() for layer in range(layers)}
    for step in range(3):
        run_step(job, owner, follower, step)
    for layer, data in first.items():
        owner.restore(layer, data)
    run_step_alone(job, owner, 0)
    follower.follow(range(layers), 1)
    states = {layer: owner.snapshot(layer)() for layer in range(layers)}
    run_step(job, owner, follower, 1)
    follower.heal(states)
    assert follower.layer_steps() == owner.layer_steps()
    assert digests(follower) == digests(owner)


def run_step_alone(job: Any, owner: Any, step: int) -> None:
    owner.begin(step)
    for microbatch in range(job.num_microbatches):
        run_microbatch([owner], step, microbatch)
    reduce([owner])
    commit([owner])
