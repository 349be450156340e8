"""Updates ahead of the verdict: settled or made again, they end in the bits of updates that wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.errors import InternalError
from holdfast.runtime.engine.emulated import EmulatedStage
from holdfast.runtime.engine.stage import Stage

from .numerics_grid import add_up, commit, convnet_job, digest, forward, gpt_job, run_microbatch, train

JOBS = {"gpt": (gpt_job, [(0, 2), (2, 5)]), "convnet": (convnet_job, [(0, 3), (3, 6)])}
STEPS = 5


def poisoned(job: Any, step: int) -> Any:
    """The job, in one step of which a sample is not finite."""
    load = job.load

    def poison(at: int, microbatch: int) -> tuple[Tensor, Tensor]:
        inputs, targets = load(at, microbatch)
        return (inputs * torch.inf if (at, microbatch) == (step, 1) else inputs), targets

    job.load = poison
    return job


def stands(stages: list[Stage], vote: Tensor) -> bool:
    """Settles the step on all workers, which agree."""
    (verdict,) = {stage.settle(vote) for stage in stages}
    return verdict


def train_ahead(job: Any, ranges: list[tuple[int, int]], begun: int) -> tuple[list[Stage], list[int]]:
    """Trains with every update ahead of its verdict, which comes after ``begun`` forwards of the next step."""
    stages, redone, vote = job.stages(ranges), [], None
    for step in range(STEPS):
        for stage in stages:
            stage.begin(step)
        for microbatch in range(begun if step else 0):
            forward(stages, step, microbatch)
        if step and not stands(stages, vote):
            redone.append(step - 1)
            for stage in stages:
                stage.remake_update()
                stage.begin(step)
        else:
            for stage in stages:
                stage.discard()
                stage.begin(step)
        for microbatch in range(job.num_microbatches):
            run_microbatch(stages, step, microbatch)
        vote = add_up(stages)[1]
        for stage in stages:
            stage.speculate()
        commit(stages)
    if not stands(stages, vote):
        redone.append(STEPS - 1)
        for stage in stages:
            stage.remake_update()
    return stages, redone


@pytest.mark.parametrize("begun", [0, 1, 3])
@pytest.mark.parametrize("name", JOBS)
def test_what_stands_has_the_same_bits(name: str, begun: int) -> None:
    make, ranges = JOBS[name]
    expected, _ = train(make(), ranges, [[0, 1]], STEPS)
    stages, redone = train_ahead(make(), ranges, begun)
    assert redone == []
    assert digest(stages) == digest(expected)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("clip_norm", [1e-3, 0.9])
def test_clipping_makes_updates_again(name: str, clip_norm: float) -> None:
    make, ranges = JOBS[name]
    expected, _ = train(make(clip_norm=clip_norm), ranges, [[0, 1]], STEPS)
    stages, redone = train_ahead(make(clip_norm=clip_norm), ranges, 2)
    assert redone
    assert digest(stages) == digest(expected)


def test_what_is_not_finite_is_taken_back() -> None:
    expected, _ = train(poisoned(convnet_job(), 2), [(0, 3), (3, 6)], [[0, 1]], STEPS)
    stages, redone = train_ahead(poisoned(convnet_job(), 2), [(0, 3), (3, 6)], 2)
    assert redone == [2]
    assert digest(stages) == digest(expected)
    assert all(bool(p.isfinite().all()) for stage in stages for i in stage.layers
               for p in stage.export(i).parameters.values())  # fmt: skip


def test_a_step_taken_back_is_not_presumed_any_more() -> None:
    (stage,) = gpt_job().stages([(0, 5)])
    stage.begin(0)
    for microbatch in range(6):
        run_microbatch([stage], 0, microbatch)
    vote = add_up([stage])[1]
    stage.speculate()
    commit([stage])
    stage.take_back(0)
    with pytest.raises(InternalError, match="no step is speculative"):
        stage.settle(vote)
    with pytest.raises(InternalError, match="no step is speculative"):
        stage.remake_update()


def test_nothing_can_be_presumed_outside_a_step() -> None:
    (stage,) = gpt_job().stages([(0, 5)])
    with pytest.raises(InternalError, match="no step that could be updated ahead of its verdict"):
        stage.speculate()


def test_a_stage_that_follows_catches_up_with_what_is_not_settled_yet() -> None:
    job = gpt_job()
    owner, follower = job.stages([(0, 5), (0, 5)])
    pinned = {layer: owner.snapshot(layer) for layer in range(5)}
    follower.follow(range(5), 0)
    vote = None
    for step in range(3):
        for stage in (owner, follower):
            stage.begin(step)
            assert step == 0 or stage.settle(vote)
        for microbatch in range(job.num_microbatches):
            run_microbatch([owner], step, microbatch)
        vote = add_up([owner, follower])[1]
        for stage in (owner, follower):
            stage.speculate()
        commit([owner, follower])
    follower.heal({layer: encode() for layer, encode in pinned.items()})
    assert digest([owner, follower]) == digest([owner])
    assert owner.settle(vote)
    assert follower.settle(vote)
    assert digest([owner, follower]) == digest([owner])


def test_votes_survive_as_bytes() -> None:
    vote = torch.tensor([[0.0, 1.5, 1.0], [1.0, 2.0**-40, 0.0]], dtype=torch.float64)
    emulated = EmulatedStage(
        layers=(0,), num_layers=1, num_microbatches=1, sends=torch.from_numpy, receives=torch.Tensor.numpy
    )
    for stage in (Stage, emulated):
        assert torch.equal(stage.unpack_vote(stage.pack_vote(vote)), vote)
