from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.optim.lamb import Lamb


def by_the_book(x: Tensor, gradients: list[Tensor], **options: Any) -> Tensor:
    """The equations of the docstring, in float64."""
    beta1, beta2 = options["betas"]
    x, m, v = x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double()
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        r = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + options["eps"]) + options["weight_decay"] * x
        q = min(float(x.norm() / r.norm()), options["max_trust_ratio"])
        x = x - options["lr"] * q * r
    return x


@pytest.mark.parametrize("limit", [10.0, 0.01])
def test_steps_are_those_of_the_equations(limit: float) -> None:
    options = {"lr": 0.05, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1, "max_trust_ratio": limit}
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 4, generator=generator)
    gradients = [torch.randn(5, 4, generator=generator) for _ in range(6)]
    weight = nn.Parameter(start.clone())
    optimizer = Lamb([weight], **options)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(weight.double(), by_the_book(start, gradients, **options), rtol=1e-5, atol=1e-6)
    assert 0 < optimizer.state[weight]["trust_ratio"] <= limit


def test_the_trust_ratio_is_one_where_a_norm_is_zero() -> None:
    zero, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    zero.grad, still.grad = torch.ones(3), torch.zeros(3)
    optimizer = Lamb([zero, still], lr=0.1)
    optimizer.step()
    assert [optimizer.state[p]["trust_ratio"] for p in (zero, still)] == [1.0, 1.0]
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.1), rtol=1e-4, atol=0)
    assert torch.equal(still, torch.ones(3))


def test_a_parameter_without_gradient_has_no_state() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Lamb([weight], lr=0.1)
    optimizer.step()
    assert optimizer.state == {}
    assert torch.equal(weight, torch.ones(2))


def test_the_closure_runs_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Lamb([weight], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 2.0
    assert bool((weight < 1).all())


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", -1.0), ("betas", (1.0, 0.9)), ("eps", 0.0), ("weight_decay", -0.1), ("max_trust_ratio", 0.0)],
)
def test_values_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"Invalid {option}"):
        Lamb([nn.Parameter(torch.zeros(1))], **{option: value})
