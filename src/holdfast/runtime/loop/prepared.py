"""What a user's script trains: a model with its optimizers and what else belongs to its state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.config.deciding import spelled
from holdfast.data.feeds import Streamed
from holdfast.data.told import plain, whole
from holdfast.errors import ConfigError
from holdfast.optim.digest import STORED_TYPES, tensors_sha256
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.loss_scale import LossScaling
from holdfast.optim.mirror import Mirror
from holdfast.runtime.loop.buckets import BUCKET_BYTES, Bucket, make_buckets
from holdfast.runtime.loop.facts import facts_path, optimizer_facts, scheduler_facts
from holdfast.runtime.loop.failing import SimulatedFailure
from holdfast.runtime.loop.habits import (
    advance,
    meet_clipping,
    meet_loading,
    meet_optimizer,
    meet_scaler,
    meet_scheduler,
    meet_stray_scalers,
)
from holdfast.runtime.loop.taking import Changes, take_groups, take_schedule

__all__ = ["Failing", "Prepared", "Stateful", "ToldState", "prepare", "told_state"]

_HOST = torch.device("cpu")


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


class ToldState(NamedTuple):
    """State that is of no bucket: JSON, the tensors that it refers to by number, which of them are on the device.

    None: it is not known; those that are there now.
    """

    text: str
    tensors: Sequence[Tensor] = ()
    apart: Sequence[int] | None = None


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
        device: where the model is.
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
    streamed: Streamed | None = None
    """The data of the loop, if they come one behind the other."""
    logged: dict[int, dict[str, tuple[float, int]]] = field(default_factory=dict)
    """Sum of what was logged, and how many values that are, by step, until the loop asks."""
    ends: int | None = None
    """The step before which the loop was stopped; None: it was not."""
    device: torch.device = _HOST
    failure: SimulatedFailure | None = None
    failing: Failing | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What decides bits of the optimizers and schedulers, as the script gives them; empty until the loop begins."""
    about: dict[str, Any] = field(default_factory=dict)
    """What the model's ``state_dict`` calls each parameter or buffer, and names by optimizer and group: for exports."""
    _changes: Changes = field(default_factory=Changes)
    """While a state is taken: how ``facts`` differ from what they were there."""
    _first: list[Any] = field(default_factory=list)
    """The state that each scheduler begins with."""
    _stepping: list[Optimizer] = field(default_factory=list)
    """The optimizers some of whose parameters this step has updated."""

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
    def named(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

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

    def begin(self) -> None:
        """The loop begins: from now on optimizers and schedulers have the state that we give them."""
        for optimizer in self.optimizers:
            _take_values(optimizer)
            _check_state(optimizer)
            meet_loading(optimizer)
        self.facts = {
            **optimizer_facts(self.optimizers, self.model),
            **scheduler_facts(self.schedulers),
            "state": [type(each).__name__ for each in self.objects],
        }
        self.about = {
            "names": _names_in_state_dict(self.model),
            "groups": [
                self.facts[f"{facts_path('optimizer', index, len(self.optimizers))}.groups"]
                for index in range(len(self.optimizers))
            ],
        }
        self._first = [_copied(each.state_dict(), "the scheduler") for each in self.schedulers]

    def fingerprint(self) -> str:
        """Returns a digest of the model's parameters and buffers and of the state of its optimizers: names and bits."""
        model = self.model
        named: dict[str, Tensor] = {
            name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())
        }
        for number, optimizer in enumerate(self.optimizers):
            for name, parameter in model.named_parameters():
                for key, value in optimizer.state.get(parameter, {}).items():
                    whole = (
                        value if isinstance(value, Tensor) else torch.tensor(float("nan") if value is None else value)
                    )
                    named[f"optimizer {number}: {name} {key}"] = whole
        return tensors_sha256(named)

    def factory_of(self, bucket: int) -> OptimizerFactory:
        """Returns what makes the optimizer of one bucket."""
        return Mirror(self._owner_of(bucket), self.trained[bucket], self._steps_now)

    def _owner_of(self, bucket: int) -> Optimizer:
        return next((o for o in map(self.optimizer_of, self.trained[bucket]) if o is not None), self.optimizers[0])

    def _steps_now(self, optimizer: Optimizer) -> None:
        """One of its mirrors is about to make a step; with the first one, the optimizer itself seems to."""
        if not any(optimizer is each for each in self._stepping):
            self._stepping.append(optimizer)
            for hook in tuple(optimizer._optimizer_step_pre_hooks.values()):
                hook(optimizer, (), {})

    def optimizer_of(self, parameter: nn.Parameter) -> Optimizer | None:
        """Returns the optimizer that updates a parameter, if any."""
        for optimizer in self.optimizers:
            if any(parameter is each for group in optimizer.param_groups for each in group["params"]):
                return optimizer
        return None

    def take_logged(self, step: int) -> dict[str, tuple[float, int]]:
        """Returns what was logged of a step's items, as sums and numbers; what there is of earlier steps is dropped."""
        for earlier in [each for each in list(self.logged) if each < step]:
            del self.logged[earlier]
        return self.logged.pop(step, {})

    def advance(self, *, counts: bool = True) -> None:
        """All parameters are updated: step hooks are called, and, if the step ``counts``, schedulers take theirs."""
        stepping, self._stepping = self._stepping, []
        for optimizer in stepping:
            for hook in tuple(optimizer._optimizer_step_post_hooks.values()):
                hook(optimizer, (), {})
        if not counts:
            return
        for scheduler in self.schedulers:
            advance(scheduler)

    def tell(self) -> ToldState:
        """Returns all state that is not the model's or the optimizer's of its parameters; it shares its memory."""
        tensors: list[Tensor] = []
        text = json.dumps(
            {
                "groups": [[_settings(g, tensors) for g in o.param_groups] for o in self.optimizers],
                "schedulers": [_told(s.state_dict(), "the scheduler", tensors) for s in self.schedulers],
                "objects": [_told(o.state_dict(), f"hf.state({type(o).__name__})", tensors) for o in self.objects],
            },
            sort_keys=True,
        )
        return ToldState(text, tuple(tensors), tuple(n for n, each in enumerate(tensors) if each.device != _HOST))

    def take(self, told: ToldState) -> None:
        """Takes what `tell` returned.

        Raises:
            ConfigError: it is of another script.
        """
        if self.device != _HOST:
            apart = frozenset(self.tell().apart or () if told.apart is None else told.apart)
            tensors = [each.to(self.device) if n in apart else each for n, each in enumerate(told.tensors)]
            told = ToldState(told.text, tensors)
        state, changes = told_state(told), self._changes
        for name, ours in (("optimizers", self.optimizers), ("schedulers", self.schedulers), ("objects", self.objects)):
            number = len(state[name if name != "optimizers" else "groups"])
            if number != len(ours) and not (name == "schedulers" and changes.of_schedules()):
                raise ConfigError(f"a state has {number} {name}, the script has {len(ours)}")
        for index, (optimizer, groups) in enumerate(zip(self.optimizers, state["groups"], strict=True)):
            take_groups(optimizer, facts_path("optimizer", index, len(self.optimizers)), groups, changes)
        if not changes.of_schedules():
            for index, (scheduler, schedule) in enumerate(zip(self.schedulers, state["schedulers"], strict=True)):
                path = facts_path("scheduler", index, len(self.schedulers))
                first = self._first[index] if self._first else {}
                take_schedule(scheduler, path, schedule, first, changes)
        for each, kept in zip(self.objects, state["objects"], strict=True):
            each.load_state_dict(kept)

    @contextmanager
    def as_of(self, facts: Mapping[str, Any] | None) -> Iterator[None]:
        """Within it, a state is taken of a run whose ``facts`` were these: where ours differ, ours count.

        None: it is not known what they were, and all is as it was there.
        """
        self._changes = Changes() if facts is None else Changes(before=facts, now=spelled(self.facts))
        try:
            yield
        finally:
            self._changes = Changes()

    def begins_anew(self, bucket: int) -> bool:
        """Whether a state that is taken has nothing for the optimizer of a bucket, which is of another class."""
        owner = self._owner_of(bucket)
        index = next(index for index, each in enumerate(self.optimizers) if each is owner)
        return self._changes.reshape(facts_path("optimizer", index, len(self.optimizers)))


