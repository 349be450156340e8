"""Stages that commit by undo: the same bits as shadow while nothing fails, and within a tolerance after."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from holdfast.errors import InternalError, NotUndoable, WorkFailed
from holdfast.optim.digest import LayerState, decode_layer, encode_layer
from holdfast.optim.factory import OptimizerFactory, make_optimizer
from holdfast.runtime.engine.stage import Stage

from .numerics_grid import Job, commit, convnet_job, digest, gpt_job, reduce, run_microbatch, train

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "momentum": make_optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": make_optimizer("adamw", lr=1e-3, weight_decay=0.1),
    "lamb": make_optimizer("lamb", lr=1e-2, weight_decay=0.1),
}
MODELS: dict[str, Callable[..., Job]] = {"gpt": gpt_job, "convnet": convnet_job}
TOLERANCE = 1e-6


def states(stages: Sequence[Stage]) -> list[LayerState]:
    return [decode_layer(encode_layer(stage.export(layer))) for stage in stages for layer in stage.layers]


def assert_near(found: Sequence[LayerState], expected: Sequence[LayerState], tolerance: float = TOLERANCE) -> None:
    """Steps and buffers equal, all weights together within a relative L2 distance."""
    assert [state.step for state in found] == [state.step for state in expected]
    difference = total = 0.0
    for one, other in zip(found, expected, strict=True):
        for name, buffer in other.buffers.items():
            torch.testing.assert_close(one.buffers[name], buffer, rtol=tolerance, atol=tolerance)
        for name, value in other.parameters.items():
            difference += float((one.parameters[name] - value).double().square().sum())
            total += float(value.double().square().sum())
    assert difference**0.5 <= tolerance * total**0.5


def run_step(stages: Sequence[Stage], step: int) -> None:
    for microbatch in range(6):
        run_microbatch(stages, step, microbatch)
    reduce(stages)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_undo_trains_in_the_same_bits_as_shadow(model: str, optimizer: str) -> None:
    changes: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "clip_norm": 0.5}
    last = len(MODELS[model]().layers())
    shadow, losses = train(MODELS[model](**changes), [(0, last)], [[0]], 3)
    undo, same = train(MODELS[model](commit="undo", **changes), [(0, 2), (2, last)], [[0, 1]], 3)
    assert digest(undo) == digest(shadow)
    assert same == losses
    assert undo[0].layer_digest(0) == shadow[0].layer_digest(0)


@pytest.mark.parametrize("point", ["updated", "half_swapped", "swapped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_taken_back_and_run_again_ends_within_the_tolerance(model: str, optimizer: str, point: str) -> None:
    job = MODELS[model](commit="undo", optimizer=OPTIMIZERS[optimizer], clip_norm=0.5)
    last = len(job.layers())
    expected = states(train(job, [(0, 2), (2, last)], [[0, 1]], 4)[0])
    stages = train(job, [(0, 2), (2, last)], [[0, 1]], 2)[0]
    before = states(stages)
    run_step(stages, 2)
    _interrupt(stages, point)
    for stage in stages:
        stage.take_back(2)
        stage.take_back(2)
    assert_near(states(stages), before, 1e-7)
    for step in (2, 3):
        run_step(stages, step)
        commit(stages)
    assert_near(states(stages), expected)


def _interrupt(stages: Sequence[Stage], point: str) -> None:
    layers = [(stage, layer) for stage in stages for layer in stage.layers]
    for count, (stage, layer) in enumerate(layers):
        stage.update(layer)
        if point == "swapped" or (point == "half_swapped" and count < 3):
            stage.swap(layer)


def test_only_layers_that_were_inverted_are_not_exact() -> None:
    stages = train(gpt_job(commit="undo"), [(0, 2), (2, 5)], [[0, 1]], 2)[0]
    run_step(stages, 2)
    stages[0].update(0)
    stages[0].swap(0)
    for stage in stages:
        stage.take_back(2)
    assert not stages[0].exact(0)
    assert stages[0].whole, "what was inverted can be saved"
    assert all(stages[layer > 1].exact(layer) for layer in (1, 2, 3, 4))


def test_an_omitted_step_is_taken_back_bitwise() -> None:
    stages = train(convnet_job(commit="undo"), [(0, 6)], [[0]], 2)[0]
    before = digest(stages)
    run_step(stages, 2)
    stages[0].conclude(torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    assert stages[0].omitted
    commit(stages)
    assert set(stages[0].layer_steps().values()) == {3}
    stages[0].take_back(2)
    assert digest(stages) == before
    assert stages[0].exact(0)


def test_batch_norm_statistics_come_back_bitwise() -> None:
    stages = train(convnet_job(commit="undo"), [(0, 6)], [[0]], 2)[0]
    before = states(stages)
    run_step(stages, 2)
    commit(stages)
    stages[0].take_back(2)
    for one, other in zip(states(stages), before, strict=True):
        assert all(torch.equal(one.buffers[name], value) for name, value in other.buffers.items())
    assert before[0].buffers["norm.num_batches_tracked"].item() == 12


def test_the_next_update_ends_the_way_back() -> None:
    (stage,) = train(gpt_job(commit="undo"), [(0, 5)], [[0]], 2)[0]
    run_step([stage], 2)
    for layer in range(5):
        stage.update(layer)
    with pytest.raises(InternalError, match="layer 0 is at step 2 and cannot be taken back to 1"):
        stage.take_back(1)


def test_an_optimizer_without_inverse_is_refused() -> None:
    job = gpt_job(commit="undo", optimizer=make_optimizer("adamw", lr=0.1, amsgrad=True))
    with pytest.raises(NotUndoable, match="AdamW cannot be undone: amsgrad takes an element-wise maximum"):
        job.stages([(0, 5)])


@pytest.mark.parametrize("commit_by", ["shadow", "undo"])
def test_an_update_that_raises_breaks_the_layer_only_where_it_is_made_in_place(
    commit_by: Any, monkeypatch: Any
) -> None:
    """What raises in the middle of a step, or of its inverse, is told by its layer; that layer is not to be saved."""
    (stage,) = gpt_job(commit=commit_by, optimizer=OPTIMIZERS["adamw"]).stages([(0, 5)])
    run_step([stage], 0)
    before = stage.export(0).parameters
    kept = {name: value.clone() for name, value in before.items()}

    def fail(*_: object, **__: object) -> None:
        raise ValueError("the optimizer's own")

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    with pytest.raises(WorkFailed, match="update of layer 0: ValueError"):
        commit([stage])
    assert stage.whole == (commit_by == "shadow")
    assert stage.layer_steps()[0] == 0
    if stage.whole:
        assert all(torch.equal(stage.export(0).parameters[name], value) for name, value in kept.items())
