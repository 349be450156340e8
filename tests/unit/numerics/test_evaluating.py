"""Stages evaluate as the whole model does in eval mode, whoever has its layers, and training notices nothing of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.accelerator import Late
from torch import Tensor, nn

from holdfast.core.placement import LayerRange
from holdfast.core.schedule import OpKind
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError
from holdfast.runtime.engine.evaluated import EvaluationData, check_evaluation, run_as_evaluated, scores_of
from holdfast.runtime.engine.model import Model
from holdfast.runtime.engine.stage import Stage

from .numerics_grid import Job, convnet_job, digest, forward, gpt_job, train

GRIDS = [[(0, 5)], [(0, 2), (2, 5)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]]
RANGES = {"gpt": [(0, 2), (2, 5)], "convnet": [(0, 3), (3, 6)]}


def job_of(kind: str, **options: Any) -> Job:
    job = gpt_job(**options) if kind == "gpt" else convnet_job(**options)
    job.evaluation = EvaluationData(load=lambda number: job.load(100, number % 6), metrics=metrics)
    return job


def metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
    right = output.argmax(-1) == target
    return {"accuracy": right.float().mean(), "right": int(right.sum())}


def scores(stages: list[Stage], number: int) -> dict[str, float]:
    value: Any = None
    for stage in stages:
        value = stage.evaluate(number, value, LayerRange(stage.layers[0], stage.layers[-1] + 1))
    return value


def by_the_whole(stages: list[Stage], job: Job, number: int) -> dict[str, float]:
    assert job.evaluation is not None
    value, target = job.evaluation.load(number)
    with torch.no_grad():
        for stage in stages:
            for layer in stage.layers:
                value = copy.deepcopy(stage._owned[layer].module).eval()(value)
        loss = float(job.loss(value, target))
    found = metrics(value, target)
    return {"loss": loss, "accuracy": float(found["accuracy"]), "right": float(found["right"])}


@pytest.mark.parametrize("kind", ["gpt", "convnet"])
def test_scores_are_those_of_the_whole_in_eval_mode(kind: str) -> None:
    job = job_of(kind)
    stages, _ = train(job, RANGES[kind], [[0, 1]], 2)
    before = digest(stages)
    for number in range(3):
        assert scores(stages, number) == by_the_whole(stages, job, number)
    assert scores(stages, 1) == scores(stages, 1), "nothing is drawn"
    assert digest(stages) == before
    assert all(
        module.training for stage in stages for each in stage._owned.values() for module in each.module.modules()
    )


@pytest.mark.parametrize("ranges", GRIDS, ids=len)
def test_scores_do_not_depend_on_who_has_the_layers(ranges: list[tuple[int, int]]) -> None:
    assert scores(job_of("gpt").stages(ranges), 2) == scores(job_of("gpt").stages(GRIDS[0]), 2)


def test_a_device_gives_them_once_they_are_computed() -> None:
    job = job_of("gpt")
    job.device = Late()
    expected = scores(job_of("gpt").stages(GRIDS[1]), 0)
    assert scores(job.stages(GRIDS[1]), 0) == expected


@pytest.mark.parametrize("kind", ["gpt", "convnet"])
def test_a_step_that_is_under_way_has_the_bits_that_it_has_without(kind: str) -> None:
    """What is gone on with behind a loss is kept while its state is evaluated."""

    def course(*, evaluates: bool) -> Any:
        stages = job_of(kind).stages(RANGES[kind])
        forward(stages, 0, 0)
        if evaluates:
            scores(stages, 0)
        gradient = None
        for stage in reversed(stages):
            gradient = stage.backward(OpKind.B, 0, 0, gradient)
        return [stage.message((layer,)).told for stage in stages for layer in stage.layers]

    for one, other in zip(course(evaluates=True), course(evaluates=False), strict=True):
        assert one.header == other.header
        assert all(torch.equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))


def test_each_part_of_a_layer_is_in_its_mode_again() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)))
    layer[1][1].eval()
    before = [each.training for each in layer.modules()]
    with pytest.raises(RuntimeError):
        run_as_evaluated(0, layer, torch.ones(2, 5), None)
    assert [each.training for each in layer.modules()] == before == [True, True, True, True, False]
    assert not run_as_evaluated(0, layer, torch.ones(2, 3), None).requires_grad


REFUSED = [
    ({"loss": 1.0}, r"evaluate.metrics: expected numbers by their names, none of which is 'loss'; got the keys loss"),
    (3.0, r"evaluate.metrics: expected numbers by their names, none of which is 'loss'; got a float"),
    ({1: 2.0}, r"evaluate.metrics: expected numbers by their names, .* got the keys 1"),
    ({"x": torch.ones(2)}, r"evaluate.metrics: x: expected a number for a whole micro-batch; got a tensor of \[2\]"),
    ({"x": "much"}, r"evaluate.metrics: x: expected a number for a whole micro-batch; got a str"),
]


@pytest.mark.parametrize(("said", "complaint"), REFUSED)
def test_metrics_say_numbers(said: object, complaint: str) -> None:
    model = Model.build([nn.Linear(2, 2)], nn.MSELoss())
    data = EvaluationData(load=lambda number: (torch.ones(1, 2), torch.ones(1, 2)), metrics=lambda output, target: said)
    with pytest.raises(ConfigError, match=complaint):
        check_evaluation(model, data)


def test_metrics_that_raise_are_told_as_what_they_are() -> None:
    model = Model.build([nn.Linear(2, 2)], nn.MSELoss())
    load = lambda number: (torch.ones(1, 2), torch.ones(1, 2))  # noqa: E731
    with pytest.raises(ConfigError, match=r"^evaluate.metrics failed: TypeError: .* takes 1 positional argument"):
        check_evaluation(model, EvaluationData(load=load, metrics=lambda output: {}))  # type: ignore[misc,arg-type]


def test_what_is_not_finite_is_a_score_all_the_same() -> None:
    found = scores_of(lambda output, target: output.sum() / 0, None, torch.ones(2), torch.ones(2))
    assert found == {"loss": float("inf")}


class Counting(nn.Module):
    """Counts in a buffer how often it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("times", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        if not self.training:
            self.times += 1
        return self.inner(value)


def test_a_layer_that_is_changed_by_it_is_refused_before_training() -> None:
    model = Model.build([nn.Linear(2, 2), Counting()], nn.MSELoss())
    data = EvaluationData(load=lambda number: (torch.ones(1, 2), torch.ones(1, 2)))
    with pytest.raises(ConfigError, match=r"^layer 1 \(Counting\) changes 'times' when it is evaluated; expected that"):
        check_evaluation(model, data)


def test_what_a_layer_returns_then_is_as_in_training() -> None:
    class Wider(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            found = super().forward(value)
            return found if self.training else torch.cat([found, found], dim=1)

    model = Model.build([Wider(2, 2)], nn.MSELoss())
    data = EvaluationData(load=lambda number: (torch.ones(1, 2), torch.ones(1, 2)))
    with pytest.raises(ConfigError, match=r"layer 0 \(Wider\) returned float32 \[1, 4\]"):
        check_evaluation(model, data, (TensorSpec(shape=(1, 2), dtype="float32"),))


def test_samples_that_a_layer_changes_are_whole_the_next_time() -> None:
    class InPlace(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value.mul_(2.0))

    job = Job(
        layers=lambda: [InPlace(2, 2), nn.Linear(2, 2)],
        loss=nn.MSELoss(),
        load=lambda step, microbatch: (torch.ones(1, 2), torch.ones(1, 2)),
    )
    kept = torch.ones(1, 2), torch.ones(1, 2)
    job.evaluation = EvaluationData(load=lambda number: kept)
    stages = job.stages([(0, 2)])
    assert scores(stages, 0) == scores(stages, 0)
    assert torch.equal(kept[0], torch.ones(1, 2))
