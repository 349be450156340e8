"""LAMB, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Lamb"]


class Lamb(Optimizer):
    """Adam's direction, scaled per parameter tensor so that its length is ``lr`` times that of the weights.

    With g the gradient, x the weights of one tensor, t the 1-based step::

        m_t = beta1 m_{t-1} + (1 - beta1) g
        v_t = beta2 v_{t-1} + (1 - beta2) g^2
        r   = (m_t / (1 - beta1^t)) / (sqrt(v_t / (1 - beta2^t)) + eps) + weight_decay x_{t-1}
        q   = min(|x_{t-1}| / |r|, max_trust_ratio), or 1 if either norm is 0
        x_t = x_{t-1} - lr q r

    The state of a parameter is ``step``, ``exp_avg`` (m), ``exp_avg_sq`` (v) and two numbers: ``trust_ratio`` (q) and
    ``weight_norm`` (|x_{t-1}|). The sums in the norms cannot be inverted, so what came of them is kept.

    Source: You et al., Large Batch Optimization for Deep Learning, 2020, algorithm 2, with phi(z) = z. We differ: q is
    limited, as in most implementations, which also bounds the error of taking a step back.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([1.0, -1.0])
    >>> Lamb([weight], lr=0.1).step()
    >>> [round(value, 4) for value in weight.tolist()]  # |x| = 5 and |r| = sqrt(2)
    [2.6464, 4.3536]

    Args:
        params: parameters or groups of them.
        lr: learning rate, not negative.
        betas: decay rates of m and v, from 0 to below 1.
        eps: added to the denominator, above 0.
        weight_decay: not negative; decoupled from m and v.
        max_trust_ratio: limit of q, above 0.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        max_trust_ratio: float = 10.0,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Invalid betas {betas}: expected 0 <= beta < 1")
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0.0:
                raise ValueError(f"Invalid {name} {value}: expected 0 or more")
        for name, value in (("eps", eps), ("max_trust_ratio", max_trust_ratio)):
            if not value > 0.0:
                raise ValueError(f"Invalid {name} {value}: expected more than 0")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "max_trust_ratio": max_trust_ratio})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step on every parameter that has a gradient; return the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _step(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _step(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    state["step"] += 1
    beta1, beta2 = group["betas"]
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    direction = _direction(parameter, state, group)
    state["weight_norm"] = _norm(parameter)
    state["trust_ratio"] = _trust_ratio(state["weight_norm"], _norm(direction), group["max_trust_ratio"])
    parameter.add_(direction, alpha=-group["lr"] * state["trust_ratio"])


def _direction(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    correction1, correction2 = (1 - beta ** state["step"] for beta in group["betas"])
    denominator = state["exp_avg_sq"].sqrt().div_(correction2**0.5).add_(group["eps"])
    direction: Tensor = state["exp_avg"].div(denominator).div_(correction1)
    return direction.add_(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else direction


def _norm(tensor: Tensor) -> float:
    return float(cast(Tensor, tensor.norm()).item())


def _trust_ratio(weights: float, length: float, limit: float) -> float:
    return min(weights / length, limit) if weights > 0 and length > 0 else 1.0
