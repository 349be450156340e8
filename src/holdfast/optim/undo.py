"""Inverses of optimizer steps: from the weights and state after a step, and its gradient, to those before it.

The idea is SWIFT's (section 4, appendix A): an optimizer whose operators are all invertible needs no copy of the old
state. Here x are the weights, g the gradient that the optimizer got (after clipping and unscaling), lr the learning
rate *used* at that step, u half the distance from 1 to the next number of the parameter's type (2^-24 for float32).

Everything is computed in float64 and rounded once, so what is lost is what the step itself rounded away. The bounds
count its roundings to first order in u; they hold elementwise, for finite values and where nothing underflows.

A factor that the inverse divides by (momentum, a beta, 1 - lr weight_decay) makes the rounding errors larger by its
inverse; at 0 nothing is left to invert. So where a factor is below 1/2, the one entry that it would divide is copied
before the step and put back bitwise. Factors of common settings are above, and cost no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from holdfast.errors import NotUndoable
from holdfast.optim.lamb import Lamb

__all__ = ["WEIGHT", "Inverse", "MadeStep", "Undone", "inverse_of", "register_inverse"]

Group: TypeAlias = Mapping[str, Any]
"""Settings of a parameter group as used: ``lr`` has the schedule's factor in it; ``params`` is absent."""

WEIGHT = "weight"
"""Stands for the parameter itself among the names of entries to keep."""

