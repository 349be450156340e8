"""Calls that everybody's loop has, and whose work Holdfast does: what is meant is done, or the call is an error.

Gradients, until the items of a step are summed, are those of one item alone: to clip or to zero them behind its
backward pass would train another model, or none. An error is raised by the call itself, so that it names the line.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import ConfigError
from holdfast.runtime.loop.leftovers import replace_imported

__all__ = [
    "Divisors",
    "advance",
    "meet_clipping",
    "meet_loading",
    "meet_optimizer",
    "meet_scaler",
    "meet_scheduler",
    "meet_stray_scalers",
    "stray_schedulers",
]


# --- optimizers -------------------------------------------------------------------------------------------------------


def meet_optimizer(optimizer: Optimizer) -> None:
    """From now on its ``step`` is refused, and its ``zero_grad`` where that would lose the gradients of an item."""
    kind = type(optimizer).__name__

    def zero_grad(*args: object, **kwargs: object) -> None:
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                f"{kind}.zero_grad behind step.backward(loss) would drop the gradients of the item; they are summed, "
                "and dropped, by Holdfast: leave this call out"
            )

    vars(optimizer)["zero_grad"] = zero_grad
    _refuse(optimizer, "step", f"{kind}.step: {_STEPS}; leave this call out")
    vars(optimizer)["_opt_called"] = True  # schedulers warn if nobody has stepped it


def meet_loading(optimizer: Optimizer) -> None:
    """From now on its ``load_state_dict`` is refused."""
    what = f"{type(optimizer).__name__}.load_state_dict within the loop over hf.steps: the state is the job's; expected"
    _refuse(
        optimizer,
        "load_state_dict",
        f"{what} before hf.steps, where it becomes the first state, or --resume to go on from a checkpoint",
    )


_STEPS = "Holdfast makes the step once all gradients are there, when the loop over the items of a step ends"


def _refuse(owner: object, name: str, text: str) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(text)

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers warn if it is another one than they met
    vars(owner)[name] = refuse


# --- schedulers -------------------------------------------------------------------------------------------------------


def meet_scheduler(scheduler: Any) -> None:
    """From now on its ``step`` is refused, but by `advance`; all else of it, its state too, is as it was."""
    kind = type(scheduler)

    def step(self: Any, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(
            f"{kind.__name__}.step: Holdfast has the scheduler take its step behind each step, since hf.prepare was "
            "given it; leave this call out"
        )

    names = {"step": step, "__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    scheduler.__class__ = type(kind.__name__, (kind,), names)


def advance(scheduler: Any) -> None:
    """Has a scheduler that was met take its step."""
    super(type(scheduler), scheduler).step()


def stray_schedulers(optimizers: Sequence[Optimizer], known: Iterable[object]) -> list[Any]:
    """Returns the schedulers of these optimizers that the script steps by itself: their state goes with the model's.

    Args:
        optimizers: all that are trained by.
        known: schedulers and other objects whose state is told already.
    """
    told = {id(each) for each in known}
    found = [
        each
        for each in _instances(LRScheduler, ReduceLROnPlateau)
        if any(getattr(each, "optimizer", None) is optimizer for optimizer in optimizers)
    ]
    parts = {id(part) for each in found for part in getattr(each, "_schedulers", ())}
    order = [id(optimizer) for optimizer in optimizers]
    stray = [each for each in found if id(each) not in told | parts]
    return sorted(stray, key=lambda each: (order.index(id(each.optimizer)), type(each).__qualname__))


def _instances(*kinds: type) -> list[Any]:
    """Returns the living objects of some classes and of those derived from them.

    They are found as what refers to their class. Whoever asks for all objects (``gc.get_objects``) holds tuples that
    other threads are about to fill, and CPython then fails these threads: "bad argument to internal function".
    """
    classes: list[type] = []
    left = [*kinds]
    while left:
        classes.append(kind := left.pop())
        left += type.__subclasses__(kind)
    return [each for each in gc.get_referrers(*dict.fromkeys(classes)) if issubclass(type(each), kinds)]


# --- gradients --------------------------------------------------------------------------------------------------------

_SCALES = "step.backward(loss) scales the loss, and gradients are unscaled once they are summed; leave this call out"


def meet_scaler(scaler: Any) -> None:
    """From now on the calls of a GradScaler that was handed over are refused."""
    _refuse(scaler, "step", f"scaler.step: {_STEPS}; leave this call out")
    if scaler.is_enabled():
        for name in ("scale", "unscale_", "update"):
            _refuse(scaler, name, f"scaler.{name}: {_SCALES}")


def meet_stray_scalers(known: object) -> None:
    """From now on other scalers refuse to scale: their losses would be summed as they are."""
    for each in _instances(GradScaler):
        if each is not known and each.is_enabled():
            _refuse(each, "scale", "scaler.scale: expected hf.prepare(..., scaler=scaler), and this call left out")


_CLIPPING = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
_models: list[nn.Module] = []
"""Whose gradients are not to be clipped: none until one is met, then one."""


def meet_clipping(model: nn.Module) -> None:
    """Has torch's functions that clip gradients refuse those of a model, wherever they were imported."""
    if not _models:
        replaced: dict[int, Any] = {}
        for name in _CLIPPING:
            original = getattr(torch.nn.utils, name)
            replaced[id(original)] = refusing = _refusing(name, original)
            setattr(torch.nn.utils, name, refusing)
            setattr(torch.nn.utils.clip_grad, name, refusing)
        replace_imported(replaced)
    _models[:] = [model]


def _refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def clip(parameters: Any, *args: Any, **options: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ours = {id(parameter) for parameter in _models[0].parameters()}
        if any(id(each) in ours for each in given):
            raise ConfigError(
                f"{name}: gradients can be clipped once those of all items are summed: expected "
                "hf.prepare(..., clip_norm=), and this call left out"
            )
        return original(given, *args, **options)

    return clip


class Divisors:
    """What losses were divided by in a step: the mean over a step's items is made by Holdfast."""

    def __init__(self) -> None:
        self._seen: set[float] = set()

    def note(self, loss: Tensor) -> None:
        """Notes what a loss was divided by at last, if by a number."""
        made_by = loss.grad_fn
        name = "" if made_by is None else made_by.name()
        other = getattr(made_by, "_saved_other", None) if name in ("DivBackward0", "MulBackward0") else None
        if isinstance(other, Tensor) and other.numel() == 1 and not other.requires_grad and (value := other.item()):
            self._seen.add(float(value) if name == "DivBackward0" else 1 / float(value))

    def warning(self, numbers: Collection[int]) -> str:
        """Says that a loss was divided by one of these, if it was; more than 1 of them count."""
        found = [number for number in numbers if number > 1 and any(abs(each - number) < 1e-6 for each in self._seen)]
        if not found:
            return ""
        return (
            f"the loss is divided by {found[0]}, as many items as a step or a worker has; gradients of a step are the "
            "mean over its items already, and so are too small by that: expected step.backward(loss) with the loss of "
            "an item by itself"
        )