def prepare(
    model: nn.Module,
    given: tuple[Optimizer | SimulatedFailure, ...],
    *,
    schedulers: tuple[Any, ...] = (),
    scaler: Any = None,
    clip_norm: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    device: torch.device = _HOST,
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
    _check_places(model, device)
    _check_kinds(model, optimizers)
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
        device=device,
        failure=failure,
    )
    for optimizer in optimizers:
        meet_optimizer(optimizer)
    for scheduler in schedulers:
        meet_scheduler(scheduler)
    if scaler is not None:
        meet_scaler(scaler)
    meet_stray_scalers(scaler)
    meet_clipping(model)
    return prepared


def _names_in_state_dict(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of a name and the one that it has with us: a parameter that is used twice is there twice."""
    known = {id(value): name for name, value in (*model.named_parameters(), *model.named_buffers())}
    found = model.state_dict(keep_vars=True).items()
    return [(name, known[id(value)]) for name, value in found if id(value) in known]


def _check_places(model: nn.Module, device: torch.device) -> None:
    """Checks that the model is where it is computed.

    Raises:
        ConfigError: something of it is not.
    """
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.device != device:
                raise ConfigError(
                    f"hf.prepare: {kind} {name} is on {tensor.device}, and train.device says that this worker computes "
                    f"on {device}; expected model.to(hf.device) before the optimizer is made"
                )


def _check_kinds(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuses what cannot be summed by items, or updated in buckets.

    Raises:
        ConfigError: there is something of the kind; says what to do instead.
    """
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"hf.prepare: parameter {name} has no shape yet: it is a Lazy module's; run the model once on a sample "
                "before, under torch.no_grad()"
            )
        if parameter.is_complex():
            raise ConfigError(
                f"hf.prepare: parameter {name} is {parameter.dtype}, and complex gradients are not summed; expected a "
                "real parameter, of which the forward pass takes torch.view_as_complex(parameter)"
            )
    places: dict[tuple[torch.device, int], str] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() and (first := places.setdefault((parameter.device, parameter.data_ptr()), name)) != name:
            raise ConfigError(
                f"hf.prepare: parameters {first} and {name} share their memory, and each would be trained by itself; "
                "expected one parameter in both places: module.weight = other.weight"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"hf.prepare: {name or type(module).__name__} has sparse gradients; expected sparse=False"
            )
    for optimizer in optimizers:
        for attribute, value in vars(optimizer).items():
            if isinstance(value, Optimizer):
                raise ConfigError(
                    f"hf.prepare: {type(optimizer).__name__} has another optimizer in its attribute {attribute!r}, "
                    f"which nobody would step; expected that one, a {type(value).__name__}, by itself"
                )
        if instead := _INSTEAD.get(type(optimizer).__name__):
            raise ConfigError(f"hf.prepare: {type(optimizer).__name__} {instead}")


