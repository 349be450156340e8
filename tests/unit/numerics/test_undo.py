"""Layers that are updated in place and taken back by inverting the step. How exactly: tests/property/test_undo.py."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError, InternalError, NotUndoable
from holdfast.optim.digest import LayerState, decode_layer, encode_layer, layer_sha256
from holdfast.optim.factory import OptimizerFactory, make_optimizer
from holdfast.optim.shadow import ShadowedLayer
from holdfast.optim.undo import WEIGHT, Inverse, MadeStep, Undone, register_inverse
from holdfast.optim.undoable import UndoableLayer

from .small_layer import gradients, make_layer

FACTORIES: dict[str, OptimizerFactory] = {
    "sgd": make_optimizer("sgd", lr=0.1, weight_decay=0.01),
    "momentum": make_optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.2),
    "nesterov": make_optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": make_optimizer("adam", lr=0.01, weight_decay=0.01),
    "adamw": make_optimizer("adamw", lr=0.01, weight_decay=0.1, betas=(0.8, 0.95)),
    "lamb": make_optimizer("lamb", lr=0.01, weight_decay=0.1),
}


def fold(step: int) -> Callable[[Any], None]:
    return lambda buffers: buffers["1.running_mean"].mul_(0.9).add_(0.37 * step)


def advance(layer: Any, step: int) -> None:
    layer.update(gradients(step, layer.module), 1.0 / (1 + step), fold(step))
    layer.swap()


def trained(kind: str, steps: int) -> UndoableLayer:
    layer = UndoableLayer(0, make_layer(), FACTORIES[kind])
    for step in range(steps):
        advance(layer, step)
    return layer


def frozen(layer: UndoableLayer) -> LayerState:
    """The state now, in memory of its own."""
    return decode_layer(encode_layer(layer.export()))


def assert_close(state: LayerState, expected: LayerState) -> None:
    """Equal steps, names, numbers and buffers; weights and optimizer state up to a few roundings."""
    assert state.step == expected.step
    for name, buffer in expected.buffers.items():
        assert torch.equal(state.buffers[name], buffer)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(state.parameters[name], value, rtol=1e-6, atol=1e-6)
    assert {name: set(entries) for name, entries in state.optimizer.items()} == {
        name: set(entries) for name, entries in expected.optimizer.items()
    }
    for name, entries in expected.optimizer.items():
        for key, value in entries.items():
            torch.testing.assert_close(state.optimizer[name][key], value, rtol=1e-4, atol=1e-6)


def one_weight(factory: OptimizerFactory, value: Tensor) -> UndoableLayer:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(value.clone()))
    return UndoableLayer(0, module, factory)


def step(layer: UndoableLayer, gradient: Tensor, lr_scale: float = 1.0) -> None:
    layer.update({"w": gradient}, lr_scale)
    layer.swap()


@pytest.mark.parametrize("kind", FACTORIES)
def test_steps_are_bitwise_those_of_shadow(kind: str) -> None:
    undoable, shadowed = trained(kind, 4), ShadowedLayer(0, make_layer(), FACTORIES[kind])
    for number in range(4):
        advance(shadowed, number)
    assert layer_sha256(undoable.export()) == layer_sha256(shadowed.export())
    assert undoable.exact
    assert shadowed.exact


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_step_taken_back_and_made_again(kind: str, steps: int) -> None:
    layer = trained(kind, steps)
    before = frozen(layer)
    advance(layer, steps)
    after = frozen(layer)
    assert layer_sha256(after) != layer_sha256(before)
    layer.take_back(steps)
    layer.take_back(steps)
    assert_close(layer.export(), before)
    assert not layer.exact
    with pytest.raises(InternalError, match="swap without"):
        layer.swap()
    advance(layer, steps)
    assert_close(layer.export(), after)


def test_a_lamb_step_from_zero_weights_is_the_same_step_when_made_again() -> None:
    """The trust ratio jumps where the weights are zero: almost zero would not do."""
    layer = one_weight(FACTORIES["lamb"], torch.zeros(20))
    gradient = torch.randn(20, generator=torch.Generator().manual_seed(0))
    step(layer, gradient)
    after = frozen(layer)
    layer.take_back(0)
    step(layer, gradient)
    assert_close(layer.export(), after)


@pytest.mark.parametrize("kind", FACTORIES)
def test_the_first_step_goes_back_to_no_state(kind: str) -> None:
    layer = trained(kind, 1)
    layer.take_back(0)
    assert layer.export().optimizer == {}


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_parameter_without_gradient_stays_bitwise(kind: str) -> None:
    layer = trained(kind, 3)
    before = frozen(layer)
    layer.update({**gradients(3, layer.module), "0.weight": None}, 1.0)
    layer.swap()
    layer.take_back(3)
    after = layer.export()
    assert torch.equal(after.parameters["0.weight"], before.parameters["0.weight"])
    for key, value in before.optimizer.get("0.weight", {}).items():
        torch.testing.assert_close(after.optimizer["0.weight"][key], value, rtol=0, atol=0)


def test_buffers_come_back_bitwise_and_are_the_same_objects() -> None:
    layer = trained("adam", 3)
    objects = [*layer.module.parameters(), *layer.module.buffers()]
    before = {name: value.clone() for name, value in layer.module.named_buffers()}
    advance(layer, 3)
    assert not torch.equal(layer.module.get_buffer("1.running_mean"), before["1.running_mean"])
    layer.take_back(3)
    for name, value in layer.module.named_buffers():
        assert torch.equal(value, before[name])
    assert all(a is b for a, b in zip(objects, (*layer.module.parameters(), *layer.module.buffers()), strict=True))


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_skipped_step_is_taken_back_bitwise(kind: str) -> None:
    layer = trained(kind, 2)
    before = layer_sha256(layer.export())
    layer.skip()
    layer.swap()
    assert layer.step == 3
    layer.take_back(2)
    assert layer_sha256(layer.export()) == before
    assert layer.exact


def test_an_update_that_was_not_swapped_is_dropped_bitwise() -> None:
    layer = trained("adamw", 2)
    before = layer_sha256(layer.export())
    layer.update(gradients(2, layer.module), 1.0, fold(2))
    layer.update(gradients(2, layer.module), 1.0, fold(2))
    assert layer.updated
    assert layer_sha256(layer.export()) == before
    layer.take_back(2)
    assert not layer.updated
    assert layer_sha256(layer.export()) == before
    assert layer.exact


def test_only_one_step_back_is_kept() -> None:
    layer = trained("sgd", 3)
    for wrong in (0, 1, 4):
        with pytest.raises(InternalError, match=f"cannot be taken back to {wrong}"):
            layer.take_back(wrong)
    layer.take_back(2)
    with pytest.raises(InternalError, match="cannot be taken back to 1"):
        layer.take_back(1)


def test_an_update_that_failed_before_its_step_changes_nothing() -> None:
    layer = trained("adam", 1)
    before = layer_sha256(layer.export())

    def torn(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        layer.update(gradients(1, layer.module), 1.0, torn)
    assert not layer.updated
    assert layer_sha256(layer.export()) == before
    advance(layer, 1)
    assert layer_sha256(layer.export()) == layer_sha256(trained("adam", 2).export())


@pytest.mark.parametrize("kind", FACTORIES)
def test_the_learning_rate_used_is_the_one_inverted(kind: str) -> None:
    """The schedule has moved on a hundredfold; the rate of the step counts."""
    layer = trained(kind, 3)
    before = frozen(layer)
    layer.update(gradients(3, layer.module), 0.01)
    layer.swap()
    layer.take_back(3)
    assert_close(layer.export(), frozen_with(before, layer))


def frozen_with(before: LayerState, layer: UndoableLayer) -> LayerState:
    """The state before; its buffers as they are now, where they are not the point."""
    return LayerState(
        layer=before.layer,
        step=before.step,
        parameters=before.parameters,
        buffers=dict(layer.export().buffers),
        optimizer=before.optimizer,
    )


@pytest.mark.parametrize(
    ("factory", "entry"),
    [
        (make_optimizer("adam", lr=0.1, betas=(0.0, 0.9)), "exp_avg"),
        (make_optimizer("adamw", lr=0.1, betas=(0.9, 0.0)), "exp_avg_sq"),
        (make_optimizer("lamb", lr=0.1, betas=(0.0, 0.0)), "exp_avg_sq"),
        (make_optimizer("sgd", lr=0.1, momentum=0.001), "momentum_buffer"),
        (make_optimizer("sgd", lr=0.5, weight_decay=2.0), WEIGHT),
        (make_optimizer("sgd", lr=0.5, weight_decay=2.0, momentum=0.9, nesterov=True), WEIGHT),
        (make_optimizer("adamw", lr=0.5, weight_decay=2.0), WEIGHT),
        (make_optimizer("lamb", lr=0.1, weight_decay=1.0), WEIGHT),
    ],
)
def test_what_no_inverse_can_compute_comes_back_bitwise(factory: OptimizerFactory, entry: str) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = one_weight(factory, torch.randn(50, generator=generator))
    for _ in range(2):
        step(layer, torch.randn(50, generator=generator))
    before = frozen(layer)
    step(layer, torch.randn(50, generator=generator))
    layer.take_back(2)
    state = layer.export()
    found, expected = ((s.parameters["w"] if entry == WEIGHT else s.optimizer["w"][entry]) for s in (state, before))
    assert torch.equal(found, expected)
    for value in (state.parameters["w"], *(v for v in state.optimizer.get("w", {}).values() if isinstance(v, Tensor))):
        assert bool(value.isfinite().all())


@pytest.mark.parametrize("kind", FACTORIES)
def test_large_parameters_are_undone_in_blocks_with_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for block in (100, 10_000):
        monkeypatch.setattr("holdfast.optim.undo._BLOCK", block)
        generator = torch.Generator().manual_seed(1)
        layer = one_weight(FACTORIES[kind], torch.randn(21, 10, generator=generator))
        for _ in range(3):
            step(layer, torch.randn(21, 10, generator=generator))
        layer.take_back(2)
        found.append(layer_sha256(layer.export()))
    assert found[0] == found[1]


def test_weight_kept_at_the_first_step_too() -> None:
    layer = one_weight(make_optimizer("sgd", lr=1.0, weight_decay=1.0), torch.arange(4.0))
    step(layer, torch.ones(4))
    layer.take_back(0)
    assert torch.equal(layer.export().parameters["w"], torch.arange(4.0))


@pytest.mark.parametrize("kind", ["adam", "adamw", "lamb"])
def test_a_second_moment_just_below_zero_is_clamped(kind: str) -> None:
    layer = one_weight(make_optimizer(kind, lr=0.01), torch.ones(1000))
    step(layer, torch.zeros(1000))
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    step(layer, gradient)
    square = layer.export().optimizer["w"]["exp_avg_sq"].double()
    assert bool((square - (1 - 0.999) * gradient.double().square() < 0).any()), "there is something to clamp"
    layer.take_back(1)
    undone = layer.export().optimizer["w"]["exp_avg_sq"]
    assert bool((undone >= 0).all())
    assert float((undone / gradient.square()).max()) < 1e-9
    step(layer, gradient)
    assert bool(layer.export().parameters["w"].isfinite().all())


@pytest.mark.parametrize("kind", FACTORIES)
def test_fifty_times_back_and_forth_costs_fifty_roundings_at_most(kind: str) -> None:
    layer, expected = trained(kind, 3), frozen(trained(kind, 3))
    for _ in range(50):
        advance(layer, 3)
        layer.take_back(3)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(layer.export().parameters[name], value, rtol=0, atol=50 * 4 * 2.0**-24)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_loss_scaling_never_reaches_the_inverse(scale: float) -> None:
    """The gradient kept is the one that the optimizer got: unscaled, and clipped."""
    layer = trained("adamw", 3)
    before = frozen(layer)
    unscaled = {n: None if g is None else (g * scale) / scale * 0.1 for n, g in gradients(3, layer.module).items()}
    layer.update(unscaled, 1.0)
    layer.swap()
    layer.take_back(3)
    assert_close(layer.export(), before)


def test_every_group_has_its_own_settings() -> None:
    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 0.1 * 3**i, "weight_decay": 0.1 * i} for i, p in enumerate(parameters)]
        return torch.optim.AdamW(groups, foreach=False)

    layer = UndoableLayer(0, make_layer(), factory)
    for number in range(3):
        advance(layer, number)
    before = frozen(layer)
    advance(layer, 3)
    layer.take_back(3)
    assert_close(layer.export(), before)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (make_optimizer("adam", lr=0.1, amsgrad=True), "Adam cannot be undone: amsgrad takes an element-wise maximum"),
        (make_optimizer("adamw", lr=0.1, amsgrad=True), "AdamW cannot be undone: amsgrad"),
        (lambda p: torch.optim.NAdam(p, foreach=False), "NAdam has no registered inverse"),
        (lambda p: torch.optim.Adagrad(p, foreach=False), r"Adagrad has no registered inverse \(known: SGD, Adam,"),
    ],
)
def test_what_has_no_inverse_is_refused_at_construction(factory: OptimizerFactory, message: str) -> None:
    with pytest.raises(NotUndoable, match=message):
        UndoableLayer(0, make_layer(), factory)


class SignDescent(torch.optim.Optimizer):
    """x -= lr sign(g); counts its steps as a plain number."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
                    self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1


