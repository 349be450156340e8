"""A step taken back: within the stated bound of the state before, for any shapes, settings, gradients and history.

The bounds are those of the docstrings in `holdfast.optim.undo`, written down a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from holdfast.optim.lamb import Lamb
from holdfast.optim.undoable import UndoableLayer

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8}
SECOND_ORDER = 1.01  # the bounds drop products of roundings
KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "lamb": Lamb}


@dataclass(frozen=True)
class Case:
    """A history of steps and the one to take back."""

    kind: str
    options: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...] = ((40, 25),)
    warmup: int = 3
    seed: int = 0
    weight_scale: float = 1.0
    gradient_scale: float = 1.0
    lr_scale: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def group(self) -> dict[str, Any]:
        """The settings used at the last step."""
        found = KINDS[self.kind]([torch.zeros(1)], **self.options).param_groups[0]
        return {**found, "lr": found["lr"] * self.lr_scale}


@dataclass(frozen=True)
class Point:
    """One parameter, as float64, and its entries."""

    weight: Tensor
    state: dict[str, Any]


def point(layer: UndoableLayer, name: str) -> Point:
    state = layer.export()
    entries = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.optimizer.get(name, {}).items()}
    return Point(state.parameters[name].clone(), entries)


def undo_last(case: Case) -> list[tuple[Point, Point, Point, Tensor | None]]:
    """Make the steps, take the last one back: per parameter before, after, undone, and the last gradient."""
    generator = torch.Generator().manual_seed(case.seed)
    module = nn.Module()
    for index, shape in enumerate(case.shapes):
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * case.weight_scale
        module.register_parameter(f"p{index}", nn.Parameter(value.to(case.dtype)))
    layer = UndoableLayer(0, module, lambda parameters: KINDS[case.kind](parameters, **case.options))
    for _ in range(case.warmup):
        layer.update(draw_gradients(case, generator), 1.0)
        layer.swap()
    before = [point(layer, name) for name in layer.trainable]
    gradients = draw_gradients(case, generator)
    layer.update(gradients, case.lr_scale)
    layer.swap()
    after = [point(layer, name) for name in layer.trainable]
    layer.take_back(case.warmup)
    undone = [point(layer, name) for name in layer.trainable]
    return list(zip(before, after, undone, gradients.values(), strict=True))


def draw_gradients(case: Case, generator: torch.Generator) -> dict[str, Tensor | None]:
    def draw(shape: tuple[int, ...]) -> Tensor | None:
        kind = int(torch.randint(8, (), generator=generator))
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        spread = 10.0 ** torch.randint(-2, 3, shape, generator=generator)
        value = value * spread * case.gradient_scale * (torch.rand(shape, generator=generator) > 0.1)
        return value.to(case.dtype) if kind else None

    return {f"p{index}": draw(shape) for index, shape in enumerate(case.shapes)}


def bounds(case: Case, before: Point, after: Point, gradient: Tensor) -> dict[str, Tensor]:
    """Per entry the largest error stated; of weights too. Entries before the first step are not there."""
    wide = [Point(p.weight.double(), {k: v.double() if isinstance(v, Tensor) else v for k, v in p.state.items()})
            for p in (before, after)]  # fmt: skip
    of = _sgd_bounds if case.kind == "sgd" else _adam_bounds
    return of(case, wide[0], wide[1], gradient.double().abs(), UNIT[case.dtype])


def _sgd_bounds(case: Case, before: Point, after: Point, gradient: Tensor, u: float) -> dict[str, Tensor]:
    group = case.group
    lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
    size = gradient + decay * before.weight.abs()
    k = abs(1 - lr * decay)
    x, start = after.weight.abs(), u * before.weight.abs()
    if not momentum:
        return {"weight": torch.zeros_like(x) if k < 0.5 else u * (x + 5 * lr * size) / k + start}
    moment = after.state["momentum_buffer"].abs()
    if group["nesterov"]:
        weight = u * (x + 6 * lr * (size + momentum * moment)) / k + start
        weight = torch.zeros_like(x) if k < 0.5 else weight
    else:
        weight = u * (x + 2 * lr * moment) + start
    if not before.state:
        return {"weight": weight}
    old, fresh = before.state["momentum_buffer"].abs(), 1 - group["dampening"]
    error = u * (moment + 2 * momentum * old + 5 * fresh * size) + fresh * decay * weight
    return {"weight": weight, "momentum_buffer": error / momentum + u * old if momentum >= 0.5 else 0 * old}


def _adam_bounds(case: Case, before: Point, after: Point, gradient: Tensor, u: float) -> dict[str, Tensor]:
    group = case.group
    decay, (beta1, beta2) = group["weight_decay"], group["betas"]
    weight = _adam_weight_bound(case, before, after, u)
    if not before.state:
        return {"weight": weight}
    coupled = decay if case.kind == "adam" else 0.0
    size, c = gradient + coupled * before.weight.abs(), coupled * weight
    m, v = before.state["exp_avg"].abs(), before.state["exp_avg_sq"]
    dm = u * (after.state["exp_avg"].abs() + 12 * (1 - beta1) * (size + m)) + (1 - beta1) * c
    dv = u * (after.state["exp_avg_sq"] + 2 * beta2 * v + 9 * (1 - beta2) * size**2)
    dv = dv + (1 - beta2) * (2 * size * c + c**2)
    return {
        "weight": weight,
        "exp_avg": dm / beta1 + u * m if beta1 >= 0.5 else 0 * m,
        "exp_avg_sq": dv / beta2 + u * v if beta2 >= 0.5 else 0 * v,
    }


def _adam_weight_bound(case: Case, before: Point, after: Point, u: float) -> Tensor:
    group = case.group
    lr, decay, step = group["lr"], group["weight_decay"], float(after.state["step"])
    correction1, correction2 = (1 - beta**step for beta in group["betas"])
    direction = (after.state["exp_avg"].abs() / correction1) / (
        (after.state["exp_avg_sq"] / correction2).sqrt() + group["eps"]
    )
    x, start = after.weight.abs(), before.weight.abs()
    if case.kind == "adam":
        return u * (x + 8 * lr * direction) + u * start
    rate = lr * after.state["trust_ratio"] if case.kind == "lamb" else lr
    limit = lr * group["max_trust_ratio"] if case.kind == "lamb" else lr
    if abs(1 - limit * decay) < 0.5:
        return torch.zeros_like(x)
    k = abs(1 - rate * decay)
    roundings = 11 * direction + 5 * decay * start if case.kind == "lamb" else 8 * direction
    rest = 0 if case.kind == "lamb" else 2 * k * start
    return u * (x + rate * roundings + rest) / k + u * start


def worst(case: Case, slack: float = 1.0) -> dict[str, float]:
    """Check every parameter; return, per entry, the largest share of its bound that was reached."""
    found: dict[str, float] = {}
    for before, after, undone, gradient in undo_last(case):
        if gradient is None:
            assert torch.equal(undone.weight, before.weight)
            assert repr(undone.state) == repr(before.state)
            continue
        assert undone.state.keys() == before.state.keys()
        for name in before.state.keys() & {"step", "trust_ratio", "weight_norm"}:
            assert undone.state[name] == before.state[name]
        for name, bound in bounds(case, before, after, gradient).items():
            old, new = (p.weight if name == "weight" else p.state[name] for p in (before, undone))
            assert new.dtype == old.dtype
            error, limit = (new.double() - old.double()).abs(), slack * SECOND_ORDER * bound + 1e-37
            assert bool((error <= limit).all()), f"{name}: {(error / limit).max().item():.2f} of the bound"
            found[name] = max(found.get(name, 0.0), float((error / limit).max()))
    return found


shapes = st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)
weight_scales = st.sampled_from([0.0, 1e-3, 1.0, 30.0])
scales = st.sampled_from([1e-3, 1e-1, 1.0, 30.0])
rates = st.sampled_from([0.0, 1e-5, 1e-3, 0.1, 0.9])
decays = st.sampled_from([0.0, 1e-4, 0.01, 0.3, 1.0, 2.0])
betas = st.tuples(st.sampled_from([0.0, 0.3, 0.5, 0.9]), st.sampled_from([0.0, 0.4, 0.95, 0.999]))
momenta = st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99])


@st.composite
def sgd_options(draw: Any) -> dict[str, Any]:
    momentum = draw(momenta)
    nesterov = draw(st.booleans()) and momentum > 0
    dampening = 0.0 if nesterov or momentum == 0 else draw(st.sampled_from([0.0, 0.2, 0.9]))
    return {
        "lr": draw(rates),
        "momentum": momentum,
        "nesterov": nesterov,
        "dampening": dampening,
        "weight_decay": draw(decays),
        "maximize": draw(st.booleans()),
    }


@st.composite
def adam_options(draw: Any) -> dict[str, Any]:
    fields = {"lr": rates, "betas": betas, "weight_decay": decays, "eps": st.sampled_from([1e-8, 1e-4])}
    return {name: draw(strategy) for name, strategy in fields.items()}


@st.composite
def cases(draw: Any, kind: str, dtype: torch.dtype = torch.float32) -> Case:
    options = draw(sgd_options() if kind == "sgd" else adam_options())
    if kind in ("adam", "adamw"):
        options["maximize"] = draw(st.booleans())
    return Case(
        kind=kind,
        options=options,
        shapes=draw(shapes),
        warmup=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**32)),
        weight_scale=draw(weight_scales),
        gradient_scale=draw(scales),
        lr_scale=draw(st.sampled_from([1.0, 0.5, 0.013])),
        dtype=dtype,
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data())
def test_float32_comes_back_within_the_bound(kind: str, data: Any) -> None:
    worst(data.draw(cases(kind)))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_float64_comes_back_to_machine_precision(kind: str, data: Any) -> None:
    """Here the inverse rounds as coarsely as the step, so that it adds as much error again, at most three times."""
    worst(data.draw(cases(kind, torch.float64)), slack=4.0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_bfloat16_comes_back_within_the_bound(kind: str, data: Any) -> None:
    worst(data.draw(cases(kind, torch.bfloat16)), slack=1.2)


TIGHT = {
    "sgd": {"lr": 0.1, "weight_decay": 0.01},
    "momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "adam": {"lr": 0.01, "weight_decay": 0.01},
    "adamw": {"lr": 0.01, "weight_decay": 0.01},
    "lamb": {"lr": 0.01, "weight_decay": 0.01},
}


@pytest.mark.parametrize("name", TIGHT)
def test_the_bounds_are_not_loose(name: str) -> None:
    """Errors that happen reach a good part of every bound: nobody could state a bound several times smaller."""
    kind = name if name in KINDS else "sgd"
    reached: dict[str, float] = {}
    for seed in range(8):
        for entry, share in worst(Case(kind=kind, options=TIGHT[name], shapes=((100, 100),), seed=seed)).items():
            reached[entry] = max(reached.get(entry, 0.0), share)
    assert reached.keys() > {"weight"} or name == "sgd"
    assert min(reached.values()) > 0.3, reached