_INSTEAD = {
    "LBFGS": "computes the loss several times in a step, and its state is of all parameters together; expected an "
    "optimizer that makes a step of gradients, such as AdamW",
    "SparseAdam": "is for sparse gradients, which are not summed; expected AdamW, and sparse=False in the Embedding",
}


def _take_values(optimizer: Optimizer) -> None:
    """Settings that are tensors of one element become numbers: what changes in place could not be compared or kept."""
    for group in optimizer.param_groups:
        numbers = {k: v.item() for k, v in group.items() if isinstance(v, Tensor) and v.numel() == 1}
        group.update(numbers)


def _check_state(optimizer: Optimizer) -> None:
    """Checks that what an optimizer has already is of parameters, and of what can be kept.

    Raises:
        ConfigError: it is not.
    """
    kind = type(optimizer).__name__
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise ConfigError(f"hf.steps: {kind} has state {parameter!r} that is of no parameter, and cannot be shared")
        for key, value in entries.items():
            if not (value is None or isinstance(value, Tensor | int | float)):
                raise ConfigError(
                    f"hf.steps: {kind}: its state {key!r} of a parameter is a {type(value).__name__}; expected tensors "
                    "and numbers"
                )


def _absent(model: nn.Module, failure: SimulatedFailure) -> frozenset[int]:
    """Returns the identities of the parameters whose gradients are summed behind a failure, without the casualties'."""
    named = reversed(list(model.named_parameters()))
    backward = [(name, id(p)) for name, p in named if p.requires_grad and p.numel()]
    return frozenset(parameter for _, parameter in backward[failure.standing([name for name, _ in backward]) :])


def _scaling_of(scaler: Any) -> LossScaling | None:
    if not scaler.is_enabled():
        return None
    if (scaler.get_growth_factor(), scaler.get_backoff_factor()) != (2.0, 0.5):
        raise ConfigError("hf.prepare: scaler: expected a growth factor of 2 and a backoff factor of 0.5")
    return LossScaling(initial=float(scaler.get_scale()), growth_every=int(scaler.get_growth_interval()))


def _settings(group: Mapping[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key != "params"}
    return {key: _told(value, f"setting {key} of the optimizer", tensors) for key, value in settings.items()}


def told_state(told: ToldState) -> dict[str, list[Any]]:
    """Returns what was told: ``groups`` by optimizer, ``schedulers`` and ``objects``; tensors are copies."""
    state = json.loads(told.text)
    return {
        "groups": [
            [{key: whole(value, told.tensors) for key, value in group.items()} for group in groups]
            for groups in state["groups"]
        ],
        "schedulers": [whole(each, told.tensors) for each in state["schedulers"]],
        "objects": [whole(each, told.tensors) for each in state["objects"]],
    }


def _copied(state: Any, what: str) -> Any:
    tensors: list[Tensor] = []
    return whole(_told(state, what, tensors), tensors)


def _told(value: Any, what: str, tensors: list[Tensor]) -> Any:
    return plain(value, what, tensors, STORED_TYPES)