def undo_sign(made: MadeStep) -> Undone:
    weight = made.weight.double() + made.group["lr"] * made.gradient.sign()
    return Undone(weight=weight, state={"calls": made.state["calls"] - 1})


def test_a_users_optimizer_is_undone_once_its_inverse_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return SignDescent(parameters, lr=0.1)

    monkeypatch.setattr("holdfast.optim.undo._INVERSES", {})
    with pytest.raises(NotUndoable, match="SignDescent has no registered inverse"):
        UndoableLayer(0, make_layer(), make)
    register_inverse(SignDescent, Inverse(undo=undo_sign))
    layer = UndoableLayer(0, make_layer(), make)
    for number in range(3):
        advance(layer, number)
    before = frozen(layer)
    advance(layer, 3)
    assert layer.export().optimizer["0.weight"]["calls"] == 4
    layer.take_back(3)
    assert_close(layer.export(), before)
    layer.take_back(3)
    with pytest.raises(InternalError):
        layer.take_back(2)


def test_a_subclass_has_no_inverse_of_its_own() -> None:
    class Warmer(torch.optim.SGD):
        pass

    with pytest.raises(NotUndoable, match="Warmer has no registered"):
        UndoableLayer(0, make_layer(), lambda parameters: Warmer(parameters, lr=0.1))


