"""The split backward pass against the fused one, bitwise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from holdfast.runtime.engine.split_backward import fused_gradient, input_gradient, weight_gradient


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        return x + functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)


class TiedTwice(nn.Module):
    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.between = nn.Linear(16, 16)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.between(torch.relu(self.shared(x)))) + x
        return x


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.second.requires_grad_(False)
        self.third.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()
        self.after = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(checkpoint(self.inner, x, use_reentrant=False))


class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.direction, self.scale = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.rand(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scale * self.direction / self.direction.norm(dim=1, keepdim=True)
        return functional.linear(torch.tanh(functional.linear(x, weight)), weight.t())


class ParameterTerm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.term, self.gate = (
            nn.Linear(16, 16),
            nn.Parameter(torch.randn(16)),
            nn.Parameter(torch.randn(16)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.sin(self.term) * self.gate + self.gate


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 16, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class ViewOutput(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(16, 32), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.linear(x))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class IgnoresInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.weight) * self.weight


class DetachedUse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) + self.first(x.detach()) * x.mean()


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.MaxPool2d(2)
    )


def sequence() -> Tensor:
    return torch.randn(4, 6, 16)


def image() -> Tensor:
    return torch.randn(4, 3, 8, 8)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention": (Attention, sequence),
    "tied_twice": (TiedTwice, sequence),
    "tied_five_times": (lambda: TiedTwice(5), sequence),
    "frozen": (Frozen, sequence),
    "all_frozen": (lambda: nn.Linear(16, 16).requires_grad_(False), sequence),
    "convolution": (convolution, image),
    "checkpointed": (Checkpointed, sequence),
    "weight_norm": (WeightNorm, sequence),
    "parameter_term": (ParameterTerm, sequence),
    "gru": (Recurrent, sequence),
    "view_chunk": (lambda: ViewOutput(lambda t: t.chunk(2, dim=-1)[1]), sequence),
    "view_unbind": (lambda: ViewOutput(lambda t: t.unbind(1)[2]), sequence),
    "view_transpose": (lambda: ViewOutput(lambda t: t.transpose(0, 1)[1:]), sequence),
    "unused": (Unused, sequence),
    "ignores_input": (IgnoresInput, sequence),
    "detached_use": (DetachedUse, sequence),
    "no_parameters": (nn.Tanh, sequence),
    "identity": (nn.Identity, sequence),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16)), lambda: torch.randint(10, (4, 6))),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.1), sequence),
}


def run(build: Callable[[], nn.Module], make: Callable[[], Tensor]) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    torch.manual_seed(3)
    layer, x = build(), make()
    x.requires_grad_(x.is_floating_point())
    y = layer(x)
    torch.manual_seed(4)
    return y, x, [p for p in layer.parameters() if p.requires_grad], torch.randn(y.shape)


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("case", CASES)
def test_split_is_bitwise_equal_to_fused(case: str) -> None:
    y, x, parameters, gradient = run(*CASES[case])
    fused_x, fused_parameters = fused_gradient(y, x, parameters, gradient)
    y, x, parameters, gradient = run(*CASES[case])
    split_x, pending = input_gradient(y, x, parameters, gradient)
    del y
    split_parameters = weight_gradient(pending)
    assert same(fused_x, split_x)
    assert len(fused_parameters) == len(split_parameters) == len(parameters)
    assert [same(a, b) for a, b in zip(fused_parameters, split_parameters, strict=True)] == [True] * len(parameters)
    expected_none = {"unused": 2, "ignores_input": 0}
    if case in expected_none:
        assert sum(g is None for g in split_parameters) == expected_none[case]


@pytest.mark.parametrize("case", ["attention", "convolution", "weight_norm", "gru", "tied_twice"])
def test_split_leaves_the_graph_as_it_was(case: str) -> None:
    y, x, parameters, gradient = run(*CASES[case])
    split_x, pending = input_gradient(y, x, parameters, gradient)
    split_parameters = weight_gradient(pending)
    assert all(same(a, b) for a, b in zip(split_parameters, weight_gradient(pending), strict=True))
    fused_x, fused_parameters = fused_gradient(y, x, parameters, gradient)
    assert same(fused_x, split_x)
    assert all(same(a, b) for a, b in zip(fused_parameters, split_parameters, strict=True))
    assert all(p.grad is None for p in parameters)


def test_parameters_with_separate_frontiers_are_separate_groups() -> None:
    y, x, parameters, gradient = run(*CASES["attention"])
    _, pending = input_gradient(y, x, parameters, gradient)
    assert sorted(g.positions for g in pending.groups) == [(0, 1), (2, 3), (4, 5)]
    assert all(len(g.captured) == 1 for g in pending.groups)


def test_without_an_input_gradient_all_work_is_left_to_w() -> None:
    y, _, parameters, gradient = run(*CASES["attention"])
    none, pending = input_gradient(y, None, parameters, gradient)
    assert none is None
    expected = fused_gradient(y, None, parameters, gradient, retain_graph=True)[1]
    assert all(same(a, b) for a, b in zip(expected, weight_gradient(pending), strict=True))
