"""Calls that everybody's loop has, and whose work Holdfast does: what is meant is done, or the call is an error.

Gradients, until the items of a step are summed, are those of one item alone: to clip or to zero them behind its
backward pass would train another model, or none. An error is raised by the call itself, so that it names the line.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from holdfast.errors import ConfigError
from holdfast.optim.mirror import is_mirror
from holdfast.runtime.loop.leftovers import replace_imported

__all__ = [
    "Divisors",
    "GradientsAway",
    "StrayOptimizers",
    "advance",
    "has_stray_average",
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


def has_stray_average(model: nn.Module, known: Sequence[object]) -> bool:
    """Returns whether the script has an average of such a model whose state nobody was told of.

    Args:
        model: which.
        known: objects whose state is told; they may have the average in an attribute.
    """
    told = {id(held) for each in known for held in (each, *getattr(each, "__dict__", {}).values())}
    averages = (each for each in _instances(AveragedModel) if type(each.module) is type(model))
    return any(id(each) not in told for each in averages)


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


_CLIPPING = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")
_models: list[nn.Module] = []
"""Whose gradients are not to be clipped: none until one is met, then one."""


def meet_clipping(model: nn.Module) -> None:
    """Has torch's functions that clip gradients refuse those of a model, wherever they were imported."""
    if not _models:
        replaced: dict[int, Any] = {}
        for name in (each for each in _CLIPPING if hasattr(torch.nn.utils, each)):
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


class GradientsAway:
    """Between two steps the gradients are gone: to clip them there, or to log their norm, would be nothing at all.

    So whoever reads one there is told, in the first steps that run here; later that would only cost time.

    Args:
        model: whose gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._left = _LOOKED_AT
        self._thread = threading.get_ident()
        self._stack = ExitStack()

    def begin(self) -> None:
        """A step is over."""
        if self._left:
            self._left -= 1
            nn.Parameter.grad = property(self._read, _GRAD.__set__, _GRAD.__delete__)  # type: ignore[assignment]
            self._stack.callback(delattr, nn.Parameter, "grad")

    def end(self) -> None:
        """Another one begins."""
        self._stack.close()

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Within it is the loop; behind it nobody looks."""
        try:
            yield
        finally:
            self.end()

    def _read(self, parameter: nn.Parameter) -> Tensor | None:
        found: Tensor | None = _GRAD.__get__(parameter)
        if found is not None or id(parameter) not in self._names or threading.get_ident() != self._thread:
            return found
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if asks.partition(".")[0] in ("torch", "holdfast"):  # such as model.zero_grad()
            return None
        raise ConfigError(
            f"the gradient of {self._names[id(parameter)]} was read between two steps: the step is made, and gradients "
            "are gone, so that nothing would come of it; expected hf.prepare(..., clip_norm=) to clip them, "
            "p.register_hook(...) for whatever else is done to them or logged of them (step.log), and zeroing left out"
        )


_LOOKED_AT = 2
_GRAD: Any = Tensor.grad


class StrayOptimizers:
    """Optimizers that nobody handed over: what they update would be another thing in each worker, or nothing.

    Args:
        trained: the parameters that are trained, by name.
        optimizers: those that were handed over.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        self._trained = {id(parameter): name for name, parameter in trained.items()}
        self._known, self._others = optimizers, dict[int, Tensor]()

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Within it, their steps are refused, and to make one over what is trained."""
        original = Optimizer.add_param_group

        @wraps(original)
        def add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
            original(optimizer, group)
            if not any(optimizer is each for each in self._known):
                self._look(optimizer, (), {})

        handle = register_optimizer_step_pre_hook(self._look)
        setattr(Optimizer, original.__name__, add_param_group)
        try:
            yield
        finally:
            setattr(Optimizer, original.__name__, original)
            handle.remove()

    def note(self, loss: Tensor) -> None:
        """Notes which parameters, besides those that are trained, get a gradient of this loss."""
        self._others.update({id(leaf): leaf for leaf in _leaves(loss) if id(leaf) not in self._trained})

    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_mirror(optimizer):
            return
        kind, given = type(optimizer).__name__, [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in given:
            if (name := self._trained.get(id(parameter))) is not None:
                raise ConfigError(
                    f"{kind}: {name} is trained by the optimizer that was handed to hf.prepare, and another one would "
                    "never be stepped; expected that one, its param_groups or its state changed between two steps"
                )
            if id(parameter) in self._others:
                raise ConfigError(
                    f"{kind}.step: its parameters {tuple(parameter.shape)} have gradients of this worker's items "
                    "alone; expected this optimizer in hf.prepare(model, ..., optimizer), and its parameters in the "
                    "model, such as model.more = nn.Parameter(...)"
                )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """What a backward pass of the loss adds a gradient to."""
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            yield variable
        left += [before for before, _ in node.next_functions]


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