def test_an_optimizer_that_changes_its_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halving(SignDescent):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.mul_(0.5)

    monkeypatch.setattr("holdfast.optim.undo._INVERSES", {Halving: Inverse(undo=undo_sign)})
    layer = UndoableLayer(0, make_layer(), lambda parameters: Halving(parameters, lr=0.1))
    layer.update(gradients(2, layer.module), 1.0)
    with pytest.raises(ConfigError, match="Halving changes its gradients"):
        layer.swap()


def test_an_optimizer_without_all_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not given parameter '0\.bias'"):
        UndoableLayer(0, make_layer(), lambda parameters: torch.optim.SGD(parameters[:1], lr=0.1))


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_state_goes_through_bytes_and_trains_on(kind: str) -> None:
    layer = trained(kind, 3)
    other = UndoableLayer(0, copy.deepcopy(make_layer()), FACTORIES[kind])
    advance(other, 0)
    other.install(decode_layer(encode_layer(layer.export())))
    assert layer_sha256(other.export()) == layer_sha256(layer.export())
    assert not other.exact, "nobody can tell whether it was taken back where it came from"
    with pytest.raises(InternalError, match="cannot be taken back"):
        other.take_back(2)
    advance(layer, 3)
    advance(other, 3)
    assert layer_sha256(other.export()) == layer_sha256(layer.export())


def test_a_layer_without_parameters_counts_steps() -> None:
    layer = UndoableLayer(0, nn.ReLU(), make_optimizer("adam", lr=0.1, amsgrad=True))
    layer.update({}, 1.0)
    layer.swap()
    assert layer.step == 1
    layer.take_back(0)
    assert layer.step == 0


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lamb"])
def test_no_second_copy_of_weights_or_state_is_kept(kind: str) -> None:
    """Between steps, all tensors of the layer's size are the weight, the optimizer's entries and the gradient."""
    layer = one_weight(FACTORIES[kind], torch.ones(10_000))
    for _ in range(3):
        step(layer, torch.ones(10_000))
    update = layer._update
    assert update is not None
    extra = (*update.buffers, *update.gradients, *(value for kept in update.kept for value in kept.values()))
    assert sum(value.numel() for value in extra if isinstance(value, Tensor)) == 10_000
    assert layer._stand_ins[0].data_ptr() == layer.module.get_parameter("w").data_ptr()
