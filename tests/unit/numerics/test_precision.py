"""Layers that compute in fewer bits, by autocast: the same bits on every grid, weights and sums as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.core.placement import LayerRange
from holdfast.core.schedule import OpKind
from holdfast.errors import ConfigError
from holdfast.optim.loss_scale import LossScaling
from holdfast.runtime.engine.evaluated import EvaluationData
from holdfast.runtime.engine.precision import check_cast

from .numerics_grid import Job, convnet_job, digest, forward, gpt_job, train

BF16, FP16 = torch.bfloat16, torch.float16
GPT_GRIDS: dict[str, dict[str, Any]] = {
    "two_by_two": {"ranges": [(0, 2), (2, 5), (0, 2), (2, 5)], "routes": [[0, 1], [2, 3]]},
    "split": {"ranges": [(0, 3), (3, 5)], "routes": [[0, 1]], "split": True},
    "other_order": {"ranges": [(0, 5)], "routes": [[0]], "order": [4, 1, 5, 0, 3, 2]},
    "one_layer_each": {"ranges": [(i, i + 1) for i in range(5)], "routes": [[0, 1, 2, 3, 4]]},
}
KINDS: dict[str, Any] = {
    "gpt-bf16": lambda: gpt_job(precision=BF16),
    "gpt-fp16": lambda: gpt_job(precision=FP16, scaling=LossScaling(initial=1024.0, growth_every=2)),
    "gpt-bf16-again": lambda: gpt_job(precision=BF16, checkpointed=frozenset({1, 2, 3})),
}


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {kind: train(make(), [(0, 5)], [[0]], 3) for kind, make in KINDS.items()}


@pytest.mark.parametrize("grid", GPT_GRIDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_the_same_on_every_grid(kind: str, grid: str, references: dict[str, Any]) -> None:
    stages, losses = train(KINDS[kind](), steps=3, **GPT_GRIDS[grid])
    assert digest(stages) == digest(references[kind][0])
    assert losses == references[kind][1]


def test_a_pass_that_is_run_again_has_the_same_bits(references: dict[str, Any]) -> None:
    assert digest(references["gpt-bf16-again"][0]) == digest(references["gpt-bf16"][0])


def test_batch_norm_has_the_same_bits_on_every_grid() -> None:
    one, _ = train(convnet_job(precision=BF16), [(0, 6)], [[0]], 2)
    four, _ = train(convnet_job(precision=BF16), [(0, 3), (3, 6), (0, 3), (3, 6)], [[0, 1], [2, 3]], 2)
    assert digest(one) == digest(four)


def test_it_is_near_what_all_bits_give(references: dict[str, Any]) -> None:
    whole, losses = train(gpt_job(), [(0, 5)], [[0]], 3)
    for kind, (stages, fewer) in references.items():
        assert digest(stages) != digest(whole), kind
        assert torch.allclose(torch.tensor(fewer), torch.tensor(losses), rtol=0.02), kind


def test_weights_and_gradients_keep_their_type_and_less_is_sent() -> None:
    """Where a layer ends in an operation that is cast: a GPT's blocks end in a sum with what they were given."""
    first, last = convnet_job(precision=BF16).stages([(0, 5), (5, 6)])
    sent = first.forward(0, 0, None)
    assert sent is not None
    assert sent.dtype is BF16
    last.forward(0, 0, sent)
    back = last.backward(OpKind.B, 0, 0, None)
    assert back is not None
    assert back.dtype is BF16
    assert {each.dtype for each in last.export(5).parameters.values()} == {torch.float32}
    assert {part.dtype for part in last.message((5,)).parts} == {torch.float32}


def test_data_are_loaded_as_they_are_written() -> None:
    """What a person's dataset computes is none of the layers."""
    job = gpt_job(precision=BF16)
    load, seen = job.load, []

    def watched(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return load(step, microbatch)

    job.load = watched
    job.evaluation = EvaluationData(load=lambda number: watched(0, number))
    (stage,) = job.stages([(0, 5)])
    forward([stage], 0, 0)
    scores = stage.evaluate(0, None, LayerRange(0, 5))
    assert isinstance(scores, dict)
    assert len(seen) >= 2
    assert not any(seen)


def test_it_is_evaluated_in_the_same_numbers() -> None:
    def scores(**options: Any) -> Any:
        job: Job = gpt_job(**options)
        job.evaluation = EvaluationData(load=lambda number: job.load(0, number))
        return job.stages([(0, 5)])[0].evaluate(0, None, LayerRange(0, 5))["loss"]  # type: ignore[call-overload]

    assert scores(precision=BF16) != scores()
    assert scores(precision=BF16) == pytest.approx(scores(), rel=0.01)


def test_what_a_device_cannot_is_told_and_not_left_out() -> None:
    for precision in (None, BF16, FP16):
        check_cast(precision, torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"^train.precision: torch.float64 on cpu: .*; expected fp32, or another device"
    ):
        check_cast(torch.float64, torch.device("cpu"))
