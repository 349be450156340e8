"""What a user's script trains: a model with its optimizers and what else belongs to its state."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ConfigError
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.loss_scale import LossScaling
from holdfast.optim.mirror import Mirror
from holdfast.runtime.loop.buckets import BUCKET_BYTES, Bucket, make_buckets
from holdfast.runtime.loop.failing import SimulatedFailure

__all__ = ["Failing", "Prepared", "Stateful", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A simulated failure, as it strikes.

    Attributes:
        step: of which step.
        layers: the buckets whose sums lack some micro-batches.
        microbatches: which, by global number.
        replays: whether the step is made again then.
    """

    step: int
    layers: frozenset[int]
    microbatches: frozenset[int]
    replays: bool


class Stateful(Protocol):
    """Anything whose state can be told and taken back, as schedulers, datasets or metrics have it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state: numbers, texts, None, tensors, and lists and dicts of these."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes a state."""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """What is trained.

    Attributes:
        model: the model.
        optimizers: each over some of its parameters.
        schedulers: whose ``step`` is called after each step.
        scaling: how the loss is scaled; None: it is not.
        clip_norm: largest norm of the mean gradient over the whole model; None for no limit.
        buckets: the model's parameters and buffers in the parts that are summed.
        objects: what else changes between steps.
        failure: one that is simulated; None if none is.
        failing: what it comes to; None until the loop is known.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaling: LossScaling | None
    clip_norm: float | None
    buckets: tuple[Bucket, ...]
    trained: tuple[tuple[nn.Parameter, ...], ...] = field(init=False)
    """Per bucket, the parameters that have gradients."""
    _given: frozenset[int] = field(init=False)
    """The identities of all that the optimizers have."""
    objects: list[Stateful] = field(default_factory=list)
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    """Means of what was logged, by step, until the loop asks."""
    failure: SimulatedFailure | None = None
    failing: Failing | None = None

    def __post_init__(self) -> None:
        """What is trained stays what it was when it was handed over."""
        self.trained = tuple(tuple(p for p in bucket.parameters() if p.requires_grad) for bucket in self.buckets)
        self._given = frozenset(id(p) for o in self.optimizers for group in o.param_groups for p in group["params"])

    def check_unchanged(self) -> None:
        """Checks that the same parameters are trained, by the same optimizers, as when they were handed over.

        Raises:
            ConfigError: they are not; it names one of them.
        """
        known = {id(parameter) for row in self.trained for parameter in row}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad != (id(parameter) in known):
                now, before = ("trained", "frozen") if parameter.requires_grad else ("frozen", "trained")
                raise ConfigError(
                    f"parameter {name} is {now}, and was {before} at hf.prepare; expected the same to the end"
                )
        for optimizer in self.optimizers:
            if strange := sum(id(p) not in self._given for group in optimizer.param_groups for p in group["params"]):
                raise ConfigError(
                    f"{type(optimizer).__name__} was given {strange} more parameters behind hf.prepare; expected before"
                )

    @property
    def compiled(self) -> bool:
        """Whether some of the model is compiled: then nobody promises that all processes compute the same bits."""
        return any(
            isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
            for module in self.model.modules()
        )

    def fail(self, microbatches: int, steps_per_epoch: int) -> None:
        """Learns how many micro-batches a step has, and steps an epoch, by which a simulated failure strikes.

        Raises:
            ConfigError: it cannot be as it was wanted.
        """
        failure = self.failure
        if failure is None:
            return
        if failure.workers > microbatches:
            raise ConfigError(f"SimulatedFailure: {failure.workers} workers, and a step has {microbatches} items")
        absent = _absent(self.model, failure)
        self.failing = Failing(
            step=failure.step_of(steps_per_epoch),
            layers=frozenset(at for at, row in enumerate(self.trained) if any(id(p) in absent for p in row)),
            microbatches=failure.microbatches(microbatches),
            replays=failure.recovery == "rollback",
        )

    def factory_of(self, bucket: int) -> OptimizerFactory:
        """Returns what makes the optimizer of one bucket."""
        trained = self.trained[bucket]
        owner = next((o for o in map(self.optimizer_of, trained) if o is not None), self.optimizers[0])
        return Mirror(owner, trained)

    def optimizer_of(self, parameter: nn.Parameter) -> Optimizer | None:
        """Returns the optimizer that updates a parameter, if any."""
        for optimizer in self.optimizers:
            if any(parameter is each for group in optimizer.param_groups for each in group["params"]):
                return optimizer
        return None

    def take_logged(self, step: int) -> dict[str, float]:
        """Returns the means of what was logged of a step's items; what there is of earlier steps is dropped."""
        for earlier in [each for each in list(self.logged) if each < step]:
            del self.logged[earlier]
        return self.logged.pop(step, {})

    def advance(self) -> None:
        """A step is over: schedulers take theirs."""
        for scheduler in self.schedulers:
            scheduler.step()

    def tell(self) -> str:
        """Returns all state that is not the model's or the optimizer's of its parameters, as JSON."""
        return json.dumps(
            {
                "groups": [[_settings(g) for g in o.param_groups] for o in self.optimizers],
                "schedulers": [_plain(s.state_dict(), "the scheduler") for s in self.schedulers],
                "objects": [_plain(o.state_dict(), f"hf.state({type(o).__name__})") for o in self.objects],
            },
            sort_keys=True,
        )

    def take(self, told: str) -> None:
        """Takes what `tell` returned.

        Raises:
            ConfigError: it is of another script.
        """
        state = json.loads(told)
        for name, ours in (("optimizers", self.optimizers), ("schedulers", self.schedulers), ("objects", self.objects)):
            if len(there := state[name if name != "optimizers" else "groups"]) != len(ours):
                raise ConfigError(f"a state has {len(there)} {name}, the script has {len(ours)}")
        for optimizer, groups in zip(self.optimizers, state["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update({key: _like(value, group.get(key)) for key, value in settings.items()})
        stateful = zip((*self.schedulers, *self.objects), (*state["schedulers"], *state["objects"]), strict=True)
        for each, told_state in stateful:
            each.load_state_dict(_whole(told_state))


def prepare(
    model: nn.Module,
    given: tuple[Optimizer | SimulatedFailure, ...],
    *,
    schedulers: tuple[Any, ...] = (),
    scaler: Any = None,
    clip_norm: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Prepared:
    """Takes over what a script trains: its optimizers and schedulers are stepped by us from now on.

    Where a failure is simulated, no bucket is both behind it and before it; with ``clip_norm`` each gradient has one of
    its own, as in a real failure, since a norm's last bit depends on what is summed together.

    Raises:
        ConfigError: it cannot be trained like that.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"hf.prepare: expected a torch.nn.Module, got {type(model).__name__}")
    failures = [each for each in given if isinstance(each, SimulatedFailure)]
    optimizers = tuple(each.optimizer if isinstance(each, SimulatedFailure) else each for each in given)
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        kinds = ", ".join(type(each).__name__ for each in optimizers) or "none"
        raise ConfigError(f"hf.prepare: expected the optimizers of the model behind it, got {kinds}")
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "hf.prepare: scheduler: ReduceLROnPlateau needs a metric; step it between two steps instead"
            )
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(f"hf.prepare: {type(optimizer).__name__} has a parameter that is not the model's")
        if optimizer.state:
            raise ConfigError(f"hf.prepare: {type(optimizer).__name__} has made steps before; expected a new one")
    owners = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    failure = failures[0] if failures else None
    absent = frozenset() if failure is None else _absent(model, failure)
    prepared = Prepared(
        model=model,
        optimizers=optimizers,
        schedulers=schedulers,
        scaling=None if scaler is None else _scaling_of(scaler),
        clip_norm=clip_norm,
        buckets=make_buckets(
            model,
            lambda parameter: owners.get(id(parameter)),
            apart=absent,
            bucket_bytes=1 if failure is not None and clip_norm is not None else bucket_bytes,
        ),
        failure=failure,
    )
    for optimizer in optimizers:
        _refuse(optimizer, "step", f"{type(optimizer).__name__}.step")
        vars(optimizer)["_opt_called"] = True  # schedulers warn if nobody has stepped it
    if scaler is not None:
        _refuse(scaler, "step", "scaler.step")
    return prepared


def _absent(model: nn.Module, failure: SimulatedFailure) -> frozenset[int]:
    """Returns the identities of the parameters whose gradients are summed behind a failure, without the casualties'."""
    named = reversed(list(model.named_parameters()))
    backward = [(name, id(p)) for name, p in named if p.requires_grad and p.numel()]
    return frozenset(parameter for _, parameter in backward[failure.standing([name for name, _ in backward]) :])


def _refuse(owner: object, name: str, what: str) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(
            f"{what}: Holdfast makes the step once all gradients are there, when the loop over the items of a step "
            "ends; leave this call out"
        )

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers warn if it is another one than they met
    setattr(owner, name, refuse)


def _scaling_of(scaler: Any) -> LossScaling | None:
    if not scaler.is_enabled():
        return None
    if (scaler.get_growth_factor(), scaler.get_backoff_factor()) != (2.0, 0.5):
        raise ConfigError("hf.prepare: scaler: expected a growth factor of 2 and a backoff factor of 0.5")
    return LossScaling(initial=float(scaler.get_scale()), growth_every=int(scaler.get_growth_interval()))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value, f"setting {key} of the optimizer") for key, value in group.items() if key != "params"}


_TENSOR = "__tensor__"


def _plain(value: Any, what: str) -> Any:
    """Returns a state in the form of JSON; tensors as text.

    Raises:
        ConfigError: something in it is nothing of the kind.
    """
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        text = base64.b64encode(data.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        return {_TENSOR: [str(data.dtype).removeprefix("torch."), list(data.shape), text]}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise ConfigError(f"{what}: keys of its state are not all texts or numbers")
        return {"__dict__": [[key, _plain(each, what)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(each, what) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{what}: its state holds a {type(value).__name__}; expected numbers, texts, None, tensors, lists and dicts"
    )


def _whole(value: Any) -> Any:
    """Returns what ``_plain`` was given; tuples as lists."""
    if isinstance(value, dict) and _TENSOR in value:
        dtype, shape, text = value[_TENSOR]
        data = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        return data.view(getattr(torch, dtype)).reshape(shape).clone()
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value["__dict__"]}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return value


def _like(value: Any, there: Any) -> Any:
    """A setting as the optimizer had it: JSON makes lists of tuples."""
    whole = _whole(value)
    return tuple(whole) if isinstance(there, tuple) else whole