_LEAST = 0.5
_BLOCK = 1 << 13  # elements that are float64 at a time: a large parameter would need several times its memory
_LAMB_NUMBERS = frozenset({"trust_ratio", "weight_norm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeStep:
    """One optimizer step of one parameter, as it was made.

    Attributes:
        weight: the parameter after the step.
        gradient: as the optimizer got it.
        state: the optimizer's entries for the parameter after the step.
        group: the settings used.
        kept: copies from before the step, of the entries that `Inverse.keep` named and that existed.
    """

    weight: Tensor
    gradient: Tensor
    state: Mapping[str, Any]
    group: Group
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """What a parameter and its entries were before a step.

    Attributes:
        weight: of any floating type; it is rounded to the parameter's.
        state: tensors are rounded to the type of the entry after the step; an entry that is absent goes away.
    """

    weight: Tensor
    state: Mapping[str, Any]


def _nothing(_group: Group) -> None:
    return None


def _no_entries(_group: Group) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse:
    """How to take back one class of optimizer.

    Attributes:
        undo: inverts one parameter's step; pure, must not change its argument's tensors. What it returns as state is
            ignored for a parameter's first step, before which there was none.
        refused: why steps with these settings cannot be inverted, naming the operator; None if they can. Asked once,
            before training starts.
        keep: names of the entries (`WEIGHT`: the parameter) to copy before a step with these settings.
    """

    undo: Callable[[MadeStep], Undone]
    refused: Callable[[Group], str | None] = _nothing
    keep: Callable[[Group], frozenset[str]] = _no_entries


def register_inverse(kind: type[Optimizer], inverse: Inverse) -> None:
    """Make an optimizer class of one's own undoable, in this process; call it where the class is defined.

    It holds for exactly this class: a subclass may step differently and registers its own.

    >>> class SignDescent(torch.optim.SGD):
    ...     pass  # its step: x -= lr * sign(g)
    >>> def undo(made: MadeStep) -> Undone:
    ...     return Undone(weight=made.weight + made.group["lr"] * made.gradient.sign(), state={})
    >>> register_inverse(SignDescent, Inverse(undo=undo))
    """
    _INVERSES[kind] = inverse


def inverse_of(optimizer: Optimizer) -> Inverse:
    """Return how to take back this optimizer's steps.

    Raises:
        NotUndoable: its class has no inverse, or not with its settings; use ``shadow``, or register an inverse.
    """
    name = type(optimizer).__name__
    inverse = _INVERSES.get(type(optimizer))
    if inverse is None:
        known = ", ".join(kind.__name__ for kind in _INVERSES)
        raise NotUndoable(f"{name} has no registered inverse (known: {known}); see holdfast.optim.undo")
    for group in optimizer.param_groups:
        reason = inverse.refused(group)
        if reason is not None:
            raise NotUndoable(f"{name} cannot be undone: {reason}")
    return inverse


def undo_sgd(made: MadeStep) -> Undone:
    """Invert torch.optim.SGD::

        d       = g + weight_decay x_{t-1}                 (-g for maximize)
        m_t     = momentum m_{t-1} + (1 - dampening) d     (m_1 = d)
        x_t     = x_{t-1} - lr d                           without momentum
                  x_{t-1} - lr m_t                         with
                  x_{t-1} - lr (d + momentum m_t)          with, Nesterov

        x_{t-1} = (x_t + lr g) / (1 - lr weight_decay)
                  x_t + lr m_t
                  (x_t + lr (g + momentum m_t)) / (1 - lr weight_decay)
        m_{t-1} = (m_t - (1 - dampening) (g + weight_decay x_{t-1})) / momentum

    Error: with G = |g| + weight_decay |x_{t-1}|, k = |1 - lr weight_decay|, dx the error of x_{t-1}::

        dx <= u (|x_t| + 5 lr G) / k + u |x_{t-1}|                        without momentum
              u (|x_t| + 2 lr |m_t|) + u |x_{t-1}|                        with
              u (|x_t| + 6 lr (G + momentum |m_t|)) / k + u |x_{t-1}|     with, Nesterov
        dm <= (u (|m_t| + 2 momentum |m_{t-1}| + 5 (1 - dampening) G) + (1 - dampening) weight_decay dx) / momentum
              + u |m_{t-1}|

    Source: SWIFT, algorithms 2 and 4. We add dampening, which torch's first step ignores, Nesterov and maximize.
    """
    group = made.group
    lr, decay, momentum = float(group["lr"]), float(group["weight_decay"]), float(group["momentum"])
    after, gradient = made.weight.double(), _ascent(made)
    if momentum == 0:
        return Undone(weight=_kept(made, WEIGHT, (after + lr * gradient) / (1 - lr * decay)), state={})
    moment = made.state["momentum_buffer"].double()
    if group["nesterov"]:
        before = _kept(made, WEIGHT, (after + lr * (gradient + momentum * moment)) / (1 - lr * decay))
    else:
        before = after + lr * moment
    old = (moment - (1 - group["dampening"]) * (gradient + decay * before)) / momentum
    return Undone(weight=before, state={"momentum_buffer": _kept(made, "momentum_buffer", old)})


def _keep_sgd(group: Group) -> frozenset[str]:
    momentum = float(group["momentum"])
    divides = momentum == 0 or group["nesterov"]
    weight = divides and _small(1 - float(group["lr"]) * float(group["weight_decay"]))
    return _names({WEIGHT: weight, "momentum_buffer": momentum != 0 and _small(momentum)})


def undo_adam(made: MadeStep, *, decoupled: bool) -> Undone:
    """Invert torch.optim.Adam, or AdamW (``decoupled``)::

        d       = g + weight_decay x_{t-1}  for Adam, g for AdamW   (-g for maximize)
        m_t     = beta1 m_{t-1} + (1 - beta1) d
        v_t     = beta2 v_{t-1} + (1 - beta2) d^2
        D       = lr (m_t / (1 - beta1^t)) / (sqrt(v_t / (1 - beta2^t)) + eps)
        x_t     = x_{t-1} - D                        Adam
                  (1 - lr weight_decay) x_{t-1} - D  AdamW

        x_{t-1} = x_t + D  or  (x_t + D) / (1 - lr weight_decay)
        m_{t-1} = (m_t - (1 - beta1) d) / beta1
        v_{t-1} = max(0, (v_t - (1 - beta2) d^2) / beta2)

    Error: with G = |g|, for Adam + weight_decay |x_{t-1}|, dx the error of x_{t-1}, c = weight_decay dx for Adam, else
    0, k = |1 - lr weight_decay| for AdamW, else 1::

        dx <= u (|x_t| + 8 |D| + 2 k |x_{t-1}|) / k + u |x_{t-1}|     (the term with 2 only for AdamW)
        dm <= (u (|m_t| + 12 (1 - beta1) (G + |m_{t-1}|)) + (1 - beta1) c) / beta1 + u |m_{t-1}|
        dv <= (u (v_t + 2 beta2 v_{t-1} + 9 (1 - beta2) G^2) + (1 - beta2) (2 G c + c^2)) / beta2 + u v_{t-1}

    Relative to a v_{t-1} far below g^2, dv is large; but v_{t-1} is only ever used as beta2 v_{t-1} + (1 - beta2) g^2,
    of which dv is a part of a few u.

    Source: SWIFT, algorithms 6 and 8. We differ: v takes d^2 with the decay in it; the quotient of algorithm 8 has its
    parentheses, and no second learning rate; v is clamped, since rounding may leave it just below 0.
    """
    group = made.group
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    after = made.weight.double() + lr * _adam_direction(made)
    before = _kept(made, WEIGHT, after / (1 - lr * decay)) if decoupled else after
    gradient = _ascent(made) if decoupled else _ascent(made) + decay * before
    return Undone(weight=before, state=_adam_state(made, gradient))


def _adam_direction(made: MadeStep) -> Tensor:
    step = float(made.state["step"])
    correction1, correction2 = (1 - float(beta) ** step for beta in made.group["betas"])
    moment, square = made.state["exp_avg"].double(), made.state["exp_avg_sq"].double()
    direction: Tensor = (moment / correction1) / ((square / correction2).sqrt() + made.group["eps"])
    return direction


def _adam_state(made: MadeStep, gradient: Tensor) -> dict[str, Any]:
    beta1, beta2 = (torch.tensor(float(beta), dtype=torch.float64) for beta in made.group["betas"])
    moment = (made.state["exp_avg"].double() - (1 - beta1) * gradient) / beta1
    square = (made.state["exp_avg_sq"].double() - (1 - beta2) * gradient.square()) / beta2
    return {
        "step": made.state["step"] - 1,
        "exp_avg": _kept(made, "exp_avg", moment),
        "exp_avg_sq": _kept(made, "exp_avg_sq", square.clamp_min(0)),
    }


def _keep_adam(group: Group, *, decoupled: bool) -> frozenset[str]:
    shrunk = decoupled and _small(1 - float(group["lr"]) * float(group["weight_decay"]))
    return _names({WEIGHT: shrunk, **_small_betas(group)})


def _small_betas(group: Group) -> dict[str, bool]:
    return dict(zip(("exp_avg", "exp_avg_sq"), (_small(float(beta)) for beta in group["betas"]), strict=True))


def _refused_adam(group: Group) -> str | None:
    if group["amsgrad"]:
        return "amsgrad takes an element-wise maximum, which has no inverse"
    return None


def undo_lamb(made: MadeStep) -> Undone:
    """Invert `Lamb`; q is the trust ratio kept in its state, m and v as for AdamW::

        D       = (m_t / (1 - beta1^t)) / (sqrt(v_t / (1 - beta2^t)) + eps)
        x_{t-1} = (x_t + lr q D) / (1 - lr q weight_decay)

    Weights that were all zero come back as zeros: q jumps there (to 1), so that a step made again from weights that are
    almost zero would be another. The numbers of the step before come back from copies.

    Error: as for AdamW, but with k = |1 - lr q weight_decay|::

        dx <= u (|x_t| + lr q (11 |D| + 5 weight_decay |x_{t-1}|)) / k + u |x_{t-1}|

    Source: SWIFT, section 4: LAMB is inverted by saving the norm of the weights.
    """
    rate = float(made.group["lr"]) * float(made.state["trust_ratio"])
    after = made.weight.double() + rate * _adam_direction(made)
    before = _kept(made, WEIGHT, after / (1 - rate * float(made.group["weight_decay"])))
    if made.state["weight_norm"] == 0:
        before = torch.zeros_like(made.weight)
    numbers = {name: made.kept[name] for name in _LAMB_NUMBERS & made.kept.keys()}
    return Undone(weight=before, state={**_adam_state(made, made.gradient.double()), **numbers})


def _keep_lamb(group: Group) -> frozenset[str]:
    """The ratio of the step to come is not known yet, but its limit is."""
    shrunk = _small(1 - group["lr"] * group["max_trust_ratio"] * group["weight_decay"])
    return _names({WEIGHT: shrunk, **_small_betas(group)}) | _LAMB_NUMBERS


def _small(factor: float) -> bool:
    return abs(factor) < _LEAST


def _names(wanted: Mapping[str, bool]) -> frozenset[str]:
    return frozenset(name for name, yes in wanted.items() if yes)


def _ascent(made: MadeStep) -> Tensor:
    gradient = made.gradient.double()
    return -gradient if made.group["maximize"] else gradient


def _kept(made: MadeStep, name: str, computed: Tensor) -> Tensor:
    """The copy of an entry, if there is one: then what was computed had a factor too small to divide by."""
    copy: Tensor | None = made.kept.get(name)
    return computed if copy is None else copy


def _blockwise(undo: Callable[[MadeStep], Undone]) -> Callable[[MadeStep], Undone]:
    """The same inverse block by block, so that only a block is ever float64; for inverses that work elementwise."""

    def run(made: MadeStep) -> Undone:
        if made.weight.numel() <= _BLOCK:
            return undo(made)
        parts = [undo(block) for block in _blocks(made)]
        state = {key: _joined([part.state[key] for part in parts], made.state[key]) for key in parts[0].state}
        return Undone(weight=_joined([part.weight for part in parts], made.weight), state=state)

    return run


def _blocks(made: MadeStep) -> Iterator[MadeStep]:
    def cut(value: Any, start: int) -> Any:
        whole = isinstance(value, Tensor) and value.shape == made.weight.shape
        return value.reshape(-1)[start : start + _BLOCK] if whole else value

    for start in range(0, made.weight.numel(), _BLOCK):
        yield MadeStep(
            weight=cut(made.weight, start),
            gradient=cut(made.gradient, start),
            state={key: cut(value, start) for key, value in made.state.items()},
            group=made.group,
            kept={key: cut(value, start) for key, value in made.kept.items()},
        )


def _joined(parts: Sequence[Any], like: Any) -> Any:
    if not isinstance(like, Tensor) or not like.dim():
        return parts[0]
    return torch.cat([part.to(like.dtype) for part in parts]).view(like.shape)


_INVERSES: dict[type[Optimizer], Inverse] = {
    SGD: Inverse(undo=_blockwise(undo_sgd), keep=_keep_sgd),
    Adam: Inverse(
        undo=_blockwise(partial(undo_adam, decoupled=False)),
        refused=_refused_adam,
        keep=partial(_keep_adam, decoupled=False),
    ),
    AdamW: Inverse(
        undo=_blockwise(partial(undo_adam, decoupled=True)),
        refused=_refused_adam,
        keep=partial(_keep_adam, decoupled=True),
    ),
    Lamb: Inverse(undo=_blockwise(undo_lamb), keep=_keep_lamb),
}
