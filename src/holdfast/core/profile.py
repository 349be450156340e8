"""What operations cost: measured profiles, and the costs that schedulers and the evaluator work with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain

from holdfast.core.placement import LayerRange
from holdfast.core.schedule import OpKind
from holdfast.errors import ConfigError, InfeasiblePlan

__all__ = [
    "Costs",
    "GpuProfile",
    "LayerProfile",
    "Link",
    "Profile",
    "StageCosts",
    "costs_from_profile",
    "parse_costs",
    "uniform_profile",
    "unit_costs",
]

_MOST = 1e18
"""Sums of numbers up to this one are finite, too."""
_AT_ONCE = 1e18
"""Bytes per second of a link that takes no time worth mentioning."""
_ROUNDING = 1e-9
"""What parts of a number may add up to beyond it, relative to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """Times of one layer, in seconds, on a stage of several accelerators."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    def __post_init__(self) -> None:
        _check_numbers(self, "a layer on several accelerators")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer as measured for one micro-batch.

    Attributes:
        name: its name in the model.
        forward_s: seconds of F.
        backward_input_s: seconds of I.
        backward_weight_s: seconds of W.
        held_after_forward_bytes: memory that a micro-batch holds after F, until I or B.
        held_after_input_bytes: memory that it holds after I, until W; may be more, where a forward pass is run again.
        boundary_bytes: size of the layer's output, which is sent where the pipeline is cut after it.
        parameter_bytes: size of its parameters.
        optimizer_bytes: size of their optimizer state.
        optimizer_s: seconds of its optimizer step.
        backward_s: seconds of B; None: I and W together take ``split_s`` longer.
        split_s: seconds by which I and W, run apart, take longer than B.
        spread: distance between the quartiles of what was measured, in seconds, by the name of the time.
        by_gpus: times on 2, 4, ... accelerators, by their number as text.
    """

    name: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    held_after_forward_bytes: int
    held_after_input_bytes: int
    boundary_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    optimizer_s: float = 0.0
    backward_s: float | None = None
    split_s: float = 0.0
    spread: Mapping[str, float] = field(default_factory=dict, hash=False)
    by_gpus: Mapping[str, GpuProfile] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_numbers(self, f"layer {self.name!r}")
        if self.split_s > self.backward_input_s + self.backward_weight_s:
            raise ConfigError(f"layer {self.name!r}: split_s = {self.split_s} is more than I and W take together")

    @property
    def state_bytes(self) -> int:
        """What another worker needs to hold this layer: its parameters and their optimizer state."""
        return self.parameter_bytes + self.optimizer_bytes

    def on(self, gpus: int) -> LayerProfile:
        """Returns this layer with its times on so many accelerators, which share it.

        Raises:
            ConfigError: it has none.
        """
        if gpus == 1:
            return self
        times = self.by_gpus.get(str(gpus))
        if times is None:
            raise ConfigError(
                f"layer {self.name!r} has no times on {gpus} GPUs: expected by_gpus.{gpus} in the profile of every "
                "layer"
            )
        return replace(
            self,
            forward_s=times.forward_s,
            backward_input_s=times.backward_input_s,
            backward_weight_s=times.backward_weight_s,
            backward_s=None,
            split_s=0.0,
        )

    def seconds_of(self, kind: OpKind) -> float:
        """Returns how long one operation on one micro-batch takes."""
        split = self.backward_input_s + self.backward_weight_s
        return {
            OpKind.F: self.forward_s,
            OpKind.I: self.backward_input_s,
            OpKind.W: self.backward_weight_s,
            OpKind.B: split - self.split_s if self.backward_s is None else self.backward_s,
        }[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection between two workers: a message of n bytes takes ``latency_s + n / bytes_per_s`` seconds.

    Attributes:
        latency_s: seconds that any message takes.
        bytes_per_s: how fast its bytes follow.
        spread: distance between the quartiles of what was measured, in seconds, by the size of the message in bytes.
    """

    latency_s: float
    bytes_per_s: float
    spread: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf or not 0 < self.bytes_per_s < math.inf:
            raise ConfigError(
                f"a link needs latency_s >= 0 and bytes_per_s > 0, not {self.latency_s}, {self.bytes_per_s}"
            )

    @property
    def takes_no_time(self) -> bool:
        """Whether no message of any size travels for a time worth mentioning."""
        return self.latency_s == 0 and self.bytes_per_s >= _AT_ONCE

    def seconds_of(self, size_bytes: float) -> float:
        """Returns how long a message travels."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What ``holdfast profile`` measured.

    Attributes:
        layers: the layers of the model, in order; at least one.
        link: the connection between workers.
        machine: what it was measured on, for people.
        iterations: how often each time was measured; the times are medians. 0: they were not measured.
        estimated: whether the times were computed from numbers of operations and bytes instead.
    """

    layers: tuple[LayerProfile, ...]
    link: Link
    machine: Mapping[str, str | int | float] = field(default_factory=dict, hash=False)
    iterations: int = 0
    estimated: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a profile needs at least one layer, found none")
        if self.iterations < 0:
            raise ConfigError(f"a profile's iterations = {self.iterations} are impossible, expected a number from 0")

    def seconds_of(self, kind: OpKind, layers: LayerRange) -> float:
        """Returns how long one operation takes a worker that holds these layers."""
        return sum(self.layers[layer].seconds_of(kind) for layer in layers.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What one micro-batch costs a worker: the sums over its layers, in the units of the :class:`Costs` they come from.

    Attributes:
        forward: time of F.
        input: time of I within B.
        weight: time of W. B takes ``input + weight``.
        optimizer: time of the optimizer step.
        takes: memory taken at the start of F.
        gives_input: memory given back at the end of I.
        gives_weight: memory given back at the end of W. The end of B gives back both.
        capacity: memory of the worker; None: no limit.
        split: by how much I takes longer apart from W than within B.
        state: memory that its layers take all the time, whatever is run.
    """

    forward: float
    input: float
    weight: float
    optimizer: float
    takes: float
    gives_input: float
    gives_weight: float
    capacity: float | None
    split: float = 0
    state: float = 0

    @property
    def room(self) -> float | None:
        """Memory that is left for micro-batches, below 0 if not even the state fits; None: no limit."""
        return None if self.capacity is None else self.capacity - self.state

    def times(self, factor: float) -> StageCosts:
        """Returns the costs of a worker that is so many times as slow; its memory is the same."""
        return replace(
            self,
            forward=factor * self.forward,
            input=factor * self.input,
            weight=factor * self.weight,
            optimizer=factor * self.optimizer,
            split=factor * self.split,
        )

    def check_memory(self, who: str, microbatches: int) -> None:
        """Checks that a worker can run so many micro-batches at all, one after another.

        Raises:
            InfeasiblePlan: its memory is too small; the message begins with ``who``.
        """
        kept = self.takes - self.gives_input - self.gives_weight
        needed = self.state + self.takes + kept * (microbatches - 1)
        if microbatches and self.capacity is not None and needed > self.capacity * (1 + 1e-12):
            of_it = f", {self.state} of it for the state of its layers" if self.state else ""
            raise InfeasiblePlan(
                f"{who} has {self.capacity} of memory, but its {microbatches} micro-batches need at least {needed}, "
                f"even one after another{of_it}: expected that or more"
            )

    @property
    def input_apart(self) -> float:
        """Time of I."""
        return self.input + self.split

    @property
    def backward(self) -> float:
        """Time of B."""
        return self.input + self.weight

    @property
    def total(self) -> float:
        """Time of all operations of one micro-batch, at least."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs per layer, in any unit of time and of memory. Integers stay integers.

    Attributes:
        forward: time of F, one number per layer.
        input: time of I within B.
        weight: time of W.
        optimizer: time of the optimizer step.
        comm: time of a message where the pipeline is cut after layer 0, 1, ...: one number fewer than layers.
        takes: memory that F takes at its start.
        gives_input: memory that the end of I gives back.
        gives_weight: memory that the end of W gives back.
        capacity: memory of a worker whose first layer is 0, 1, ...; None: no limit.
        split: by how much I takes longer apart from W than within B; None: not at all.
        state: memory that a layer takes all the time, for parameters, optimizer state and sums of gradients; None: not
            counted.
        in_flight: a worker has memory for its state and so many micro-batches over all that it holds, if that is less;
            None: no such limit.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    optimizer: tuple[float, ...]
    comm: tuple[float, ...]
    takes: tuple[float, ...]
    gives_input: tuple[float, ...]
    gives_weight: tuple[float, ...]
    capacity: tuple[float, ...] | None = None
    split: tuple[float, ...] | None = None
    state: tuple[float, ...] | None = None
    in_flight: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            values = getattr(self, item.name)
            if isinstance(values, tuple):
                _check_row(item.name, values, len(self.forward) - (item.name == "comm"))
        for layer, taken in enumerate(self.takes):
            given = self.gives_input[layer] + self.gives_weight[layer]
            if given - taken > _ROUNDING * taken:
                raise ConfigError(f"layer {layer} gives back {given} of memory, more than the {taken} that it takes")

    @property
    def num_layers(self) -> int:
        """How many layers these costs are for."""
        return len(self.forward)

    def of(self, *ranges: LayerRange) -> StageCosts:
        """Returns the costs of a worker that holds these layers: at least one range, ascending."""

        def total(of_layers: Sequence[float]) -> float:
            return sum(chain.from_iterable(of_layers[part.start : part.stop] for part in ranges))

        takes, state = total(self.takes), 0 if self.state is None else total(self.state)
        limits: tuple[float, ...] = () if self.capacity is None else (self.capacity[ranges[0].start],)
        limits += () if self.in_flight is None else (state + self.in_flight * takes,)
        return StageCosts(
            forward=total(self.forward),
            input=total(self.input),
            weight=total(self.weight),
            optimizer=total(self.optimizer),
            takes=takes,
            gives_input=total(self.gives_input),
            gives_weight=total(self.gives_weight),
            capacity=min(limits, default=None),
            split=0 if self.split is None else total(self.split),
            state=state,
        )


def unit_costs(num_layers: int) -> Costs:
    """Returns F = I = W = 1 for every layer, free communication and optimizer, and memory counted in micro-batches."""
    ones, zeros = (1,) * num_layers, (0,) * num_layers
    return Costs(
        forward=ones,
        input=ones,
        weight=ones,
        optimizer=zeros,
        comm=zeros[1:],
        takes=ones,
        gives_input=zeros,
        gives_weight=ones,
    )


def uniform_profile(
    num_layers: int,
    *,
    forward_s: float = 0.0,
    backward_input_s: float = 0.0,
    backward_weight_s: float = 0.0,
    optimizer_s: float = 0.0,
    boundary_bytes: int = 0,
    link: Link | None = None,
) -> Profile:
    """Returns a made-up profile of layers that are all alike, on links that take no time unless told otherwise."""
    layers = (
        LayerProfile(
            name=f"layer {index}",
            forward_s=forward_s,
            backward_input_s=backward_input_s,
            backward_weight_s=backward_weight_s,
            held_after_forward_bytes=0,
            held_after_input_bytes=0,
            boundary_bytes=boundary_bytes,
            parameter_bytes=0,
            optimizer_bytes=0,
            optimizer_s=optimizer_s,
        )
        for index in range(num_layers)
    )
    return Profile(layers=tuple(layers), link=link or Link(latency_s=0.0, bytes_per_s=_AT_ONCE))


def parse_costs(
    num_stages: int,
    *,
    costs: str = "1,1,1",
    comm: str = "0",
    optimizer: str = "0",
    split: str | None = None,
    memory: str | None = None,
) -> Costs:
    """Returns the costs that the flags of ``holdfast plan`` describe, for a grid in which each stage is one layer.

    Every number may be given once, or once per stage joined by colons (``comm``: once per cut).

    Args:
        num_stages: stages of a pipeline.
        costs: ``F,I,W``.
        comm: time of a message.
        optimizer: time of the optimizer step.
        split: by how much I takes longer apart from W than within B; None: not at all.
        memory: ``aF,aI,aW,cap``; None: no limit, memory counted in micro-batches.

    Raises:
        ConfigError: a text cannot be read; the message names the flag and what would be right.

    >>> parse_costs(2, costs="10,11:12,8", comm="1").input
    (11, 12)
    """
    forward, input_, weight = _parse_columns("--costs", "F,I,W", costs, num_stages)
    takes, gives_input, gives_weight, *cap = _parse_columns(
        "--memory", "aF,aI,aW,cap", "1,0,1" if memory is None else memory, num_stages, memory is None
    )
    return Costs(
        forward=forward,
        input=input_,
        weight=weight,
        optimizer=_parse_column("--optimizer-cost", optimizer, num_stages),
        comm=_parse_column("--comm", comm, num_stages - 1),
        takes=takes,
        gives_input=gives_input,
        gives_weight=gives_weight,
        capacity=cap[0] if cap else None,
        split=None if split is None else _parse_column("--split-cost", split, num_stages),
    )


def costs_from_profile(
    profile: Profile, *, capacity_bytes: float | None = None, copies: int = 2, sums: int = 2
) -> Costs:
    """Returns costs in seconds and bytes; a worker's are the sums over the layers that its placement gives it.

    Memory is taken at the start of F and only given back then, so where more is held after I than after F, F takes it.

    Args:
        profile: what was measured.
        capacity_bytes: memory of a worker, for its layers' state and its micro-batches; None: no limit.
        copies: how often parameters and optimizer state are held: twice, or once if steps are undone.
        sums: memory for sums of gradients, in sizes of the parameters: see `holdfast.core.sum_order.most_held`.
    """

    def row(value: Callable[[LayerProfile], float]) -> tuple[float, ...]:
        return tuple(value(layer) for layer in profile.layers)

    def held(layer: LayerProfile) -> float:
        return max(layer.held_after_forward_bytes, layer.held_after_input_bytes)

    def split(layer: LayerProfile) -> float:
        more = layer.backward_input_s + layer.backward_weight_s - layer.seconds_of(OpKind.B)
        return min(max(0.0, more), layer.backward_input_s)

    link = profile.link
    return Costs(
        forward=row(lambda layer: layer.forward_s),
        input=row(lambda layer: layer.backward_input_s - split(layer)),
        weight=row(lambda layer: layer.backward_weight_s),
        optimizer=row(lambda layer: layer.optimizer_s),
        comm=row(lambda layer: link.seconds_of(layer.boundary_bytes))[:-1],
        takes=row(held),
        gives_input=row(lambda layer: held(layer) - layer.held_after_input_bytes),
        gives_weight=row(lambda layer: layer.held_after_input_bytes),
        capacity=None if capacity_bytes is None else (capacity_bytes,) * len(profile.layers),
        split=row(split),
        state=row(lambda layer: copies * layer.state_bytes + sums * layer.parameter_bytes),
    )


def _parse_columns(
    flag: str, form: str, text: str, num_stages: int, without_last: bool = False
) -> list[tuple[float, ...]]:
    columns = text.split(",")
    if len(columns) != form.count(",") + 1 - without_last:
        raise ConfigError(f"{flag} {text}: expected {form}, found {len(columns)} number(s)")
    return [_parse_column(flag, column, num_stages) for column in columns]


def _parse_column(flag: str, text: str, count: int) -> tuple[float, ...]:
    values = tuple(_parse_number(flag, value) for value in text.split(":"))
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ConfigError(f"{flag}: {text} has {len(values)} numbers, expected one, or {count} joined by colons")
    return values


def _parse_number(flag: str, text: str) -> float:
    try:
        value = int(text) if text.strip().isdecimal() else float(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is no number") from error
    if not 0 <= value <= _MOST:
        raise ConfigError(f"{flag}: {text} is impossible, expected a number from 0 to {_MOST:g}")
    return value


def _check_row(name: str, values: tuple[float, ...], count: int) -> None:
    if len(values) != count:
        raise ConfigError(f"costs.{name} has {len(values)} numbers, expected {count}")
    for layer, value in enumerate(values):
        if not 0 <= value < math.inf:
            raise ConfigError(f"costs.{name}[{layer}] = {value} is impossible, expected a finite number from 0")


def _check_numbers(value: GpuProfile | LayerProfile, what: str) -> None:
    for item in fields(value):
        number = getattr(value, item.name)
        if isinstance(number, int | float) and not 0 <= number <= _MOST:
            raise ConfigError(f"{what}: {item.name} = {number} is impossible, expected a number from 0 to {_MOST:g}")
