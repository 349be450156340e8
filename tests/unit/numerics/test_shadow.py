import copy
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError, InternalError
from holdfast.optim.digest import decode_layer, encode_layer, layer_sha256
from holdfast.optim.factory import OptimizerFactory, learning_rate_scale, make_optimizer
from holdfast.optim.shadow import ShadowedLayer

from .small_layer import gradients, make_layer


class Eager(torch.optim.Adagrad):
    """Has its state from the beginning, as Adagrad had up to torch 2.6."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr, foreach=False)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.full_like(parameter, 0.5)}


FACTORIES: dict[str, OptimizerFactory] = {
    "sgd": make_optimizer("sgd", lr=0.1),
    "momentum": make_optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": make_optimizer("adam", lr=0.01, weight_decay=0.01),
    "adamw": make_optimizer("adamw", lr=0.01, weight_decay=0.1, betas=(0.8, 0.95)),
    "lamb": make_optimizer("lamb", lr=0.01, weight_decay=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, foreach=False),
    "eager": lambda parameters: Eager(parameters, lr=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1, foreach=False),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1, foreach=False),
}


def advance(shadowed: ShadowedLayer, step: int) -> None:
    shadowed.update(gradients(step, shadowed.module), 1.0 / (1 + step))
    shadowed.swap()


@pytest.mark.parametrize("kind", FACTORIES)
def test_updates_are_bitwise_those_of_torch(kind: str) -> None:
    plain = make_layer()
    shadowed = ShadowedLayer(0, make_layer(), FACTORIES[kind])
    optimizer = FACTORIES[kind]([p for p in plain.parameters() if p.requires_grad])
    base = optimizer.param_groups[0]["lr"]
    for step in range(4):
        for name, gradient in gradients(step, plain).items():
            plain.get_parameter(name).grad = gradient
        optimizer.param_groups[0]["lr"] = base * (1.0 / (1 + step))
        optimizer.step()
        advance(shadowed, step)
        for one, other in zip(plain.parameters(), shadowed.module.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_take_back_is_bitwise_and_so_is_the_step_run_again(kind: str, steps: int) -> None:
    shadowed = ShadowedLayer(0, make_layer(), FACTORIES[kind])
    for step in range(steps):
        advance(shadowed, step)
    before = layer_sha256(shadowed.export())
    advance(shadowed, steps)
    after = layer_sha256(shadowed.export())
    assert after != before
    shadowed.take_back(steps)
    assert layer_sha256(shadowed.export()) == before
    with pytest.raises(InternalError, match="swap without"):
        shadowed.swap()
    advance(shadowed, steps)
    assert layer_sha256(shadowed.export()) == after


def test_an_update_that_was_not_swapped_is_dropped() -> None:
    shadowed = ShadowedLayer(0, make_layer(), FACTORIES["adamw"])
    advance(shadowed, 0)
    before = layer_sha256(shadowed.export())
    shadowed.update(gradients(1, shadowed.module), 1.0)
    shadowed.update(gradients(1, shadowed.module), 1.0)
    assert shadowed.updated
    assert layer_sha256(shadowed.export()) == before
    shadowed.take_back(1)
    assert not shadowed.updated
    assert layer_sha256(shadowed.export()) == before


def test_only_one_step_back_is_kept() -> None:
    shadowed = ShadowedLayer(0, make_layer(), FACTORIES["sgd"])
    for step in range(3):
        advance(shadowed, step)
    for wrong in (0, 1, 4):
        with pytest.raises(InternalError, match=f"cannot be taken back to {wrong}"):
            shadowed.take_back(wrong)
    shadowed.take_back(2)
    with pytest.raises(InternalError):
        shadowed.take_back(1)


def test_an_update_that_failed_half_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shadowed = ShadowedLayer(0, make_layer(), FACTORIES["adam"])
    advance(shadowed, 0)
    before = layer_sha256(shadowed.export())
    steps = iter([True, False])

    def torn(values: Any, into: Any) -> Any:
        if next(steps):
            raise KeyboardInterrupt
        return values

    monkeypatch.setattr(shadowed._optimizer, "step", lambda: torn(None, None))
    with pytest.raises(KeyboardInterrupt):
        shadowed.update(gradients(1, shadowed.module), 1.0)
    assert layer_sha256(shadowed.export()) == before
    monkeypatch.undo()
    shadowed.take_back(1)
    advance(shadowed, 1)
    expected = ShadowedLayer(0, make_layer(), FACTORIES["adam"])
    advance(expected, 0)
    advance(expected, 1)
    assert layer_sha256(shadowed.export()) == layer_sha256(expected.export())


def test_a_skipped_step_counts_and_can_be_taken_back() -> None:
    shadowed = ShadowedLayer(0, make_layer(), FACTORIES["adam"])
    advance(shadowed, 0)
    weights = [p.clone() for p in shadowed.module.parameters()]
    shadowed.skip()
    shadowed.swap()
    assert shadowed.step == 2
    assert all(torch.equal(a, b) for a, b in zip(weights, shadowed.module.parameters(), strict=True))
    shadowed.take_back(1)
    assert shadowed.step == 1


def test_frozen_parameters_and_those_without_gradient_stay() -> None:
    shadowed = ShadowedLayer(0, make_layer(), FACTORIES["adamw"])
    frozen, bias = shadowed.module[2].weight.clone(), shadowed.module[0].bias.clone()
    advance(shadowed, 0)
    assert torch.equal(frozen, shadowed.module[2].weight)
    assert torch.equal(bias, shadowed.module[0].bias)
    assert "0.bias" not in shadowed.export().optimizer
    advance(shadowed, 1)
    advance(shadowed, 2)
    assert shadowed.export().optimizer["0.bias"]["step"] == 1


def test_the_parameters_objects_stay_the_same() -> None:
    layer = make_layer()
    objects = [*layer.parameters(), *layer.buffers()]
    shadowed = ShadowedLayer(0, layer, FACTORIES["sgd"])
    advance(shadowed, 0)
    assert all(a is b for a, b in zip(objects, (*layer.parameters(), *layer.buffers()), strict=True))


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_state_goes_through_bytes_and_trains_on(kind: str) -> None:
    shadowed = ShadowedLayer(7, make_layer(), FACTORIES[kind])
    for step in range(3):
        advance(shadowed, step)
    data = encode_layer(shadowed.export())
    assert data == encode_layer(shadowed.export())
    other = ShadowedLayer(7, copy.deepcopy(make_layer()), FACTORIES[kind])
    other.install(decode_layer(data))
    assert layer_sha256(other.export()) == layer_sha256(shadowed.export())
    advance(shadowed, 3)
    advance(other, 3)
    assert layer_sha256(other.export()) == layer_sha256(shadowed.export())
    with pytest.raises(InternalError, match="does not fit"):
        ShadowedLayer(6, make_layer(), FACTORIES[kind]).install(decode_layer(data))


def test_an_optimizer_with_state_in_its_groups_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
            return super().step(closure)

    shadowed = ShadowedLayer(0, make_layer(), lambda parameters: Counting(parameters, lr=0.1))
    with pytest.raises(ConfigError, match="Counting keeps state"):
        shadowed.update(gradients(2, shadowed.module), 1.0)


def test_a_layer_without_parameters_counts_steps() -> None:
    shadowed = ShadowedLayer(0, nn.ReLU(), FACTORIES["adam"])
    shadowed.update({}, 1.0)
    shadowed.swap()
    assert shadowed.step == 1


def test_optimizers_are_checked_and_pinned() -> None:
    for kind in ("sgd", "adam", "adamw"):  # ours has one implementation only
        group = make_optimizer(kind, lr=0.1)([nn.Parameter(torch.zeros(2))]).param_groups[0]
        assert (group["foreach"], group["fused"]) == (False, False)
    with pytest.raises(ConfigError, match="'lion' is unknown"):
        make_optimizer("lion", lr=0.1)
    with pytest.raises(ConfigError, match="Invalid"):
        make_optimizer("adam", lr=0.1, betas=(1.5, 0.9))


def test_learning_rate_schedules() -> None:
    assert [learning_rate_scale(s, warmup_steps=4) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = [learning_rate_scale(s, warmup_steps=2, total_steps=6, schedule="linear") for s in range(8)]
    assert linear == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = [learning_rate_scale(s, total_steps=4, schedule="cosine") for s in range(5)]
    assert cosine == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    with pytest.raises(ConfigError, match="unknown"):
        learning_rate_scale(0, schedule="step")
    with pytest.raises(ConfigError, match="more than 5 steps"):
        learning_rate_scale(5, warmup_steps=5, total_steps=5, schedule="cosine")
